"""The server's share of a round: 48 layers of 1024 x 1024, forty clients of rank 16, one core.

    python benchmarks/server_round.py --json server_round.json

Timed is `aggregate`, from uploads as they arrived to the new state: FedPA-LoRA's best approximation of rank 16 of the
clients' mean product, by the randomised route of the paper's Remark 2 and exactly, and SeFoRA's average of sketches.
`dense` is what all avoid: the products, their mean, its SVD, with LAPACK in fp32; one layer, times the layers. `above`:
how much further from the mean product the randomised result is than the best one, on one layer, in the Frobenius norm.

A round's training is that of a model with these layers: 24 blocks of width 1024, q and v adapted, random weights, in
bf16. One step of 16 texts of 32 tokens is timed, and a round is forty clients of eight steps. Seconds are of the
process, so that company does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peak import KEY, TARGETS, ask_of, shape_of
from server_all import dense_flexlora
from standin import Reached, Round, alike, begun, cards, machine, versions, watched
from transformers import BertConfig, BertForSequenceClassification

from coterie.algorithms import Algorithm, FedPALoRA, SeFoRA
from coterie.engines.driver import drive_one
from coterie.models.loading import from_network
from coterie.protocol import Layer
from coterie.training.asks import Done, Plan, TrainSettings
from coterie.training.executor import Executor

WANTED = 20.0
CLIENTS, RANK, STEPS = 40, 16, 8
METHODS: Mapping[str, Algorithm] = {
    "FedPA-LoRA, randomised": FedPALoRA(reconstruction="randomised"),
    "FedPA-LoRA, exact": FedPALoRA(),
    "SeFoRA": SeFoRA(),
}


def uploaded(algorithm: Algorithm, layers: int, size: int, clients: int) -> tuple[Any, Round]:
    """The engine, and the method's first round up to its uploads: common factors, and a spread of each client's own."""
    members = cards([RANK] * clients, {f"layer{number:02d}": Layer(size, size) for number in range(layers)})
    engine = watched(algorithm, members, rounds=2, trained=alike, strict=False)
    engine.stop_in = "main"
    try:
        list(engine.rounds(begun(engine)))
    except Reached:
        return engine, engine.seen[-1]
    raise RuntimeError(f"{algorithm.traits.title} has no main round")


def aggregated(algorithm: Algorithm, layers: int, size: int, clients: int) -> Callable[[], Any]:
    """The server's half of a round, to be played again and again."""
    engine, one = uploaded(algorithm, layers, size, clients)
    party = engine._server_party(one.number, {})
    return lambda: drive_one(algorithm.aggregate(one.before, one.uploads, one.server), party, engine.executor)


def excess(size: int, clients: int) -> float:
    """By how much the randomised route's error is above the least one, as a part of that."""
    errors = {}
    for name in ("FedPA-LoRA, randomised", "FedPA-LoRA, exact"):
        _, one = uploaded(METHODS[name], 1, size, clients)
        weights = [entry.weight for entry in one.uploads]
        terms = [entry.payload["layer00"] for entry in one.uploads]
        mean = sum(w * t.B.double() @ t.A.double() for w, t in zip(weights, terms, strict=True))
        made = aggregated(METHODS[name], 1, size, clients)().reference["layer00"]
        errors[name] = float(torch.linalg.norm(mean - made.B.double() @ made.A.double()))
    return errors["FedPA-LoRA, randomised"] / errors["FedPA-LoRA, exact"] - 1


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds of one run."""
    began = time.process_time()
    run()
    return time.process_time() - began


def training_step(blocks: int, size: int, batch: int = 16, length: int = 32) -> float:
    """CPU seconds of a client's step on the model that has these layers: the median of three, after one."""
    config = BertConfig(
        vocab_size=1000,
        hidden_size=size,
        num_hidden_layers=blocks,
        num_attention_heads=size // 64,
        intermediate_size=4 * size,
        max_position_embeddings=64,
        num_labels=2,
        dtype=torch.bfloat16,
    )
    network = BertForSequenceClassification(config).to(torch.bfloat16)
    base = from_network(network, None, TARGETS, KEY.fold("head"), attention="eager")
    executor = Executor({"base": base}, TrainSettings(batch_size=batch, steps=1), Plan(dtype="bfloat16"))
    ask = ask_of(base, shape_of(base, RANK, batch, length), 1)

    def step() -> None:
        (done,) = executor.answer([ask])
        if not isinstance(done, Done):
            raise done

    step()
    return statistics.median(seconds(step) for _ in range(3))


def main() -> None:
    """Measures all, prints a line for each and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--layers", type=int, default=48, help="an even number: two in each block")
    parser.add_argument("--size", type=int, default=1024, help="a multiple of 64, and 1024 for the row of dense")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = training_step(options.layers // 2, options.size)
    training = options.clients * STEPS * step
    dense = dense_flexlora(options.layers)
    print(f"{options.layers} layers of {options.size}^2, {options.clients} clients of rank {RANK}; dense {dense:.1f} s")
    rows = {}
    for name, algorithm in METHODS.items():
        run = aggregated(algorithm, options.layers, options.size, options.clients)
        run()
        taken = [seconds(run) for _ in range(options.repeats)]
        middle = statistics.median(taken)
        rows[name] = {
            "seconds": middle,
            "all": taken,
            "times": dense / middle,
            "share": middle / (middle + training),
        }
        print(f"{name:23s} {middle:.2f} s, {dense / middle:.0f} times as fast; {rows[name]['share']:.2%} of a round")
    above = excess(options.size, options.clients)
    print(f"the randomised result's error is {above:.2%} above the least; a step of training takes {step:.2f} s")
    if options.json:
        figures = {"dense": dense, "step": step, "training": training, "above": above, "rows": rows}
        options.json.write_text(json.dumps(figures | {"machine": machine(), "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
