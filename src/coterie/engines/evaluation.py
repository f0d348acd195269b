"""Scores of the global model and of every site's own, on the task's tests and on each client's own shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from coterie.data.sequences import DataSet
from coterie.engines.driver import Party
from coterie.engines.figures import Figures, Shown, by_client, joined_scores, mean_figures, validation_figures
from coterie.engines.heads import head_name, head_of
from coterie.engines.scoring import Evaluation, Named, Scoring, scores_of, scoring, together
from coterie.engines.setting import Setting
from coterie.engines.sites import load_record, memory_of
from coterie.engines.traffic import joined, separated
from coterie.errors import said
from coterie.maths.keys import root_key
from coterie.protocol import Client, Model, Score, SiteRecord
from coterie.training.asks import Head


def untrained_scores(view: Evaluation) -> dict[str, Figures]:
    """Every base model as it is, with its initial head, on the task's whole tests: `pooled` and `more`, by spec."""
    return {spec: _untrained(view, spec) for spec in view.setting.specs}


def _untrained(view: Evaluation, spec: str) -> Figures:
    setting, model = view.setting, Named(Model(spec=spec))
    tests, head = setting.tests_of(spec), setting.initial_head(spec)

    def on_test(data: DataSet) -> dict[str, Score]:
        return scores_of(view, {spec: (model, head, data)}, None, again=True)

    shown = Shown(more={name: on_test(data) for name, data in sorted(tests.more.items())})
    if setting.pooled_of:
        shown.pooled = joined_scores(shown.more[name] for name in setting.pooled_of)
    elif tests.pooled is not None:
        shown.pooled = on_test(tests.pooled)
    return {kind: figures for kind, figures in shown.figures().items() if kind != "clients"}


def global_scores(
    view: Evaluation, state: Any, heads: Mapping[str, Head], limit: int | None, clients: bool
) -> tuple[Figures | None, Figures | None]:
    """The global model on the task's tests and, when asked for, on every client's own test; and on the validation.

    Returns (scores, validation), both None while there is no global model. The scores are `pooled`, `more` by the
    name of a further test (each on its first `limit` examples), `clients`, and `further`, which has the first two of
    the method's `further_global_models`, by name. The validation is the mean over
    clients' validation shares, weighted by their examples; None without any. With local heads the figures on the
    tests are means over clients, each with its own head. Where the model names its base, clients with others are left
    out of what needs their heads or tokens.
    """
    setting = view.setting
    model = setting.algorithm.global_model(state)
    if model is None:
        return None, None
    kept = setting.head == "local"  # else no site's record needs reading, however many there are
    deployed = Named(model)

    @cache
    def own(name: str) -> Head | None:
        return head_of(setting, state, heads, name, load_record(view.store, name) if kept else SiteRecord())

    def on_test(data: DataSet, shown: Named) -> dict[str, Score]:
        alike = setting.names if model.spec is None else setting.members.get(model.spec, ())
        if kept and alike:
            asked = {name: (shown, own(name), data) for name in alike}
            return scores_of(view, asked, limit, again=True)
        head = heads.get(head_name(setting.server_spec, "all"))
        return scores_of(view, {"server": (shown, head, data)}, limit, again=clients)

    def on_tests(shown: Named) -> Figures:
        made: Figures = {}
        more = {name: on_test(data, shown) for name, data in sorted(setting.more_tests.items())}
        if _in_parts(setting, setting.pooled_test, limit):
            made["pooled"] = mean_figures(joined_scores(more[name] for name in setting.pooled_of))
        elif setting.pooled_test is not None:
            made["pooled"] = mean_figures(on_test(setting.pooled_test, shown))
        if more:
            made["more"] = {name: mean_figures(scores) for name, scores in more.items()}
        return made

    def on_shares(part: str, again: bool) -> dict[str, Score]:
        """Of those who read the tokens of the model's base, and whose head, where it is their own, fits it."""
        held = {name: setting.sites[name] for name in setting.holders.get(part, ())}
        suited = {
            name: site
            for name, site in held.items()
            if model.spec in (None, site.card.spec) or not (kept or site.card.spec in setting.own_tests)
        }
        asked = {name: (deployed, own(name), site.data[part]) for name, site in suited.items()}
        return scores_of(view, asked, None, again=again)

    found = on_tests(deployed)
    further = setting.algorithm.further_global_models(state)
    if further:
        found["further"] = {name: on_tests(Named(one)) for name, one in sorted(further.items())}
    if clients:
        names = sorted({part for site in setting.sites.values() for part in _parts(site.data, "test")})
        parts = {part: on_shares(f"test/{part}", again=True) for part in names}
        found["clients"] = by_client(joined_scores(parts.values()) if parts else on_shares("test", again=True))
        if parts:
            found["parts"] = {part: by_client(scores) for part, scores in parts.items()}
    return found, validation_figures(on_shares("validation", again=False))


def personal_scores(
    view: Evaluation, state: Any, heads: Mapping[str, Head], downloads: Mapping[str, Any], pooled: bool
) -> tuple[Figures, Figures | None]:
    """Each site's own model on its own test and, when asked for, on the task's tests; and on the validation.

    `downloads` are those of this round; a site without one is sent what the state holds for it now, booked as
    evaluation traffic. Figures on the task's tests are means over sites, each on the first `pooled_limit` examples.
    `further` has the same of the method's `further_models`, by name, over the sites that have such a one, and `bases`
    that of the sites with one base model, by its spec, where there are several. A site whose models cannot be made,
    because its set-up failed, is named under `failed`.

    Returns (scores, validation): the second as of `global_scores`, where there is no global model to be deployed.
    """
    setting = view.setting
    own, further = Shown(), dict[str, Shown]()
    validation: dict[str, Score] = {}
    failed: dict[str, str] = {}
    pooled = pooled and (setting.pooled_test is not None or bool(setting.more_tests))
    alone = setting.algorithm.global_model(state) is None
    validated = setting.holders.get("validation", ()) if alone else ()
    if not pooled and not validated and "test" not in setting.holders:
        return own.figures(), None

    def scored(site: _Site) -> Scoring[None]:
        used = Named(site.model)
        yield from _show(view, site, used, pooled, own, again=not alone, instead=site.parts)
        if site.name in validated:
            scores = yield from _own(view, site, used, "validation", again=False, instead=site.parts)
            validation.update(joined_scores({site.name: score} for score in scores.values()))
        try:
            others = setting.algorithm.further_models(site.client, site.download)
        except Exception as error:
            failed[site.name] = said(error)
            return
        for name, model in others.items():
            shown = further.setdefault(name, Shown())
            yield from _show(view, site, Named(model), pooled, shown, again=not alone, instead={})

    sites = _sites(view, state, heads, downloads, failed)
    while some := list(islice(sites, view.executor.at_once)):
        together(view, [scored(site) for site in some])
    found = own.figures()
    if further:
        found["further"] = {name: shown.figures() for name, shown in sorted(further.items())}
    members = setting.members
    if len(members) > 1:
        found["bases"] = {spec: own.of(names).figures() for spec, names in members.items()}
    told = {"failed": dict(sorted(failed.items()))} if failed else {}
    return found | told, validation_figures(dict(sorted(validation.items())))


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
        name: (Named(party.fits[-1][1].model), party.head, party.data[party.fits[-1][0].data])
        for name, (party, _) in parties.items()
    }
    scores = scores_of(view, asked, limit, again=False, judged_by=())
    task = sum(weight * scores[name].loss for name, (_, weight) in parties.items())
    penalty = sum(weight * party.fits[-1][1].penalty_after for party, weight in parties.values())
    return {"task": task, "local": task + penalty}


@dataclass(frozen=True)
class _Site:
    """A site as it is evaluated: its model and head, and what its other models are made from."""

    name: str
    client: Client
    download: Any
    model: Model
    head: Head | None
    parts: Mapping[str, tuple[Named, Head | None]]


def _show(
    view: Evaluation,
    site: _Site,
    model: Named,
    pooled: bool,
    shown: Shown,
    again: bool,
    instead: Mapping[str, tuple[Named, Head | None]],
) -> Scoring[None]:
    """Adds what a model of this site scores: on its own test, and, if `pooled`, on the task's tests.

    again: whether the global model is scored on its own test too. instead: what is used for examples of some parts.
    """
    setting, limit = view.setting, view.setting.measuring.pooled_limit
    tests = setting.tests_of(site.client.card.spec)
    name = site.name
    own = yield from _own(view, site, model, "test", again, instead)
    if own:
        shown.own |= joined_scores({name: score} for score in own.values())
    for part, score in own.items():
        if part is not None:
            shown.parts.setdefault(part, {})[name] = score
    if not pooled:
        return
    more = {}
    for test, data in sorted(tests.more.items()):
        used, head = instead.get(test, (model, site.head))
        more[test] = yield from scoring(view, {name: (used, head, data)}, limit, again=True)
        shown.more.setdefault(test, {}).update(more[test])
    if instead and more:  # no one model is for all of the pooled test
        shown.pooled |= joined_scores(more.values())
    elif _in_parts(setting, tests.pooled, limit):
        shown.pooled |= joined_scores(more[test] for test in setting.pooled_of)
    elif tests.pooled is not None:
        found = yield from scoring(view, {name: (model, site.head, tests.pooled)}, limit, again=True)
        shown.pooled |= found


def _in_parts(setting: Setting, pooled: DataSet | None, limit: int | None) -> bool:
    """Whether the scores on further tests tell those on the pooled test: not where a limit takes some of each alone."""
    return bool(setting.pooled_of) and (pooled is None or limit is None or len(pooled) <= limit)


def _own(
    view: Evaluation,
    site: _Site,
    model: Named,
    name: str,
    again: bool,
    instead: Mapping[str, tuple[Named, Head | None]],
) -> Scoring[dict[str | None, Score]]:
    """What a model of this site scores on its own set of this name: by part where it has such, or as a whole (None)."""
    data = view.setting.sites[site.name].data
    if not len(data.get(name, ())):
        return {}
    sets: list[tuple[str | None, DataSet]] = [*_parts(data, name).items()]
    found = {}
    for part, own in sets or [(None, data[name])]:
        used, head = (model, site.head) if part is None else instead.get(part, (model, site.head))
        scores = yield from scoring(view, {site.name: (used, head, own)}, None, again=again)
        found[part] = scores[site.name]
    return found


def _parts(data: Mapping[str, DataSet], name: str) -> dict[str, DataSet]:
    """The parts of a site's set of this name that hold anything, such as test/<part> of test."""
    found = {place.removeprefix(f"{name}/"): part for place, part in data.items() if place.startswith(f"{name}/")}
    return {part: held for part, held in sorted(found.items()) if len(held)}


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
            record.head_group,
        )
        try:
            model = setting.algorithm.site_model(client, download)
            by_part = setting.algorithm.part_models(client, download)
        except Exception as error:
            if failed is None:
                raise
            failed[name] = said(error)
            continue
        head, owner = head_of(setting, state, heads, name, record), setting.head_owner(card.spec)
        # A part's head is the one that was trained under its name, where there is such.
        parts = {
            part: (Named(one), head if setting.head == "frozen" else heads.get(head_name(owner, part), head))
            for part, one in by_part.items()
        }
        yield _Site(name, client, download, model, head, parts)


def _keys(setting: Setting, number: int, name: str) -> Any:
    root = root_key(setting.seed)
    return lambda purpose: root.fold("evaluation", purpose, number, name)
