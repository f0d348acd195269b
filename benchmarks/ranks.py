"""What unequal ranks cost in one stack: clients of ranks 2 to 16 trained together, against as many of rank 16.

    python benchmarks/ranks.py --json ranks.json

Eight clients in one step, smaller ranks padded by zeros, AdamW, one thread, CPU seconds, the two in turns. `small`: an
encoder of two layers and width 64, batches of 4 texts of 16 tokens, where stacks pay most. `minilm`: MiniLM's shape
with random weights, batches of 8 texts of 32 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peak import KEY, TARGETS, ask_of, shape_of
from standin import machine, versions
from transformers import BertConfig, BertForSequenceClassification

from coterie.models.loading import Base, from_network
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor, divided

WANTED = 1.1
MIXED = (2, 4, 6, 8, 10, 12, 14, 16)


@dataclass(frozen=True)
class Case:
    """An encoder and the batches of every client."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int
    steps: int


CASES = {"small": Case(2, 64, 2, 4, 16, 20), "minilm": Case(6, 384, 12, 8, 32, 3)}


def encoder(case: Case) -> Base:
    """Random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=500,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=4 * case.width,
        max_position_embeddings=64,
        num_labels=2,
    )
    network = BertForSequenceClassification(config)
    return from_network(network, None, TARGETS, KEY.fold("head"), attention="eager")


def cohort(base: Base, case: Case, ranks: tuple[int, ...]) -> list[Ask]:
    """A Fit for each client, each with a party's name and key of its own."""
    asks = []
    for number, rank in enumerate(ranks):
        made = ask_of(base, shape_of(base, rank, case.batch, case.length), case.steps)
        asks.append(replace(made, party=f"c{number}", key=KEY.fold("client", number)))
    return asks


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """CPU seconds of both groups, and the median of their ratios within a turn."""
    base = encoder(case)
    plan = Plan(clients_per_step=len(MIXED), padding_rank=max(MIXED))
    executor = Executor({"base": base}, TrainSettings(batch_size=case.batch, steps=case.steps), plan)
    groups = {"mixed": cohort(base, case, MIXED), "equal": cohort(base, case, (max(MIXED),) * len(MIXED))}
    for asks in groups.values():
        if len(divided(asks, plan.clients_per_step)[0]) != 1:
            raise RuntimeError("the clients do not train in one stack")
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for repeat in range(repeats + 1):
        for name, asks in groups.items():
            began = time.process_time()
            for done in executor.answer(asks):
                if not isinstance(done, Done):
                    raise done
            if repeat:
                seconds[name].append(time.process_time() - began)
    ratios = [one / other for one, other in zip(seconds["mixed"], seconds["equal"], strict=True)]
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {"seconds": median, "ratio": statistics.median(ratios), "all": seconds}


def main() -> None:
    """Measures both encoders, prints a line for each and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=list(CASES), help="this encoder alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name, case in CASES.items():
        if options.only in (None, name):
            rows[name] = row = measure(case, options.repeats)
            mixed, equal = (1e3 * row["seconds"][group] for group in ("mixed", "equal"))
            print(f"{name:7s} ranks 2 to 16 {mixed:.0f} ms, all of 16 {equal:.0f} ms: {row['ratio']:.3f} times")
    print(f"at most {WANTED} is wanted")
    if options.json:
        figures = {"ranks": MIXED, "rows": rows, "machine": machine(), "versions": versions()}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
