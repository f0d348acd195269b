"""Asks the executor for scores: what is asked at one time at once, and equal models on equal data once in a round."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, TypeVar

from coterie.data.sequences import DataSet
from coterie.engines.setting import Setting
from coterie.engines.sites import Store
from coterie.engines.traffic import Traffic
from coterie.errors import RunError, WireError
from coterie.maths.keys import Key
from coterie.protocol import Evaluate, Model, Score
from coterie.training.asks import Ask, Done, Head
from coterie.training.executor import Executor
from coterie.wire.codec import digest

T = TypeVar("T")

Scoring: TypeAlias = Generator[dict[Hashable, Ask], dict[Hashable, Done | Exception], T]
"""A program that asks for scores, each under a name by which equal asks are known, and returns a T."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation may look at, and the scores that are known in its round, lest equal models be scored again.

    A data set counts as the same by its identity; it stands beside its score, so that no other one can take that over.
    """

    setting: Setting
    executor: Executor
    store: Store
    round: int
    phase: str
    traffic: Traffic
    known: dict[Hashable, tuple[DataSet, Score]] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """A model whose content has a name, which is made when it is first asked for."""

    model: Model

    @cached_property
    def digest(self) -> str | None:
        """See `_digest`."""
        return _digest(self.model)


def scores_of(
    view: Evaluation,
    asked: Mapping[str, tuple[Named, Head | None, DataSet]],
    limit: int | None,
    *,
    again: bool,
    judged_by: tuple[str, ...] | None = None,
) -> dict[str, Score]:
    """See `scoring`."""
    (found,) = together(view, [scoring(view, asked, limit, again=again, judged_by=judged_by)])
    return found


def together(view: Evaluation, programs: Sequence[Scoring[T]]) -> list[T]:
    """What scoring programs return, played side by side: what they ask at one time is answered at once, and once."""
    results: dict[int, T] = {}
    answers: dict[Hashable, Done | Exception] | None = None
    while len(results) < len(programs):
        asks: dict[Hashable, Ask] = {}
        for number, program in enumerate(programs):
            if number not in results:
                try:
                    asks |= next(program) if answers is None else program.send(answers)
                except StopIteration as stop:
                    results[number] = stop.value
        answers = dict(zip(asks, view.executor.answer(list(asks.values())), strict=True)) if asks else {}
    return [results[number] for number in range(len(programs))]


def scoring(
    view: Evaluation,
    asked: Mapping[str, tuple[Named, Head | None, DataSet]],
    limit: int | None,
    *,
    again: bool,
    judged_by: tuple[str, ...] | None = None,
) -> Scoring[dict[str, Score]]:
    """The score of each model with its head on its data, by party; `judged_by`: the task's metrics unless given.

    again: whether these data are scored more often in this round, so that equal models are worth being recognised.
    The executor evaluates each ask in a pass of its own, so a score that is known has the very bits of a new one.
    """
    judged_by = view.setting.metrics if judged_by is None else judged_by
    places: dict[str, Hashable] = {}
    asks: dict[Hashable, Ask] = {}
    for name, (model, head, data) in asked.items():
        site = view.setting.sites.get(name)
        spec = model.model.spec or (view.setting.server_spec if site is None else site.card.spec)
        content = (model.digest, _digest(head)) if again else (None, None)
        place: Hashable = name
        if None not in content:
            base = view.executor.bases.get(spec)
            version = None if base is None else base.version  # aggregation may have changed it within the round
            count = len(data) if limit is None else min(limit, len(data))
            place = (content, spec, version, id(data), count, judged_by)
        places[name] = place
        if place not in view.known and place not in asks:
            request = Evaluate(model.model, "test", limit, judged_by)
            asks[place] = Ask(name, request, spec, head, data, Key(0))
    found: dict[Hashable, tuple[DataSet, Score]] = {}
    answers = yield asks
    for place, ask in asks.items():
        done = answers[place]
        if not isinstance(done, Done) or not isinstance(done.answer, Score):
            raise RunError(f"evaluating {ask.party} in round {view.round} failed: {done}") from (
                done if isinstance(done, Exception) else None
            )
        found[place] = (asked[ask.party][2], done.answer)
    if again:
        view.known.update((place, one) for place, one in found.items() if isinstance(place, tuple))
    return {name: (found.get(place) or view.known[place])[1] for name, place in places.items()}


def _digest(content: Model | Head | None) -> str | None:
    """A name for what is in a model or a head; None where it cannot be written as bytes, and so has none."""
    try:
        return digest(content, dense=True)
    except WireError:
        return None
