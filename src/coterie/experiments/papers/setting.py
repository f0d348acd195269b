"""The set-up of a result, aspect by aspect: the paper's words beside what was run here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coterie.algorithms.fedslm import FedSLM
from coterie.algorithms.rank_update import RankUpdate
from coterie.algorithms.sefora import SeFoRA
from coterie.experiments.config import Config
from coterie.experiments.methods import algorithm
from coterie.experiments.papers.reading import Finished

NOTHING = "–"

LABELS: dict[str, str] = {
    "model": "base model",
    "task": "data",
    "clients": "clients",
    "groups": "models of clients",
    "compression": "compression",
    "student": "teaching at the server",
    "rank": "rank",
    "sketch": "rows of the sketch, k",
    "updates": "rank updates",
    "partition": "partition",
    "rounds": "rounds",
    "steps": "local steps",
    "batch": "batch",
    "optimiser": "optimiser",
    "rate": "learning rate",
    "lambda": "λ of FedPA-LoRA",
    "scale": "scale α / r",
    "dropout": "dropout",
    "weights": "weights of clients",
    "heads": "classification heads",
    "tests": "test data",
    "precision": "precision",
    "seeds": "seeds",
    "hardware": "hardware",
    "layers": "adapted layers",
    "factors": "factors",
    "arithmetic": "arithmetic",
    "features": "features",
    "condition": "condition of the features",
    "spectrum": "eigenvalues of Φ",
    "experts": "experts",
    "drawn": "draw of the experts",
    "noise": "noise",
    "mixtures": "mixtures",
    "local": "clients' estimates",
    "extraction": "extraction of experts",
    "public": "public sets",
    "clustering": "clustering",
    "spa": "successive projection",
    "init": "initialisation round",
    "routers": "training of routers",
}
"""Every aspect in the order of a page, and how it is called there."""


def lines(paper: Mapping[str, str | None], here: Mapping[str, str]) -> list[dict[str, str]]:
    """One entry for each aspect: the paper's, ours, and whether they are the same."""
    made = []
    for aspect, label in LABELS.items():
        if aspect not in paper and aspect not in here:
            continue
        theirs, ours = paper.get(aspect), here.get(aspect, NOTHING)
        verdict = "not said" if theirs is None else "same" if theirs == ours else "differs"
        made.append({"aspect": label, "paper": theirs or "not said", "here": ours, "verdict": verdict})
    return made


def of_runs(runs: Sequence[Finished], seeds: Sequence[int]) -> dict[str, str]:
    """Our side of the aspects, from the settings of all runs; where runs differ, all values; only what any has."""
    configs = [run.config for run in runs]
    tasks = [run.summary["task"] for run in runs]
    made = {aspect: _joined(tell(config) for config in configs) for aspect, tell in _TOLD.items()}
    made["task"] = _joined(
        f"{task['name']}, {len(task['classes'])} classes, {task['train']} training examples" for task in tasks
    )
    own = _joined(_own_test(config) for config in configs)
    pooled = _joined(str(task["test"]) for task in tasks)
    made["tests"] = f"{pooled} pooled examples; {own} as its own"
    made["seeds"] = ", ".join(map(str, seeds))
    return {aspect: told for aspect, told in made.items() if told != NOTHING}


def _sketch(config: Config) -> str:
    made = algorithm(config.method, config.options)
    return str(made.rows(_largest(config))) if isinstance(made, SeFoRA) else ""


def _updates(config: Config) -> str:
    made = algorithm(config.method, config.options)
    if not isinstance(made, RankUpdate) or made.update_every is None:
        return ""
    return f"every {made.update_every} rounds, τ = {made.tau:g}"


def _layers(config: Config) -> str:
    targets = config.model.targets
    return ", ".join(targets) if isinstance(targets, list) else targets or ""


def _lam(config: Config) -> str:
    value = getattr(algorithm(config.method, config.options), "lam", None)
    return "" if value is None or not config.method.startswith("fedpa") else f"{value:g}"


def _groups(config: Config) -> str:
    """How many clients keep which part of the model."""
    if config.clients.ratios is None:
        return ""
    listed = config.clients.ratios
    ratios = [listed[number % len(listed)] for number in range(config.clients.count)]
    counts = {str(ratio): ratios.count(ratio) for ratio in dict.fromkeys(ratios)}
    only = ", the full ones alone" if config.federation.only is not None else ""
    return ", ".join(f"{ratio} × {count}" for ratio, count in counts.items()) + only


def _compression(config: Config) -> str:
    return "" if config.clients.ratios is None or config.federation.only is not None else config.compression.method


def _student(config: Config) -> str:
    made = algorithm(config.method, config.options)
    if not isinstance(made, FedSLM):
        return ""
    rate = made.student_lr * config.train.lr
    taught = f"{config.server_data.unlabeled} unlabelled examples, {made.epochs} epochs"
    return f"{taught}, LoRA of rank {made.student_rank}, learning rate {rate:g}"


def _optimiser(config: Config) -> str:
    train = config.train
    parts = [{"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[train.optimizer]]
    if train.optimizer == "sgd":
        parts.append("no momentum" if train.momentum == 0 else f"momentum {train.momentum:g}")
    if train.clip is not None:
        parts.append(f"clipped at {train.clip:g}")
    return ", ".join(parts)


def _partition(config: Config) -> str:
    section = config.partition
    if section.kind == "mixture":
        if section.alpha == 0:
            return "one task for each client"
        return "prescribed mixtures" if section.alpha is None else f"mixtures from Dirichlet, α = {section.alpha:g}"
    if section.kind != "dirichlet":
        return section.kind
    return f"Dirichlet over labels, β = {section.beta:g}"


def _own_test(config: Config) -> str:
    section = config.partition
    if section.test_size is not None:
        return f"{section.test_size} for each client in the proportions of what it holds"
    return f"{100 * section.test_fraction:g} % of each client's share"


def _heads(config: Config) -> str:
    return {"averaged": "averaged", "local": "each client's own", "frozen": "frozen"}[config.federation.head]


def _precision(config: Config) -> str:
    return config.execution.dtype


def _scale(config: Config) -> str:
    return f"{config.lora.scale or config.lora.alpha / _largest(config):g}"


def _largest(config: Config) -> int:
    ranks = config.clients.ranks
    return ranks if isinstance(ranks, int) else max(ranks)


_TOLD: dict[str, Callable[[Config], str]] = {
    "model": lambda config: config.model.base.rstrip("/").rpartition("/")[2],
    "clients": lambda config: str(config.clients.count),
    "groups": _groups,
    "compression": _compression,
    "student": _student,
    "rank": lambda config: _listed(config.clients.ranks),
    "sketch": _sketch,
    "updates": _updates,
    "layers": _layers,
    "partition": _partition,
    "rounds": lambda config: str(config.rounds),
    "steps": lambda config: f"{config.train.epochs} epochs" if config.train.epochs else str(config.train.steps),
    "batch": lambda config: str(config.train.batch_size),
    "optimiser": _optimiser,
    "rate": lambda config: f"{config.train.lr:g}",
    "lambda": _lam,
    "scale": _scale,
    "dropout": lambda config: f"{config.train.dropout:g}",
    "weights": lambda config: config.federation.weights,
    "heads": _heads,
    "precision": _precision,
}


def _listed(values: int | list[int]) -> str:
    return str(values) if isinstance(values, int) else ", ".join(map(str, values))


def _joined(values: Iterable[Any]) -> str:
    """Different values once each, in the order of their first appearance; an en dash for none."""
    return "; ".join(dict.fromkeys(str(value) for value in values if str(value))) or NOTHING
