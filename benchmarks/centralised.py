"""What federating costs: fifty clients' round against one training on all their data, with the same plan.

    python benchmarks/centralised.py --json centralised.json

MiniLM, LoRA of rank 8 on query and value, texts of 32 tokens, batches of 16, AdamW, in the plan that a probe chooses;
one core. Federated: a whole round of FedIT with all 50 clients, each one epoch over its own 64 texts, with messages,
checks, averaging, ledger and a checkpoint on disk. Central: one training over the 3,200 texts, one epoch, so the same
texts, as many steps and tokens. The two take turns; seconds are of the process, so that company does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peak import KEY, TARGETS, ask_of, shape_of
from standin import machine, versions

from coterie.algorithms import FedIT
from coterie.assets import fetch
from coterie.data.text import TextSet
from coterie.engines.checkpoints import CheckpointStore
from coterie.engines.in_process import InProcess
from coterie.engines.setting import Measuring, Setting, Site
from coterie.models.loading import Base, load_base
from coterie.protocol import Card, Fit
from coterie.training.asks import Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.probe import choose_plan
from coterie.wire.codec import encode
from coterie.wire.ledger import Ledger

WANTED = 1.05
RANK, SCALE = 8, 2.0


def contenders(
    base: Base, clients: int, steps: int, batch: int, length: int, plan: Plan | None
) -> tuple[dict[str, Callable[[], None]], Plan]:
    """Functions that play each once, and the plan of both."""
    shape = shape_of(base, RANK, batch, length)
    whole = ask_of(base, shape, clients * steps)
    text = whole.data
    assert isinstance(text, TextSet)
    settings = TrainSettings(batch_size=batch, steps=None, epochs=1)
    chosen = plan or choose_plan(base, text, settings, rank=RANK)
    executor = Executor({"base": base}, settings, chosen)
    own, sites = steps * batch, {}
    for number in range(clients):
        card = Card(f"c{number:03d}", RANK, own, SCALE, base.layers)
        sites[card.id] = Site(card, {"train": text.select(range(number * own, number * own + own))})
    setting = Setting(
        algorithm=FedIT(),
        sites=sites,
        rounds=2,
        heads={"base": base.head},
        measuring=Measuring(every=2, clients_every=2, objective_examples=0, mismatch=False),
    )

    def federated() -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = CheckpointStore(Path(folder))
            engine = InProcess(setting, executor, store, Ledger())
            played = engine.play(engine.begin())
            if len(played.metrics["answered"]) < clients:
                raise RuntimeError(f"clients failed: {played.metrics['failed']}")
            store.put("progress", encode(played.progress, dense=True))
            store.put("ledger", engine.ledger.state_text().encode())
            store.commit(1, {})

    def central() -> None:
        assert isinstance(whole.request, Fit)
        (done,) = executor.answer([replace(whole, request=Fit(whole.request.initial, epochs=1))])
        if not isinstance(done, Done):
            raise done

    return {"federated": federated, "central": central}, chosen


def measure(played: dict[str, Callable[[], None]], repeats: int) -> dict[str, Any]:
    """CPU seconds of each, in turn after a warm-up, and the median of the ratios within a turn."""
    seconds: dict[str, list[float]] = {name: [] for name in played}
    for repeat in range(repeats + 1):
        for name, play in played.items():
            began = time.process_time()
            play()
            if repeat:
                seconds[name].append(time.process_time() - began)
    ratios = [one / other for one, other in zip(seconds["federated"], seconds["central"], strict=True)]
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    return {"seconds": median, "all": seconds, "ratio": statistics.median(ratios), "ratios": ratios}


def main() -> None:
    """Measures, prints one line and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--steps", type=int, default=4, help="of each client")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="a folder in place of MiniLM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = load_base(options.model or fetch("minilm"), targets=TARGETS, num_labels=2, head_key=KEY.fold("head"))
    played, plan = contenders(base, options.clients, options.steps, options.batch, options.length, None)
    found = measure(played, options.repeats)
    federated, central = found["seconds"]["federated"], found["seconds"]["central"]
    print(
        f"{options.clients} clients of {options.steps} steps: {federated:.2f} s a round, {central:.2f} s for one "
        f"training on all, {found['ratio']:.3f} times (at most {WANTED} is wanted); {plan.dtype}, {plan.attention}"
    )
    if options.json:
        told = {"clients": options.clients, "steps": options.steps, "plan": str(plan), "machine": machine()}
        options.json.write_text(json.dumps(found | told | {"versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
