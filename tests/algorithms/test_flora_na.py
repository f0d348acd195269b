"""FLoRA-NA: N6 through the server, never worse than FedIT, FedIT at zero sweeps."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import LAYERS, cards, deployed, gap, ideal, play, random_training, server
from engines.world import play as play_run
from engines.world import world

from algorithms.fixtures import T1_WEIGHTS, t1, uploads
from coterie.algorithms import FedIT, FLoRANA
from coterie.algorithms.flora_na import State
from coterie.protocol import LowRank

MEMBERS = cards({"a": 2, "b": 2, "c": 2})
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def test_n6_t1_keeps_the_first_client_with_error_one_quarter() -> None:
    zero = torch.zeros(2, 1, dtype=torch.float64)
    made = FLoRANA().aggregate(State({"w": LowRank(zero, zero.mT)}), uploads(t1(), T1_WEIGHTS), server()).lora["w"]
    assert torch.allclose(made.product(), torch.diag(torch.tensor([0.75, 0.0]).double()), atol=1e-6)
    target = torch.diag(torch.tensor([0.75, 0.25]).double())
    assert float((made.product() - target).norm()) == pytest.approx(0.25, abs=1e-9)


def test_zero_sweeps_are_fedit() -> None:
    mine, fedit = (play(a, MEMBERS, random_training(), weights=WEIGHTS).state.lora for a in (FLoRANA(0), FedIT()))
    for name, term in mine.items():
        assert torch.equal(term.B, fedit[name].B) and torch.equal(term.A, fedit[name].A)


def test_the_error_of_every_layer_is_at_most_fedits_and_of_these_clients_far_less() -> None:
    mine, fedit = (play(a, MEMBERS, random_training(), weights=WEIGHTS) for a in (FLoRANA(), FedIT()))
    D, ours, theirs = ideal(mine, WEIGHTS), deployed(FLoRANA(), mine), deployed(FedIT(), fedit)
    assert ours is not None and theirs is not None
    for name in LAYERS:
        assert gap({name: ours[name]}, {name: D[name]}) < 0.95 * gap({name: theirs[name]}, {name: D[name]})


def test_a_real_run_loses_no_more_than_fedit_in_its_first_round() -> None:
    mine, fedit = (play_run(world(a, ranks=(4, 4, 4), rounds=1))[0] for a in (FLoRANA(), FedIT()))
    assert mine.metrics["mismatch"]["absolute"] <= fedit.metrics["mismatch"]["absolute"] * (1 + 1e-6)


def test_up_and_down_are_fedits() -> None:
    for layer in LAYERS.values():
        assert FLoRANA().bytes_up(layer, MEMBERS[0]) == FedIT().bytes_up(layer, MEMBERS[0])
        assert FLoRANA().bytes_down(layer, MEMBERS[0]) == FedIT().bytes_down(layer, MEMBERS[0])


def test_sweeps_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="sweeps must not be negative, but is -1"):
        FLoRANA(sweeps=-1)
