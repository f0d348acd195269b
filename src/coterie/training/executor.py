"""Answers requests: stacks what stacks, evaluates, predicts, differentiates, calibrates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from coterie.data.sequences import DataSet
from coterie.errors import DataError, ModelError, nearest
from coterie.models.loading import Base
from coterie.protocol import (
    Answer,
    BaseLog,
    Calibrate,
    Evaluate,
    Fit,
    Gradient,
    Imitation,
    Predict,
    TopLogits,
    Translate,
    Weights,
)
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.evaluation import calibrate, evaluate, first_batch, gradient, predict
from coterie.training.fit import fit
from coterie.training.heap import keep_heap
from coterie.training.lower import stored_lower
from coterie.training.translation import Translator, strings_of, translated


class Executor:
    """Owns the base models of one process and answers asks on them, within one plan.

    The bases are cast, moved and given their attention as the plan says, and torch's thread count is pinned.
    Results depend on the asks and the plan alone, never on torch's global generator.
    """

    def __init__(self, bases: Mapping[str, Base], settings: TrainSettings, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        keep_heap()
        self.bases = dict(bases)
        self.settings = settings
        self.plan = plan
        self._translators: dict[tuple[str, str], Translator] = {}
        self._lower = stored_lower(plan)
        for base in self.bases.values():
            base.prepare(plan.dtype, plan.attention, plan.device)

    @property
    def at_once(self) -> int:
        """Of how many parties' asks it profits at one time, beyond those that train in one stack."""
        return 1

    def set_base(self, log: BaseLog, spec: str) -> None:
        """Bring a base to the version of `log`.

        Raises:
            ModelError: an unknown spec, or a patch that does not fit.
        """
        self._base(spec).set_log(log)

    def answer(self, asks: Sequence[Ask]) -> list[Done | Exception]:
        """One answer for each ask, in order; an ask that cannot be answered gets its exception as the answer."""
        units, malformed = divided(asks, self.plan.clients_per_step)
        performed = self.perform([[asks[number] for number in unit] for unit in units])
        found: dict[int, Done | Exception] = {**malformed}
        for unit, answers in zip(units, performed, strict=True):
            found |= zip(unit, answers, strict=True)
        return [found[number] for number in range(len(asks))]

    def perform(self, units: Sequence[list[Ask]]) -> list[list[Done | Exception]]:
        """The answers of each unit of `divided`, whatever its company."""
        return [self._unit(unit) for unit in units]

    def close(self) -> None:
        """Ends whatever works for this executor, which nothing does in one process; what it keeps is on disk then."""
        if self._lower is not None:
            self._lower.store.flush()

    def _unit(self, asks: list[Ask]) -> list[Done | Exception]:
        return self._fit(asks) if isinstance(asks[0].request, Fit) else [self._guarded(ask) for ask in asks]

    def _fit(self, asks: list[Ask]) -> list[Done | Exception]:
        request = asks[0].request
        assert isinstance(request, Fit)
        try:
            base = self._base(request.initial.spec or asks[0].spec)
            # What enters a block is imitated as the network computes it.
            whole = isinstance(request.loss, Imitation)
            with nullcontext() if whole else self._passes(base):
                return fit(base, asks, self.settings, self.plan, self.bases)
        except Exception as error:
            if len(asks) == 1:
                return [error]
            # One client's request broke the pass of all: each alone, so that only the culprit fails.
            return [answer for ask in asks for answer in self._fit([ask])]

    def _guarded(self, ask: Ask) -> Done | Exception:
        try:
            return Done(self._single(ask), None if ask.head is None else dict(ask.head))
        except Exception as error:
            return error

    def _single(self, ask: Ask) -> Answer:
        request = ask.request
        if isinstance(request, Weights):
            base = self._base(request.spec or ask.spec)
            return {name: base.weight(name) for name in request.names}
        assert not isinstance(request, Fit)
        if isinstance(request, Translate):
            return self._translated(ask, request)
        base = self._base(request.model.spec or ask.spec)
        with self._passes(base):
            return self._passed(base, ask, request)

    def _passed(self, base: Base, ask: Ask, request: Evaluate | Predict | Gradient | Calibrate) -> Answer:
        data, size = _data(ask), self.plan.eval_batch_size
        if isinstance(request, Evaluate):
            chosen = data if request.batch == "all" else first_batch(data, self.settings, ask.key)
            taken = chosen if request.limit is None else chosen.select(range(min(request.limit, len(chosen))))
            return evaluate(base, request.model, ask.head, taken, size, request.judged_by)
        if isinstance(request, Predict):
            if request.sample is not None and request.sample < len(data):
                data = data.select(ask.key.choice(len(data), request.sample))
            return predict(base, request.model, ask.head, data, size, request.top_k, request.features)
        if isinstance(request, Gradient):
            if request.examples is not None and request.examples < len(data):
                data = data.select(ask.key.choice(len(data), request.examples))
            return gradient(
                base, request.model, ask.head, data, request.wrt, request.batch, self.settings, size, ask.key
            )
        return calibrate(base, request.model, ask.head, data, size)

    def _passes(self, base: Base) -> AbstractContextManager[None]:
        """For passes inside: with stored activations below the lowest adapter where the plan has room for them."""
        return nullcontext() if self._lower is None else self._lower.used(base)

    def _translated(self, ask: Ask, request: Translate) -> TopLogits:
        own, source, target = self._base(ask.spec), self._base(request.source), _data(ask)
        by = None
        if own.is_language:
            pair = (request.source, ask.spec)
            if pair not in self._translators:
                self._translators[pair] = Translator(strings_of(source, pair[0]), strings_of(own, pair[1]))
            by = self._translators[pair]
        return translated(request.said, ask.source or target, target, by, ask.party)

    def _base(self, spec: str) -> Base:
        if spec not in self.bases:
            raise ModelError(f"there is no base model {spec!r}{nearest(spec, self.bases)}")
        return self.bases[spec]


def divided(asks: Sequence[Ask], clients_per_step: int) -> tuple[list[list[int]], dict[int, Exception]]:
    """The asks by number in units of work: Fits that train in one stack, at most so many, or a single other request.

    The units follow from the asks and the plan alone. Second, the errors of malformed Fits, by number.
    """
    malformed: dict[int, Exception] = {}
    units: list[list[int]] = []
    groups: dict[Hashable, list[int]] = {}
    for number, ask in enumerate(asks):
        if isinstance(ask.request, Fit):
            try:
                groups.setdefault(stack_signature(ask, ask.request), []).append(number)
            except Exception as error:  # a malformed request is its own client's failure
                malformed[number] = error
        else:
            units.append([number])
    size = max(1, clients_per_step)
    stacks = [numbers[start : start + size] for numbers in groups.values() for start in range(0, len(numbers), size)]
    return units + stacks, malformed


def stack_signature(ask: Ask, request: Fit) -> Hashable:
    """What must be equal for two Fits to train in one stack."""
    return (
        request.initial.spec or ask.spec,
        request.initial.signature,
        (type(request.loss), ask.party if isinstance(request.loss, Imitation) else None),
        tuple((type(penalty), penalty.signature) for penalty in request.penalties),
        None if ask.head is None else tuple((name, tuple(value.shape)) for name, value in ask.head.items()),
    )


def _data(ask: Ask) -> DataSet:
    if ask.data is None or len(ask.data) == 0:
        raise DataError(f"{ask.party}: {type(ask.request).__name__} needs examples, and its data set has none")
    return ask.data
