"""What the fast plan costs in accuracy: bf16 and batches of like length, against fp32 and plain batches.

    python benchmarks/fast_plan.py --workers 2 --json fast_plan.json

FedIT on MiniLM, film and product reviews, three seeds, eight rounds; the global model answers every row of the pooled
tests. `fast` is the plan that a probe chooses, with buckets; `fp32` is fp32 without buckets; `fp32, buckets`
has the fast plan's batches, so that precision alone is what differs from it, and `no buckets` its precision. Clients
hold examples drawn at random: of the plan something is asked here, and unequal clients let a global model swing from
round to round. `--beta 0.5 --rounds 6` looks at those, and earlier.

A row's difference is how often the fast plan's three models are right less how often the other's are; its mean over all
rows is the difference of accuracies. It would be another with other rows, and another with other seeds, which move all
rows together: the standard error is the root of the sum of both squares, and both are told.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from standin import machine, versions
from torch import Tensor

from coterie.data.sequences import DataSet
from coterie.engines.in_process import InProcess
from coterie.engines.sites import Volatile
from coterie.experiments.build import build
from coterie.experiments.config import parse
from coterie.maths.keys import root_key
from coterie.protocol import Model, Predict, Predictions
from coterie.training.asks import Ask, Done
from coterie.wire.ledger import Ledger

LEAST_ROWS, MOST_ERRORS, MOST_POINTS = 2500, 2.0, 0.01
PLANS: dict[str, dict[str, Any]] = {
    "fast": {"dtype": "auto", "buckets": True},
    "fp32, buckets": {"dtype": "float32", "buckets": True},
    "fp32": {"dtype": "float32", "buckets": False},
    "no buckets": {"dtype": "auto", "buckets": False},
}


@dataclass(frozen=True)
class Size:
    """Of the federation: clients, rounds, and steps of a client in each; beta: how unequal clients are, None: alike."""

    clients: int = 5
    rounds: int = 8
    steps: int = 10
    batch: int = 16
    length: int = 64
    beta: float | None = None


def config(task: dict[str, Any], seed: int, plan: str, size: Size, model: str) -> dict[str, Any]:
    """A run's configuration."""
    chosen = PLANS[plan]
    partition = {"kind": "iid"} if size.beta is None else {"kind": "dirichlet", "beta": size.beta}
    return {
        "method": "fedit",
        "rounds": size.rounds,
        "seed": seed,
        "task": task,
        "model": {"base": model, "targets": ["query", "value"], "max_length": size.length},
        "clients": {"count": size.clients, "ranks": [8]},
        "lora": {"alpha": 16},
        "partition": partition,
        "train": {
            "lr": 5e-3,
            "warmup_steps": 4,
            "batch_size": size.batch,
            "steps": size.steps,
            "buckets": chosen["buckets"],
        },
        "evaluate": {"every": size.rounds, "clients_every": size.rounds, "pooled_limit": 16, "objective_examples": 0},
        "execution": {"dtype": chosen["dtype"]},
    }


@dataclass(frozen=True)
class Found:
    """Of one run: which rows of the pooled test its global model answers rightly, (n,) bool; its plan; CPU seconds."""

    right: Tensor
    way: str
    cpu: float


def found(size: Size, model: str, own: dict[str, Any], job: tuple[int, str, str]) -> Found:
    """Plays one run; job: seed, task and plan."""
    seed, name, plan = job
    torch.set_num_threads(1)
    began = time.process_time()
    built = build(parse(config({"name": name, **own}, seed, plan, size, model)))
    engine = InProcess(built.setting, built.executor, Volatile(), Ledger())
    progress = engine.begin()
    while not progress.finished:
        progress = engine.play(progress).progress
    test: DataSet | None = built.setting.pooled_test
    trained = built.setting.algorithm.global_model(progress.state)
    assert test is not None and built.setting.server_base is not None and isinstance(trained, Model)
    (head,) = progress.heads.values()
    asked = Ask("server", Predict(trained, data="pooled"), built.setting.server_base, head, test, root_key(0))
    (done,) = built.executor.answer([asked])
    if not isinstance(done, Done):
        raise done
    assert isinstance(done.answer, Predictions)
    said = done.answer.logits.argmax(dim=1)
    way = f"{built.plan.dtype}, {built.plan.attention}"
    return Found(said == done.answer.labels, way, time.process_time() - began)


def paired(fast: Tensor, other: Tensor) -> dict[str, Any]:
    """fast, other: bool (seeds, n), right or not. Their difference, with its standard error over rows and seeds."""
    apart = fast.double() - other.double()
    difference = float(apart.mean())
    rows, seeds = _error(apart.mean(dim=0)), _error(apart.mean(dim=1))
    error = math.hypot(rows, seeds)
    return {
        "difference": difference,
        "error": error,
        "of_rows": rows,
        "of_seeds": seeds,
        "by_seed": apart.mean(dim=1).tolist(),
        "reached": difference >= max(-MOST_ERRORS * error, -MOST_POINTS),
    }


def _error(means: Tensor) -> float:
    """The standard error of a mean of these; 0 of a single one."""
    return float(means.std(correction=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0


def main() -> None:
    """Plays all, prints a line for each run and pair and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--tasks", nargs="*", default=["movie", "product"])
    parser.add_argument("--path", help="a file of texts and labels, for the task `file`")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=Size.rounds)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--beta", type=float, help="of Dirichlet's shares, for unequal clients")
    parser.add_argument("--length", type=int, default=Size.length, help="tokens after which a text is cut")
    parser.add_argument(
        "--plans", nargs="*", default=["fp32, buckets", "fp32"], choices=list(PLANS), help="besides fast"
    )
    parser.add_argument("--model", default="minilm", help="an asset or a folder")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    size = Size(rounds=options.rounds, steps=options.steps, length=options.length, beta=options.beta)
    plans = ["fast", *(plan for plan in options.plans if plan != "fast")]
    own = {} if options.path is None else {"path": options.path}
    jobs = list(product(options.seeds, options.tasks, plans))
    runs, right = [], {}
    play, several = partial(found, size, options.model, own), options.workers > 1
    pool = ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) if several else None
    with pool or nullcontext():
        for job, one in zip(jobs, pool.map(play, jobs) if pool else map(play, jobs), strict=True):
            seed, task, plan = job
            accuracy, count = float(one.right.double().mean()), len(one.right)
            right[job] = one.right
            told = {"seed": seed, "task": task, "plan": plan, "way": one.way, "accuracy": accuracy, "cpu": one.cpu}
            runs.append(told | {"rows": count})
            print(f"{task}, seed {seed}, {plan} ({one.way}): {accuracy:.2%} of {count}, {one.cpu:.0f} s", flush=True)
    answers = {
        plan: torch.stack([torch.cat([right[seed, task, plan] for task in options.tasks]) for seed in options.seeds])
        for plan in plans
    }
    count = answers["fast"].shape[1]
    pairs = {plan: paired(answers["fast"], answers[plan]) for plan in plans[1:]}
    for plan, pair in pairs.items():
        seeds = ", ".join(f"{100 * value:+.2f}" for value in pair["by_seed"])
        print(
            f"fast less {plan}: {100 * pair['difference']:+.2f} points, standard error {100 * pair['error']:.2f} "
            f"(of {count} rows {100 * pair['of_rows']:.2f}, of seeds {100 * pair['of_seeds']:.2f}); by seed {seeds}: "
            f"{'reached' if pair['reached'] else 'not reached'}"
        )
    if count < LEAST_ROWS:
        print(f"{count} rows are fewer than the {LEAST_ROWS} that are wanted")
    if options.json:
        figures = {"rows": count, "enough": count >= LEAST_ROWS, "pairs": pairs, "runs": runs}
        options.json.write_text(json.dumps(figures | {"machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
