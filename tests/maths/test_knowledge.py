"""Whose prediction an example is learnt from, and the distributions that become targets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.maths.keys import root_key
from coterie.maths.knowledge import best_source, chosen_targets, merged, rewards, source_shares


def test_of_losses_a_half_and_one_the_first_wins_and_shares_are_as_printed() -> None:
    """N20."""
    losses = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    assert rewards(losses).flatten().tolist() == pytest.approx([0.6065, 0.3679], abs=5e-5)
    assert best_source(losses).tolist() == [0]
    assert source_shares(losses).flatten().tolist() == pytest.approx([0.5594, 0.4406], abs=5e-5)


def test_of_equal_losses_the_first_source_counts_that_is_the_receiver() -> None:
    assert best_source(torch.tensor([[0.7, 0.2], [0.7, 0.1]])).tolist() == [0, 1]


def test_where_all_logits_are_sent_the_target_is_the_sources_softmax() -> None:
    key = root_key(1)
    logits = [key.fold(i).normal((5, 4)).sort(dim=1, descending=True).values for i in range(2)]
    ids = [torch.stack([key.fold("ids", i, row).normal((4,)).argsort() for row in range(5)]) for i in range(2)]
    examples = torch.tensor([0, 0, 1, 1, 1])
    losses = torch.tensor([[0.3, 0.9], [0.5, 0.2]])
    found, p = chosen_targets(ids, logits, losses, examples, 2.0, mean=False)
    for row, source in enumerate([0, 0, 1, 1, 1]):
        whole = torch.zeros(4).index_put((ids[source][row],), (logits[source][row] / 2).softmax(0))
        assert torch.allclose(torch.zeros(4).index_put((found[row],), p[row], accumulate=True), whole, atol=1e-6)


def test_the_mean_weighs_all_sources_by_their_shares() -> None:
    ids, logits = [torch.tensor([[0, 1]]), torch.tensor([[1, 2]])], [torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])]
    losses = torch.tensor([[0.5], [1.0]])
    found, p = chosen_targets(ids, logits, losses, torch.tensor([0]), 1.0, mean=True)
    share = source_shares(losses.double()).flatten()
    top = math.e / (1 + math.e)
    expected = torch.stack([share[0] * 0.5, share[0] * 0.5 + share[1] * top, share[1] * (1 - top)])
    made = torch.zeros(3, dtype=torch.float64).index_put((found[0],), p[0].double(), accumulate=True)
    assert torch.allclose(made, expected, atol=1e-6)
    assert [int(i) for i, weight in zip(found[0], p[0], strict=True) if weight > 0] == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=9))
def test_merging_keeps_each_ids_weight_and_names_it_once(pairs: list[tuple[int, float]]) -> None:
    ids = torch.tensor([[i for i, _ in pairs]])
    weights = torch.tensor([[w for _, w in pairs]], dtype=torch.float64)
    found, summed = merged(ids, weights)
    whole = torch.zeros(5, dtype=torch.float64).index_put((ids[0],), weights[0], accumulate=True)
    assert torch.allclose(torch.zeros(5, dtype=torch.float64).index_put((found[0],), summed[0], accumulate=True), whole)
    named = [int(i) for i, w in zip(found[0], summed[0], strict=True) if w > 0]
    assert named == sorted(set(named))
