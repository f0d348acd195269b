"""One federation under every plan: the same to a stated tolerance, and to the bit where a plan says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.adapters.inject import eject
from coterie.algorithms import FedIT, FLoRA
from coterie.maths.keys import root_key
from coterie.models.loading import Base, from_network
from coterie.protocol import Model, as_adapters
from coterie.training.asks import Plan
from coterie.wire.codec import encode
from engines.world import FAST, base, dense, play, world

UPPER = ["1.attention.self.query", "1.attention.self.value"]
TRAIN = replace(FAST, steps=10, lr=0.3)
EXACT = Plan(dtype="float64", padding_rank=16)
PLANS = {
    "plain": (Plan(), 1e-6),
    "sdpa": (Plan(attention="sdpa"), 1e-6),
    "stacked": (Plan(clients_per_step=3, padding_rank=16), 1e-6),
    "two threads": (Plan(threads=2), 1e-6),
    "stored": (Plan(lower_memory=8), 1e-6),
    "stored, stacked, sdpa": (Plan(lower_memory=8, clients_per_step=3, padding_rank=16, attention="sdpa"), 1e-6),
    "stored in float64": (replace(EXACT, lower_memory=8), 1e-10),
    "bfloat16": (Plan(dtype="bfloat16"), 5e-3),
    "stored in bfloat16": (Plan(dtype="bfloat16", lower_memory=8), 5e-3),
}
"""Of each, how far from the exact plan the model may lie after three rounds of SGD, at most."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    yield
    torch.set_num_threads(1)


def upper() -> Base:
    """The toy encoder with adapters in its second block alone."""
    network = base().network
    eject(network)
    return from_network(network, None, UPPER, root_key(0).fold("head"), attention="eager")


def deployed(method: Any, plan: Plan) -> dict[str, torch.Tensor]:
    """What the server's model adds to each layer after three rounds, changes of the base included."""
    run = world(method(), (4, 4, 4), plan=plan, train=TRAIN, network=upper())
    state = play(run)[-1].progress.state
    found = dense(run.algorithm.global_model(state))
    log = getattr(state, "base", None)
    for patch in () if log is None else as_adapters(log.patches):
        for name, product in dense(Model(lora=patch)).items():
            found[name] = found[name] + product if name in found else product
    return found


@pytest.mark.parametrize("method", [FedIT, FLoRA])
def test_all_plans_agree_to_their_tolerances(method: Any) -> None:
    exact = deployed(method, EXACT)
    assert len(exact) == 2 and all(float(product.abs().max()) > 0.02 for product in exact.values())
    for name, (plan, tolerance) in PLANS.items():
        found = deployed(method, plan)
        for layer, product in exact.items():
            assert float((product - found[layer]).abs().max()) <= tolerance, (name, layer)


@pytest.mark.parametrize("method", [FedIT, FLoRA])
def test_room_and_company_change_no_bit_of_a_plan_that_stores(method: Any) -> None:
    ends = []
    for plan in (
        Plan(lower_memory=8, padding_rank=16),
        Plan(lower_disk=8, padding_rank=16),
        Plan(lower_disk=8, padding_rank=16, clients_per_step=3),
    ):
        run = world(method(), (4, 4, 4), plan=plan, network=upper())
        last = play(run)[-1]
        run.executor.close()
        ends.append((encode(last.progress.state, dense=True), last.metrics["global"]))
    assert ends[0] == ends[1] == ends[2]
