"""FedIT: fixtures N1 and the factor average's known faults."""

from __future__ import annotations

import torch

from algorithms.fixtures import T1_WEIGHTS, card, t1, t2, term, uploads
from coterie.algorithms.factors import average_factors, cut_for


def test_t1_averages_factor_by_factor() -> None:
    made = average_factors(uploads(t1(), T1_WEIGHTS), 1)["w"]
    expected = torch.tensor([[0.5625, 0.1875], [0.1875, 0.0625]], dtype=torch.float64)
    assert torch.equal(made.product(), expected)


def test_t1_interference_is_0_375() -> None:
    made = average_factors(uploads(t1(), T1_WEIGHTS), 1)["w"]
    assert abs(float((made.product() - torch.diag(torch.tensor([0.75, 0.25]))).norm()) - 0.375) < 1e-15


def test_equal_clients_average_to_themselves() -> None:
    one = term([[1, 2], [3, 4]], [[0, 1], [1, 1]])
    assert torch.equal(average_factors(uploads({"1": one, "2": one}), 2)["w"].B, one.B)


def test_a_sign_flip_that_leaves_products_alone_destroys_the_average() -> None:
    one, flipped = term([[1], [2]], [[1, 1]]), term([[-1], [-2]], [[-1, -1]])
    assert torch.equal(one.product(), flipped.product())
    assert float(average_factors(uploads({"1": one, "2": flipped}), 1)["w"].product().norm()) == 0.0


def test_unequal_ranks_are_padded_with_zeros_and_cut_again() -> None:
    made = average_factors(uploads(t2()), 2)
    assert torch.equal(made["w"].A, torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert torch.equal(made["w"].B, torch.tensor([[1.0, 0.0], [0.0, 0.5]], dtype=torch.float64))
    small = cut_for(made, card("1", 1))["w"]
    assert small.rank == 1 and torch.equal(small.B, made["w"].B[:, :1])


def test_unequal_scales_count_in_the_average_and_are_divided_out_for_the_receiver() -> None:
    first, second = term([[1], [0]], [[1, 0]], scale=1.0), term([[1], [0]], [[1, 0]], scale=3.0)
    made = average_factors(uploads({"1": first, "2": second}), 1)
    assert torch.equal(made["w"].product(), torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    sent = cut_for(made, card("2", 1, scale=3.0))["w"]
    assert sent.scale == 3.0 and torch.allclose(sent.product(), made["w"].product(), atol=1e-15)
