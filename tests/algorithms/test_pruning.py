"""What travels of a change: the important entries, a random part that is the whole in the mean, their bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import LAYERS, cards

from algorithms.fixtures import term
from coterie.algorithms.pruning import Deltas, Pruning, added, check_deltas
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.maths.sparsify import pruning_ratio
from coterie.protocol import Card, Layer, Sparse
from coterie.wire.codec import size

ONE = cards({"a": 2})[0]
LAYER = Layer(768, 512)


def everywhere(delta: torch.Tensor) -> Sparse:
    return Sparse.at(delta, torch.ones_like(delta, dtype=torch.bool))


def test_the_entries_of_the_largest_importance_are_kept_not_those_of_the_largest_size() -> None:
    delta, importance = torch.tensor([[9.0, 1.0], [1.0, 1.0]]), torch.tensor([[0.1, 0.2], [0.3, 5.0]])
    kept = Pruning(pruning=0.7, growth=0.0).kept(delta, importance)
    assert kept.mask.tolist() == [[False, False], [False, True]]
    assert kept.dense().tolist() == [[0.0, 0.0], [0.0, 12.0]]  # the L1 norm of the whole


def test_the_more_a_few_entries_stand_out_the_fewer_are_kept() -> None:
    flat, steep = torch.rand(60, 40, generator=torch.Generator().manual_seed(0)), torch.full((60, 40), 0.01)
    steep[0, :3] = 100.0
    steep += 1e-6 * flat  # no ties
    method = Pruning()
    counts = [int(method.kept(flat, one).mask.sum()) for one in (flat, steep)]
    assert counts[1] < counts[0] < 0.15 * 2400
    assert counts[1] == pytest.approx((1 - pruning_ratio(steep, 0.85, 0.1, 0.11)) * 2400, abs=2)


def test_the_random_part_is_the_step_in_the_mean() -> None:
    step, total = torch.arange(1.0, 13.0).view(3, 4), torch.zeros(3, 4)
    for number in range(2000):
        part = Pruning(down_pruning=0.75).drawn(step, root_key(number))
        assert part.values.numel() == 3
        total += part.dense()
    assert float((total / 2000 / step - 1).abs().max()) < 5 * (3 / 2000) ** 0.5  # deviation sqrt(1 / keep - 1)


def test_real_messages_are_as_long_as_the_formulas_say() -> None:
    card, key, method = Card("a", 8, 1, 1.0, {"w": LAYER}), root_key(1), Pruning(growth=0.0)
    dB, dA = key.fold("B").normal((768, 8)), key.fold("A").normal((8, 512))
    sent = Deltas({"w": method.kept(dB, dB.abs())}, {"w": method.kept(dA, dA.abs())})
    assert size(sent).payload == method.bytes_up(LAYER, card)
    steps = {"B": size(method.drawn(dB, key)).payload, "A": size(method.drawn(dA, key)).payload}
    assert steps == {factor: method.step_bytes(LAYER, card, factor) for factor in ("B", "A")}
    assert method.bytes_down(LAYER, card) == sum(steps.values()) // 2


def test_server_and_client_add_a_delta_alike() -> None:
    one = term([[1], [0]], [[1, 0]])
    delta = Sparse.at(torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[False], [True]]))
    assert added(one, "B", delta).B.tolist() == [[1.0], [2.0]]
    assert added(one, "B", delta).A is one.A
    assert size(delta).payload == 8 + 1


def test_deltas_on_a_pair_are_the_pair_that_the_client_trained() -> None:
    start, trained = term([[1], [0]], [[1, 0]]), term([[3], [5]], [[0, 7]])
    sent = Deltas({"w": everywhere(trained.B - start.B)}, {"w": everywhere(trained.A - start.A)})
    B, A = sent.added_to(start, "w")
    assert torch.equal(B, trained.B) and torch.equal(A, trained.A)
    single = replace(start, B=start.B.float(), A=start.A.float())
    assert sent.added_to(single, "w")[0].dtype == torch.float64


def test_an_upload_of_other_shapes_is_refused() -> None:
    B = {name: everywhere(torch.zeros(layer.d_out, 2)) for name, layer in LAYERS.items()}
    A = {name: everywhere(torch.zeros(2, layer.d_in)) for name, layer in LAYERS.items()}
    check_deltas(Deltas(B, A), ONE)
    for odd in (None, Deltas(B, B), Deltas(B, {"first": A["first"]}), Deltas(B, {"first": torch.zeros(2, 5)})):  # type: ignore[dict-item]
        with pytest.raises(ModelError, match=r"client a: an upload must be one (sparse dB|[AB] )"):
            check_deltas(odd, ONE)


def test_shares_that_cannot_be_meant_are_refused() -> None:
    for options in ({"pruning": 1.0}, {"down_pruning": -0.1}, {"pruning": 0.95, "most": 0.2}, {"growth": -1.0}):
        with pytest.raises(ValueError, match=r"pruning|growth"):
            Pruning(**options)
