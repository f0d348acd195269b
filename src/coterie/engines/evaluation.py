"""Scores of the global model and of every site's own, on the task's tests and on each client's own shares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from coterie.data.sequences import DataSet
from coterie.engines.driver import Party
from coterie.engines.measures import spread
from coterie.engines.setting import Setting
from coterie.engines.sites import Store, load_record, memory_of
from coterie.engines.traffic import Traffic, joined, separated
from coterie.errors import CoterieError, RunError, WireError
from coterie.maths.keys import Key, root_key
from coterie.protocol import Client, Evaluate, Model, Score, SiteRecord
from coterie.training.asks import Ask, Done, Head
from coterie.training.executor import Executor
from coterie.wire.codec import digest

Figures = dict[str, Any]
"""What goes into a line of metrics.jsonl.

On the task's tests: {loss, accuracy, examples, score, metrics: {name: value}}, of several models their plain mean. On
clients' own tests: {accuracy: {id: value}, score: {id: value}} and of the scores mean, worst_50 and worst_25. `score`
is the first of the task's metrics. Where sites hold a set in parts as well (test/<part> beside test), `parts` has the
same of each part, by its name.
"""


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


def head_of(setting: Setting, state: Any, heads: Mapping[str, Head], name: str, record: SiteRecord) -> Head | None:
    """The head that this client uses now, by the experiment's policy."""
    card = setting.sites[name].card
    initial = setting.initial_head(card.spec)
    if setting.head == "local":
        return record.head if record.head is not None else initial
    if setting.head == "frozen":
        return initial
    choices = setting.algorithm.head_choices(state, card)
    if choices:
        return chosen_heads(setting, heads, card.spec, choices).get(record.head_group or choices[0])
    group = setting.algorithm.head_group(state, card)
    return heads.get(head_name(card.spec, group), heads.get(head_name(card.spec, "all"), initial))


def chosen_heads(setting: Setting, heads: Mapping[str, Head], spec: str, choices: Sequence[str]) -> dict[str, Head]:
    """The heads between which a client chooses; a group that nobody has joined yet has the initial one."""
    initial = setting.initial_head(spec)
    found = {group: heads.get(head_name(spec, group), initial) for group in choices}
    return {group: head for group, head in found.items() if head is not None}


def head_name(spec: str, group: str) -> str:
    """Under what name the engine keeps the head of a group of clients with this base model."""
    return f"{spec}/{group}"


def global_scores(
    view: Evaluation, state: Any, heads: Mapping[str, Head], limit: int | None, clients: bool
) -> tuple[Figures | None, Figures | None]:
    """The global model on the task's tests and, when asked for, on every client's own test; and on the validation.

    Returns (scores, validation), both None while there is no global model. The scores are `pooled`, `more` by the
    name of a further test (each on its first `limit` examples), and `clients`. The validation is the mean over
    clients' validation shares, weighted by their examples; None without any. With local heads the figures on the
    tests are means over clients, each with its own head.
    """
    setting = view.setting
    model = setting.algorithm.global_model(state)
    if model is None:
        return None, None
    kept = setting.head == "local"  # else no site's record needs reading, however many there are
    deployed = _Named(model)

    @cache
    def own(name: str) -> Head | None:
        return head_of(setting, state, heads, name, load_record(view.store, name) if kept else SiteRecord())

    def on_test(data: DataSet) -> Figures:
        if kept:
            asked = {name: (deployed, own(name), data) for name in sorted(setting.sites)}
            return _mean(_scores(view, asked, limit, again=True))
        head = heads.get(head_name(setting.server_spec, "all"))
        return _mean(_scores(view, {"server": (deployed, head, data)}, limit, again=clients))

    def on_shares(part: str, again: bool) -> dict[str, Score]:
        asked = {name: (deployed, own(name), setting.sites[name].data[part]) for name in _holders(setting, part)}
        return _scores(view, asked, None, again=again)

    found: Figures = {}
    if setting.pooled_test is not None:
        found["pooled"] = on_test(setting.pooled_test)
    if setting.more_tests:
        found["more"] = {name: on_test(data) for name, data in sorted(setting.more_tests.items())}
    if clients:
        names = sorted({part for site in setting.sites.values() for part in _parts(site.data, "test")})
        parts = {part: on_shares(f"test/{part}", again=True) for part in names}
        found["clients"] = _by_client(_joined(parts.values()) if parts else on_shares("test", again=True))
        if parts:
            found["parts"] = {part: _by_client(scores) for part, scores in parts.items()}
    return found, _validation(on_shares("validation", again=False))


def personal_scores(
    view: Evaluation, state: Any, heads: Mapping[str, Head], downloads: Mapping[str, Any], pooled: bool
) -> tuple[Figures, Figures | None]:
    """Each site's own model on its own test and, when asked for, on the task's tests; and on the validation.

    `downloads` are those of this round; a site without one is sent what the state holds for it now, booked as
    evaluation traffic. Figures on the task's tests are means over sites, each on the first `pooled_limit` examples.
    `further` has the same of the method's `further_models`, by name, over the sites that have such a one. A site whose
    models cannot be made, because its set-up failed, is named under `failed`.

    Returns (scores, validation): the second as of `global_scores`, where there is no global model to be deployed.
    """
    setting = view.setting
    own, further = _Shown(), dict[str, _Shown]()
    validation: dict[str, Score] = {}
    failed: dict[str, str] = {}
    pooled = pooled and (setting.pooled_test is not None or bool(setting.more_tests))
    alone = setting.algorithm.global_model(state) is None
    validated = _holders(setting, "validation") if alone else []
    if not pooled and not validated and not _holders(setting, "test"):
        return own.figures(), None
    for site in _sites(view, state, heads, downloads, failed):
        used = _Named(site.model)
        _show(view, site, used, pooled, own, again=not alone, instead=site.parts)
        if site.name in validated:
            scores = _own(view, site, used, "validation", again=False, instead=site.parts)
            validation |= _joined({site.name: score} for score in scores.values())
        try:
            others = setting.algorithm.further_models(site.client, site.download)
        except Exception as error:
            failed[site.name] = said(error)
            continue
        for name, model in others.items():
            _show(view, site, _Named(model), pooled, further.setdefault(name, _Shown()), again=not alone, instead={})
    found = own.figures()
    if further:
        found["further"] = {name: shown.figures() for name, shown in sorted(further.items())}
    return found | ({"failed": failed} if failed else {}), _validation(validation)


def site_models(
    view: Evaluation,
    state: Any,
    heads: Mapping[str, Head],
    downloads: Mapping[str, Any],
    failed: dict[str, str] | None = None,
) -> Iterator[tuple[str, Model, Head | None]]:
    """The model and head that each site uses, one site at a time, so that many need not be in memory together.

    See `personal_scores` for `downloads`. A site whose model cannot be made is left out and told in `failed`; without
    that the error is raised.
    """
    for site in _sites(view, state, heads, downloads, failed):
        yield site.name, site.model, site.head


def objective(view: Evaluation, parties: Mapping[str, tuple[Party, float]]) -> dict[str, float]:
    """The clients' objectives at the end of local training, over those who answered.

    task: sum p_i f_i, f_i the task loss on the first `objective_examples` training examples. local: with those of the
    penalties they trained with that the model alone decides (FedPA-LoRA, Eq. 81); a routing penalty, which depends on
    a mini-batch (FedSEE's KL, Eq. 14), is left out. The joint objective with the new reference (Eq. 20) is task plus
    the method's own `regulariser`, after aggregation.
    """
    limit = view.setting.measuring.objective_examples
    asked = {
        name: (_Named(party.fits[-1][1].model), party.head, party.data[party.fits[-1][0].data])
        for name, (party, _) in parties.items()
    }
    scores = _scores(view, asked, limit, again=False, judged_by=())
    task = sum(weight * scores[name].loss for name, (_, weight) in parties.items())
    penalty = sum(weight * party.fits[-1][1].penalty_after for party, weight in parties.values())
    return {"task": task, "local": task + penalty}


def said(error: Exception) -> str:
    """An error in one line; errors that are not ours keep their type's name."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class _Site:
    """A site as it is evaluated: its model and head, and what its other models are made from."""

    name: str
    client: Client
    download: Any
    model: Model
    head: Head | None
    parts: Mapping[str, tuple[_Named, Head | None]]


@dataclass(frozen=True)
class _Named:
    """A model whose content has a name, which is made when it is first asked for."""

    model: Model

    @cached_property
    def digest(self) -> str | None:
        """See `_digest`."""
        return _digest(self.model)


@dataclass
class _Shown:
    """What sites' models of one kind scored, by client: on own tests, on the pooled one, on further ones by name."""

    own: dict[str, Score] = field(default_factory=dict)
    pooled: dict[str, Score] = field(default_factory=dict)
    more: dict[str, dict[str, Score]] = field(default_factory=dict)
    parts: dict[str, dict[str, Score]] = field(default_factory=dict)

    def figures(self) -> Figures:
        """As in a line of metrics.jsonl."""
        found: Figures = {"clients": _by_client(self.own)}
        if self.pooled:
            found["pooled"] = _mean(self.pooled)
        if self.more:
            found["more"] = {test: _mean(scores) for test, scores in self.more.items()}
        if self.parts:
            found["parts"] = {part: _by_client(scores) for part, scores in sorted(self.parts.items())}
        return found


def _show(
    view: Evaluation,
    site: _Site,
    model: _Named,
    pooled: bool,
    shown: _Shown,
    again: bool,
    instead: Mapping[str, tuple[_Named, Head | None]],
) -> None:
    """Adds what a model of this site scores: on its own test, and, if `pooled`, on the task's tests.

    again: whether the global model is scored on its own test too. instead: what is used for examples of some parts.
    """
    setting, limit = view.setting, view.setting.measuring.pooled_limit
    name, own = site.name, _own(view, site, model, "test", again, instead)
    if own:
        shown.own |= _joined({name: score} for score in own.values())
    for part, score in own.items():
        if part is not None:
            shown.parts.setdefault(part, {})[name] = score
    if not pooled:
        return
    more = {}
    for test, data in sorted(setting.more_tests.items()):
        used, head = instead.get(test, (model, site.head))
        more[test] = _scores(view, {name: (used, head, data)}, limit, again=True)
        shown.more.setdefault(test, {}).update(more[test])
    if instead and more:  # no one model is for all of the pooled test
        shown.pooled |= _joined(more.values())
    elif setting.pooled_test is not None:
        shown.pooled |= _scores(view, {name: (model, site.head, setting.pooled_test)}, limit, again=True)


def _own(
    view: Evaluation,
    site: _Site,
    model: _Named,
    name: str,
    again: bool,
    instead: Mapping[str, tuple[_Named, Head | None]],
) -> dict[str | None, Score]:
    """What a model of this site scores on its own set of this name: by part where it has such, or as a whole (None)."""
    data = view.setting.sites[site.name].data
    if not len(data.get(name, ())):
        return {}
    sets: list[tuple[str | None, DataSet]] = [*_parts(data, name).items()]
    found = {}
    for part, own in sets or [(None, data[name])]:
        used, head = (model, site.head) if part is None else instead.get(part, (model, site.head))
        found[part] = _scores(view, {site.name: (used, head, own)}, None, again=again)[site.name]
    return found


def _parts(data: Mapping[str, DataSet], name: str) -> dict[str, DataSet]:
    """The parts of a site's set of this name that hold anything, such as test/<part> of test."""
    found = {place.removeprefix(f"{name}/"): part for place, part in data.items() if place.startswith(f"{name}/")}
    return {part: held for part, held in sorted(found.items()) if len(held)}


def _joined(parts: Iterable[Mapping[str, Score]]) -> dict[str, Score]:
    """Scores on the parts of a set as those on the whole, by client: figures that are means over examples stay such."""
    by_client: dict[str, list[Score]] = {}
    for scores in parts:
        for name, score in scores.items():
            by_client.setdefault(name, []).append(score)
    return {name: scores[0] if len(scores) == 1 else _weighted(scores) for name, scores in by_client.items()}


def _weighted(scores: Sequence[Score]) -> Score:
    examples = sum(score.examples for score in scores)

    def mean(pick: Callable[[Score], float]) -> float:
        return sum(score.examples * pick(score) for score in scores) / examples

    metrics = {name: mean(lambda score, name=name: score.metrics[name]) for name in scores[0].metrics}  # type: ignore[misc]
    return Score(mean(lambda score: score.loss), mean(lambda score: score.accuracy), examples, metrics)


def _sites(
    view: Evaluation,
    state: Any,
    heads: Mapping[str, Head],
    downloads: Mapping[str, Any],
    failed: dict[str, str] | None,
) -> Iterator[_Site]:
    """See `site_models`."""
    setting = view.setting
    for name in sorted(setting.sites):
        card, record = setting.sites[name].card, load_record(view.store, name)
        if name in downloads:
            download = downloads[name]
        else:
            body, parts = separated(setting.algorithm.send(state, card))
            download = joined(
                view.traffic.carry(name, "down", "evaluation", body), view.traffic.transferred(parts) if parts else {}
            )
        client = Client(
            card,
            memory_of(record, read_only=True),
            tuple(sorted(setting.sites[name].data)),
            _keys(setting, view.round, name),
            view.round,
            view.phase,
        )
        try:
            model = setting.algorithm.site_model(client, download)
            by_part = setting.algorithm.part_models(client, download)
        except Exception as error:
            if failed is None:
                raise
            failed[name] = said(error)
            continue
        head = head_of(setting, state, heads, name, record)
        # A part's head is the one that was trained under its name, where there is such.
        parts = {
            part: (_Named(one), head if setting.head == "frozen" else heads.get(head_name(card.spec, part), head))
            for part, one in by_part.items()
        }
        yield _Site(name, client, download, model, head, parts)


def _scores(
    view: Evaluation,
    asked: Mapping[str, tuple[_Named, Head | None, DataSet]],
    limit: int | None,
    *,
    again: bool,
    judged_by: tuple[str, ...] | None = None,
) -> dict[str, Score]:
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
    for (place, ask), done in zip(asks.items(), view.executor.answer(list(asks.values())), strict=True):
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


def _holders(setting: Setting, part: str) -> list[str]:
    """The sites that hold examples in this data set, in id order."""
    return [name for name, site in sorted(setting.sites.items()) if len(site.data.get(part, ())) > 0]


def _mean(scores: Mapping[str, Score]) -> Figures:
    """The plain mean of every figure, of scores on equally many examples."""
    values = list(scores.values())

    def mean(pick: Callable[[Score], float]) -> float:
        return sum(map(pick, values)) / len(values)

    return {
        "loss": mean(lambda score: score.loss),
        "accuracy": mean(lambda score: score.accuracy),
        "examples": values[0].examples,
        "score": mean(lambda score: score.score),
        "metrics": {name: sum(one.metrics[name] for one in values) / len(values) for name in values[0].metrics},
    }


def _validation(scores: Mapping[str, Score]) -> Figures | None:
    """The mean of every figure weighted by examples; None without any."""
    values = list(scores.values())
    examples = sum(score.examples for score in values)
    if not examples:
        return None

    def mean(pick: Callable[[Score], float]) -> float:
        return sum(score.examples * pick(score) for score in values) / examples

    return {
        "loss": mean(lambda score: score.loss),
        "accuracy": mean(lambda score: score.accuracy),
        "score": mean(lambda score: score.score),
        "examples": examples,
    }


def _by_client(scores: Mapping[str, Score]) -> Figures:
    judged = {name: score.score for name, score in scores.items()}
    accuracy = {name: score.accuracy for name, score in scores.items()}
    return {"accuracy": accuracy, "score": judged, **(spread(judged) if judged else {})}


def _keys(setting: Setting, number: int, name: str) -> Any:
    root = root_key(setting.seed)
    return lambda purpose: root.fold("evaluation", purpose, number, name)
