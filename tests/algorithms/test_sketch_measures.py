"""What sketches lost: by hand, against dense matrices, over layers that differ, and where there is nothing to tell."""

from __future__ import annotations

import pytest
import torch
from reference.dense_sketch import error_bound
from reference.random_factors import pair

from algorithms.fixtures import t1, term
from coterie.algorithms.sketch_measures import sketch_losses, trained_by
from coterie.protocol import LowRank, Model, Seen

SIZES = {"first": (4, 9), "second": (3, 7)}


def lora(seed: int, rank: int) -> dict[str, LowRank]:
    return {"first": LowRank(*pair(seed, 12, rank, 9)), "second": LowRank(*pair(seed + 50, 7, rank, 10))}


def test_by_hand_on_t1() -> None:
    """W = diag(3/4, 1/4), What = diag(3/4, 0): 1/4 is lost, as much as the best of rank 1 loses, of ||W||^2 = 10/16."""
    trained = {name: (weight, {"w": t1()[name]}) for name, weight in (("1", 0.75), ("2", 0.25))}
    told = sketch_losses(trained, {"w": term([[1], [0]], [[0.75, 0]])}, 1, lambda name: (1, 3))
    assert told == pytest.approx({"sketch_error": 10**-0.5, "tail_energy": 10**-0.5})


def test_errors_of_dense_matrices_over_all_layers_together() -> None:
    trained = {"a": (0.25, lora(1, 2)), "b": (0.75, lora(2, 4))}
    rebuilt = lora(3, 3)
    W = {n: 0.25 * trained["a"][1][n].product() + 0.75 * trained["b"][1][n].product() for n in SIZES}
    spectra = {name: torch.linalg.svdvals(one) for name, one in W.items()}
    energy = sum(float(one.square().sum()) for one in W.values())
    squares = {
        "sketch_error": sum(float((rebuilt[name].product() - W[name]).square().sum()) for name in SIZES),
        "tail_energy": sum(float(S[3:].square().sum()) for S in spectra.values()),
        "sketch_bound": sum(error_bound(S.tolist(), *SIZES[name]) for name, S in spectra.items()),
    }
    told = sketch_losses(trained, rebuilt, 3, SIZES.__getitem__)
    assert told == pytest.approx({name: (value / energy) ** 0.5 for name, value in squares.items()}, rel=1e-8)


def test_scales_do_not_count_since_unscaled_products_are_sketched() -> None:
    plain = sketch_losses({"a": (1.0, lora(1, 2))}, lora(3, 3), 3, SIZES.__getitem__)
    scaled = {name: LowRank(one.B, one.A, 5.0) for name, one in lora(1, 2).items()}
    assert sketch_losses({"a": (1.0, scaled)}, lora(3, 3), 3, SIZES.__getitem__) == plain


def test_a_perfect_reconstruction_has_lost_nothing_but_rounding() -> None:
    told = sketch_losses({"a": (1.0, lora(1, 1))}, lora(1, 1), 1, SIZES.__getitem__)
    assert told["sketch_error"] < 1e-7 and told["tail_energy"] < 1e-7 and told["sketch_bound"] < 1e-6


def test_a_layer_of_one_client_is_that_clients_and_a_layer_of_nobody_is_left_out() -> None:
    both, only = lora(1, 2), {"first": lora(2, 2)["first"]}
    told = sketch_losses({"a": (0.5, both), "b": (0.5, only)}, lora(3, 3), 3, SIZES.__getitem__)
    apart = (lora(3, 3)["second"].product() - both["second"].product()).square().sum()
    mean = (both["first"].product() + only["first"].product()) / 2
    apart += (lora(3, 3)["first"].product() - mean).square().sum()
    energy = both["second"].product().square().sum() + mean.square().sum()
    assert told["sketch_error"] == pytest.approx(float(apart / energy) ** 0.5)
    left = sketch_losses({"b": (1.0, only)}, lora(3, 3), 3, SIZES.__getitem__)
    alone = sketch_losses({"b": (1.0, only)}, {"first": lora(3, 3)["first"]}, 3, SIZES.__getitem__)
    assert left == alone


def test_sizes_outside_of_the_lemma_leave_the_bound_out() -> None:
    sizes = SIZES | {"second": (3, 4)}
    assert set(sketch_losses({"a": (1.0, lora(1, 2))}, lora(3, 3), 3, sizes.__getitem__)) == {
        "sketch_error",
        "tail_energy",
    }


def test_nothing_is_told_where_nobody_trained_or_all_products_are_zero() -> None:
    zero = {name: LowRank(torch.zeros_like(one.B), one.A) for name, one in lora(1, 2).items()}
    assert sketch_losses({}, lora(3, 3), 3, SIZES.__getitem__) == {}
    assert sketch_losses({"a": (0.0, lora(1, 2))}, lora(3, 3), 3, SIZES.__getitem__) == {}
    assert sketch_losses({"a": (1.0, zero)}, zero, 3, SIZES.__getitem__) == {}


def test_only_clients_whose_factors_are_known_are_counted() -> None:
    known = lora(1, 2)
    seen = {"a": Seen(0.5, Model(lora=known), None), "b": Seen(0.3, None, None), "c": Seen(0.2, Model(), None)}
    assert trained_by(seen) == {"a": (0.5, known)}
