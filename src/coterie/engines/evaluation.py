"""Scores of the global model and of every site's own, on the pooled test and on each client's own share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coterie.data.text import TextSet
from coterie.engines.driver import Party
from coterie.engines.measures import spread
from coterie.engines.setting import Setting
from coterie.engines.sites import Store, load_record, memory_of
from coterie.engines.traffic import Traffic, joined, separated
from coterie.errors import CoterieError, RunError
from coterie.maths.keys import Key, root_key
from coterie.protocol import Client, Evaluate, Model, Score, SiteRecord
from coterie.training.asks import Ask, Done, Head
from coterie.training.executor import Executor


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation may look at."""

    setting: Setting
    executor: Executor
    store: Store
    round: int
    phase: str
    traffic: Traffic


def head_of(setting: Setting, state: Any, heads: Mapping[str, Head], name: str, record: SiteRecord) -> Head | None:
    """The head that this client uses now, by the experiment's policy."""
    card = setting.sites[name].card
    initial = setting.initial_head(card.spec)
    if setting.head == "local":
        return record.head if record.head is not None else initial
    if setting.head == "frozen":
        return initial
    group = setting.algorithm.head_group(state, card)
    return heads.get(head_name(card.spec, group), heads.get(head_name(card.spec, "all"), initial))


def head_name(spec: str, group: str) -> str:
    """Under what name the engine keeps the head of a group of clients with this base model."""
    return f"{spec}/{group}"


def global_scores(
    view: Evaluation, state: Any, heads: Mapping[str, Head], limit: int | None, clients: bool
) -> dict[str, Any] | None:
    """The global model on the pooled test and, when asked for, on every client's own test share.

    With local heads the pooled figure is the mean over clients, each with its own head.
    """
    model = view.setting.algorithm.global_model(state)
    if model is None:
        return None
    found: dict[str, Any] = {}
    names = sorted(view.setting.sites)
    kept = view.setting.head == "local"  # else no site's record needs reading, however many there are
    own = {
        name: head_of(view.setting, state, heads, name, load_record(view.store, name) if kept else SiteRecord())
        for name in (names if clients or kept else ())
    }
    pooled = view.setting.pooled_test
    if pooled is not None:
        if view.setting.head == "local":
            found["pooled"] = _mean(_scores(view, {name: (model, own[name], pooled) for name in names}, limit))
        else:
            head = heads.get(head_name(view.setting.server_spec, "all"))
            found["pooled"] = _plain(_scores(view, {"server": (model, head, pooled)}, limit)["server"])
    if clients:
        shares = {name: (model, own[name], view.setting.sites[name].data["test"]) for name in _with_test(view)}
        found["clients"] = _by_client(_scores(view, shares, None))
    return found


def personal_scores(
    view: Evaluation, state: Any, heads: Mapping[str, Head], downloads: Mapping[str, Any], pooled: bool
) -> dict[str, Any]:
    """Each site's own model on its own test share, and on the pooled test when asked for.

    `downloads` are those of this round; a site without one is sent what the state holds for it now, booked as
    evaluation traffic. The pooled figure is the mean over sites, each on the first `pooled_limit` examples. A site
    that has no model yet, because its set-up failed, is named under `failed`.
    """
    setting = view.setting
    shares: dict[str, Score] = {}
    whole: dict[str, Score] = {}
    failed: dict[str, str] = {}
    pooled = pooled and setting.pooled_test is not None
    if not pooled and not _with_test(view):
        return {"clients": _by_client({})}
    for name, model, head in site_models(view, state, heads, downloads, failed):
        if len(setting.sites[name].data.get("test", ())) > 0:
            shares |= _scores(view, {name: (model, head, setting.sites[name].data["test"])}, None)
        if pooled and setting.pooled_test is not None:
            whole |= _scores(view, {name: (model, head, setting.pooled_test)}, setting.measuring.pooled_limit)
    found: dict[str, Any] = {"clients": _by_client(shares)} | ({"pooled": _mean(whole)} if whole else {})
    return found | ({"failed": failed} if failed else {})


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
        except Exception as error:
            if failed is None:
                raise
            failed[name] = said(error)
            continue
        yield name, model, head_of(setting, state, heads, name, record)


def objective(view: Evaluation, parties: Mapping[str, tuple[Party, float]]) -> dict[str, float]:
    """The clients' objectives at the end of local training, over those who answered.

    task: sum p_i f_i, f_i the task loss on the first `objective_examples` training examples. local: with the
    penalties that the clients trained with (FedPA-LoRA, Eq. 81). The joint objective with the new reference (Eq. 20)
    is task plus the method's own `regulariser`, after aggregation.
    """
    limit = view.setting.measuring.objective_examples
    asked = {
        name: (party.fits[-1][1].model, party.head, party.data[party.fits[-1][0].data])
        for name, (party, _) in parties.items()
    }
    scores = _scores(view, asked, limit)
    task = sum(weight * scores[name].loss for name, (_, weight) in parties.items())
    penalty = sum(weight * party.fits[-1][1].penalty_after for party, weight in parties.values())
    return {"task": task, "local": task + penalty}


def said(error: Exception) -> str:
    """An error in one line; errors that are not ours keep their type's name."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CoterieError) else f"{type(error).__name__}: {text}"


def _scores(
    view: Evaluation, asked: Mapping[str, tuple[Model, Head | None, TextSet]], limit: int | None
) -> dict[str, Score]:
    asks = []
    for name, (model, head, data) in asked.items():
        site = view.setting.sites.get(name)
        spec = model.spec or (view.setting.server_spec if site is None else site.card.spec)
        asks.append(Ask(name, Evaluate(model, "test", limit), spec, head, data, Key(0)))
    found = {}
    for name, done in zip(asked, view.executor.answer(asks), strict=True):
        if not isinstance(done, Done) or not isinstance(done.answer, Score):
            raise RunError(f"evaluating {name} in round {view.round} failed: {done}") from (
                done if isinstance(done, Exception) else None
            )
        found[name] = done.answer
    return found


def _with_test(view: Evaluation) -> list[str]:
    return [name for name, site in sorted(view.setting.sites.items()) if len(site.data.get("test", ())) > 0]


def _plain(score: Score) -> dict[str, Any]:
    return {"loss": score.loss, "accuracy": score.accuracy, "examples": score.examples}


def _mean(scores: Mapping[str, Score]) -> dict[str, Any]:
    values = list(scores.values())
    return {
        "loss": sum(s.loss for s in values) / len(values),
        "accuracy": sum(s.accuracy for s in values) / len(values),
        "examples": values[0].examples,
    }


def _by_client(scores: Mapping[str, Score]) -> dict[str, Any]:
    accuracy = {name: score.accuracy for name, score in scores.items()}
    return {"accuracy": accuracy, **(spread(accuracy) if accuracy else {})}


def _keys(setting: Setting, number: int, name: str) -> Any:
    root = root_key(setting.seed)
    return lambda purpose: root.fold("evaluation", purpose, number, name)
