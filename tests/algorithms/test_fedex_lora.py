"""FedEx-LoRA: fixture N2, the deployed total, what the base takes up, the low-rank residual."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import best, cards, deployed, gap, ideal, play, random_training, rotated, server
from engines.world import play as play_run
from engines.world import world

from algorithms.fixtures import T1_WEIGHTS, t1, term, uploads
from coterie.algorithms import FedExLoRA, FedExTruncated
from coterie.algorithms.factors import alike, by_layer, mean_factors
from coterie.algorithms.fedex_lora import State, residual
from coterie.protocol import LowRank, Uploads

MEMBERS = cards({"a": 2, "b": 2, "c": 2})
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
N2 = torch.tensor([[0.1875, -0.1875], [-0.1875, 0.1875]], dtype=torch.float64)


def lost_of(sent: Uploads, rank: int) -> LowRank:
    """The residual of the only layer."""
    ((_, held),) = by_layer(sent)
    terms = alike(held, rank)
    return residual(terms, mean_factors(terms))


def test_n2_the_residual_of_t1() -> None:
    sent = uploads(t1(), T1_WEIGHTS)
    lost = lost_of(sent, 1)
    assert torch.equal(lost.product(), N2) and lost.rank == 2


def test_the_average_and_the_patch_together_are_the_mean_of_products_to_1e_12() -> None:
    terms = {
        "1": term([[1, 2], [3, 4]], [[0.5, 1], [1, 1]], scale=2.0),
        "2": term([[0, 1], [-2, 3]], [[1, 0.25], [2, 7]], scale=2.0),
        "3": term([[5, 1], [1, 0]], [[1, -1], [0, 0.75]], scale=3.0),
    }
    sent = uploads(terms, {"1": 0.2, "2": 0.5, "3": 0.3})
    zero = LowRank(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64))
    made = FedExLoRA().aggregate(State({"w": zero}), sent, server())
    D = sum(entry.weight * entry.payload["w"].product() for entry in sent)
    total = made.lora["w"].product() + made.base.patches[-1]["w"].product()
    assert torch.allclose(total, D, rtol=0, atol=1e-12)


def test_a_real_run_loses_nothing_and_its_base_moves_every_round() -> None:
    run = world(FedExLoRA(), ranks=(4, 4, 4))
    played = play_run(run)
    assert all(p.metrics["mismatch"]["relative"] < 1e-5 for p in played)
    assert [p.progress.state.base.version for p in played] == [1, 2, 3]


def test_the_residual_travels_to_every_client_at_rank_n_r() -> None:
    run = world(FedExLoRA(), ranks=(4, 4, 4), rounds=2)
    play_run(run)
    size = 3 * 4 * sum(layer.d_out + layer.d_in for layer in run.cards["c0"].layers.values()) * 4
    booked = [row for row in run.ledger.rows() if row["kind"] == "base"]
    assert [(row["round"], row["client"], row["payload"]) for row in booked] == [(2, f"c{i}", size) for i in range(3)]


def test_one_client_and_equal_clients_have_no_residual() -> None:
    one = term([[1, 2], [3, 4]], [[0, 1], [1, 1]])
    for sent in (uploads({"1": one}), uploads({"1": one, "2": one})):
        assert float(lost_of(sent, 2).product().norm()) < 1e-15


def test_a_client_of_weight_zero_takes_no_room_in_the_residual() -> None:
    sent = uploads(t1(), {"1": 1.0, "2": 0.0})
    assert lost_of(sent, 1).rank == 1


def test_another_basis_of_a_client_deploys_the_same_total_although_the_averages_differ() -> None:
    plain = play(FedExLoRA(), MEMBERS, random_training(), weights=WEIGHTS)
    other = play(FedExLoRA(), MEMBERS, rotated(random_training()), weights=WEIGHTS)
    one, two = deployed(FedExLoRA(), plain), deployed(FedExLoRA(), other)
    assert one is not None and two is not None and gap(two, one) < 1e-5
    averages = [{n: t.product().double() for n, t in outcome.state.lora.items()} for outcome in (plain, other)]
    assert gap(*averages) > 0.01


def test_a_truncated_residual_is_the_best_of_its_rank() -> None:
    for rank in (1, 3):
        algorithm = FedExTruncated(residual_rank=rank)
        outcome = play(algorithm, MEMBERS, random_training(), weights=WEIGHTS)
        D = ideal(outcome, WEIGHTS)
        lost = {name: D[name] - outcome.state.lora[name].product().double() for name in D}
        patch = {name: one.product().double() for name, one in outcome.state.base.patches[-1].items()}
        assert gap(patch, best(lost, rank)) < 1e-5
        assert all(one.rank == rank for one in outcome.state.base.patches[-1].values())


def test_a_residual_rank_that_is_large_enough_is_exact_and_none_means_the_clients_own() -> None:
    outcome = play(FedExTruncated(residual_rank=6), MEMBERS, random_training(), weights=WEIGHTS)
    made = deployed(FedExTruncated(), outcome)
    assert made is not None and gap(made, ideal(outcome, WEIGHTS)) < 1e-5
    default = play(FedExTruncated(), MEMBERS, random_training(), weights=WEIGHTS)
    assert {one.rank for one in default.state.base.patches[-1].values()} == {2}


def test_a_residual_rank_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="residual_rank must be at least 1, not 0; fedit"):
        FedExTruncated(residual_rank=0)
