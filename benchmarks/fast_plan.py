"""What the fast plan costs in accuracy: bf16 and batches of like length, against fp32 and plain batches.

    python benchmarks/fast_plan.py --json fast_plan.json

FedIT on MiniLM, film and product reviews, three seeds, few rounds; the global model answers every row of the pooled
tests. `fast` is the plan that a probe chooses, with buckets; `fp32` is fp32 without buckets; `fp32, buckets` has the
fast plan's batches, so that precision alone is what differs from it. A row's difference is how often the fast plan's
three models are right less how often the other's are; its mean over all rows is the difference of accuracies, and rows
of one test are independent, so the standard error is theirs. Training anew moves all rows of a seed together, which
that error cannot know: the differences seed by seed stand beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
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
}


@dataclass(frozen=True)
class Size:
    """Of the federation: clients, rounds, and steps of a client in each."""

    clients: int = 5
    rounds: int = 6
    steps: int = 10
    batch: int = 16


def config(task: dict[str, Any], seed: int, plan: str, size: Size, model: str) -> dict[str, Any]:
    """A run's configuration."""
    chosen = PLANS[plan]
    return {
        "method": "fedit",
        "rounds": size.rounds,
        "seed": seed,
        "task": task,
        "model": {"base": model, "targets": ["query", "value"]},
        "clients": {"count": size.clients, "ranks": [8]},
        "lora": {"alpha": 16},
        "partition": {"kind": "dirichlet", "beta": 0.5},
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


def right(task: dict[str, Any], seed: int, plan: str, size: Size, model: str) -> tuple[Tensor, str, float]:
    """Which rows of the pooled test the trained global model answers rightly, (n,) bool; its plan; CPU seconds."""
    began = time.process_time()
    built = build(parse(config(task, seed, plan, size, model)))
    engine = InProcess(built.setting, built.executor, Volatile(), Ledger())
    progress = engine.begin()
    while not progress.finished:
        progress = engine.play(progress).progress
    test: DataSet | None = built.setting.pooled_test
    found = built.setting.algorithm.global_model(progress.state)
    assert test is not None and isinstance(found, Model)
    (head,) = progress.heads.values()
    asked = Ask("server", Predict(found, data="pooled"), built.setting.server_base, head, test, root_key(0))
    (done,) = built.executor.answer([asked])
    if not isinstance(done, Done):
        raise done
    assert isinstance(done.answer, Predictions)
    said = done.answer.logits.argmax(dim=1)
    return said == done.answer.labels, f"{built.plan.dtype}, {built.plan.attention}", time.process_time() - began


def paired(fast: Tensor, other: Tensor) -> dict[str, Any]:
    """fast, other: bool (seeds, n), right or not. Their difference over rows, with its standard error."""
    by_row = (fast.double() - other.double()).mean(dim=0)
    error = float(by_row.std(correction=1)) / math.sqrt(len(by_row))
    difference = float(by_row.mean())
    within = abs(difference) <= MOST_ERRORS * error or difference >= 0
    return {
        "difference": difference,
        "error": error,
        "by_seed": (fast.double() - other.double()).mean(dim=1).tolist(),
        "reached": within and difference >= -MOST_POINTS,
    }


def main() -> None:
    """Plays all, prints a line for each pair and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--tasks", nargs="*", default=["movie", "product"])
    parser.add_argument("--path", help="a file of texts and labels, for the task `file`")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=Size.rounds)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--model", default="minilm", help="an asset or a folder")
    options = parser.parse_args()
    size = Size(rounds=options.rounds, steps=options.steps)
    own = {} if options.path is None else {"path": options.path}
    answers: dict[str, list[Tensor]] = {name: [] for name in PLANS}
    runs = []
    for seed in options.seeds:
        rows: dict[str, list[Tensor]] = {name: [] for name in PLANS}
        for task in options.tasks:
            for plan in PLANS:
                found, way, seconds = right({"name": task, **own}, seed, plan, size, options.model)
                rows[plan].append(found)
                runs.append(
                    {
                        "task": task,
                        "seed": seed,
                        "plan": plan,
                        "way": way,
                        "accuracy": float(found.double().mean()),
                        "rows": len(found),
                        "cpu": seconds,
                    }
                )
                told = runs[-1]
                print(f"{task}, seed {seed}, {plan} ({way}): {told['accuracy']:.2%} of {len(found)}, {seconds:.0f} s")
        for plan, parts in rows.items():
            answers[plan].append(torch.cat(parts))
    stacked = {plan: torch.stack(parts) for plan, parts in answers.items()}
    count = stacked["fast"].shape[1]
    pairs = {plan: paired(stacked["fast"], stacked[plan]) for plan in PLANS if plan != "fast"}
    for plan, one in pairs.items():
        seeds = ", ".join(f"{100 * value:+.2f}" for value in one["by_seed"])
        print(
            f"fast less {plan}: {100 * one['difference']:+.2f} points, standard error {100 * one['error']:.2f} over "
            f"{count} rows; by seed {seeds}: {'reached' if one['reached'] else 'not reached'}"
        )
    if count < LEAST_ROWS:
        print(f"{count} rows are fewer than the {LEAST_ROWS} that are wanted")
    if options.json:
        figures = {"rows": count, "enough": count >= LEAST_ROWS, "pairs": pairs, "runs": runs}
        options.json.write_text(json.dumps(figures | {"machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
