"""What methods share on low-rank factors: initial values, cutting, averages and stacks against dense sums, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import cards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.fixtures import T1_WEIGHTS, adapter, card, t1, t2, term, uploads
from coterie.algorithms import factors
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Adapter, Card, Client, Federation, Layer, LowRank, Memory, Uploads, copied
from coterie.protocol.messages import Uploaded

KEY = root_key(2)
LAYERS = {"tall": Layer(9, 4), "wide": Layer(3, 16)}
RANKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def drawn(layers: dict[str, Layer], rank: int, scale: float, seed: int) -> Adapter:
    key = root_key(seed)
    return {
        name: LowRank(
            key.fold(name, "B").normal((layer.d_out, rank), dtype=torch.float64),
            key.fold(name, "A").normal((rank, layer.d_in), dtype=torch.float64),
            scale,
        )
        for name, layer in layers.items()
    }


def sent(ranks: list[int], scales: list[float] | None = None, layers: dict[str, Layer] | None = None) -> Uploads:
    """An upload of each rank, with weights 1 : 2 : 3 ..., in these scales, else in one."""
    held = layers or LAYERS
    return Uploads(
        [
            Uploaded(Card(str(i), rank, 1, s, held), drawn(held, rank, s, i), float(i + 1))
            for i, (rank, s) in enumerate(zip(ranks, scales or [2.0] * len(ranks), strict=True))
        ]
    )


def dense_sum(given_: Uploads, layer: str) -> Tensor:
    """sum p_i s_i B_i A_i, densely."""
    terms = [weight * float(one[layer].scale) * (one[layer].B @ one[layer].A) for _, one, weight in given_.items()]
    return torch.stack(terms).sum(dim=0)


def product(one: LowRank) -> Tensor:
    return float(one.scale) * (one.B @ one.A)


def test_the_first_adapter_adds_nothing_and_its_A_is_uniform_within_the_bound_of_a_linear_layer() -> None:
    made = factors.initial_adapter({"w": Layer(6, 400)}, 50, 2.0, KEY)["w"]
    bound = 1 / math.sqrt(400)
    assert made.B.shape == (6, 50) and not made.B.any() and made.scale == 2.0
    assert float(made.A.abs().max()) <= bound
    assert float(made.A.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_a_smaller_rank_starts_from_the_first_rows_of_a_larger_one() -> None:
    small, large = (factors.initial_adapter(LAYERS, rank, 1.0, KEY) for rank in (2, 5))
    for name in LAYERS:
        assert torch.equal(small[name].A, large[name].A[:2])
    assert not torch.equal(large["tall"].A[0, :4], large["wide"].A[0, :4])  # each layer has its own stream


def test_the_gaussian_start_has_deviation_one_over_r_and_no_more_rank_than_the_layer() -> None:
    made = factors.gaussian_adapter({"w": Layer(60, 500), "small": Layer(3, 500)}, 40, 1.0, KEY)
    assert float(made["w"].A.std()) == pytest.approx(1 / 40, rel=0.02) and not made["w"].B.any()
    assert made["small"].rank == 3
    assert float(made["small"].A.std()) == pytest.approx(1 / 40, rel=0.1)  # r as asked for, not as cut


def test_routers_start_as_linear_layers() -> None:
    made = factors.initial_routers({"w": Layer(6, 900)}, 30, KEY)["w"]
    assert made.shape == (30, 900) and float(made.abs().max()) <= 1 / 30
    assert float(made.std()) == pytest.approx(1 / 30 / math.sqrt(3), rel=0.02)


def test_the_pair_of_all_has_the_largest_rank_the_first_clients_scale_and_each_clients_layers() -> None:
    members = [Card("a", 2, 1, 4.0, {"tall": LAYERS["tall"]}), Card("b", 5, 1, 1.0, LAYERS)]
    made = factors.initial_pair(Federation(tuple(members), 1), KEY)
    assert set(made) == set(LAYERS) and factors.rank_of(made) == 5
    assert {one.scale for one in made.values()} == {4.0}
    assert {name: (one.d_out, one.d_in) for name, one in factors.layers_of(made).items()} == {
        "tall": (9, 4),
        "wide": (3, 16),
    }


def test_a_client_keeps_its_own_factors_and_draws_them_before_its_first_round() -> None:
    one = Card("a", 3, 1, 2.0, LAYERS)
    own = drawn(LAYERS, 3, 2.0, 8)

    def client(memory: dict[str, Any]) -> Client:
        return Client(one, Memory(memory, copied), ("train",), root_key(0).fold, 1, "main")

    fresh = factors.kept_factors(client({}), KEY)
    assert all(torch.equal(fresh[name].A, factors.initial_factors(one, KEY)[name].A) for name in LAYERS)
    kept = factors.kept_factors(client({"factors": own}), KEY)
    assert all(torch.equal(kept[name].B, own[name].B) for name in LAYERS)


def test_bytes_are_those_of_the_tensors() -> None:
    layer = Layer(9, 4)
    B, A = (factors.factor_shape(layer, 3, part) for part in ("B", "A"))
    assert (B, A) == ((9, 3), (3, 4))
    assert factors.factor_bytes(layer, 3, "B") == torch.zeros(B).numel() * 4 == 108
    assert factors.factor_bytes(layer, 3, "B") + factors.factor_bytes(layer, 3, "A") == factors.pair_bytes(layer, 3)


def test_one_factor_is_taken_out_and_put_in_and_the_rest_stays() -> None:
    whole = drawn(LAYERS, 2, 2.0, 1)
    assert torch.equal(factors.factor_of_pair(whole, "B")["wide"], whole["wide"].B)
    assert set(factors.factor_of_pair(whole, "A", ["tall"])) == {"tall"}
    made = factors.with_factor(whole, "A", {"tall": torch.ones(2, 4)})
    assert torch.equal(made["tall"].A, torch.ones(2, 4)) and torch.equal(made["tall"].B, whole["tall"].B)
    assert made["wide"] is whole["wide"]


def test_what_a_client_is_sent_is_cut_to_its_rank_and_written_in_its_scale() -> None:
    whole = drawn(LAYERS, 4, 6.0, 1)
    cut = factors.cut_for(whole, Card("a", 2, 1, 2.0, {"tall": LAYERS["tall"]}))
    assert set(cut) == {"tall"} and cut["tall"].rank == 2 and cut["tall"].scale == 2.0
    first = 6.0 * whole["tall"].B[:, :2] @ whole["tall"].A[:2]
    assert torch.allclose(product(cut["tall"]), first, atol=1e-12)
    assert factors.cut_for(whole, Card("a", 2, 1, 6.0, LAYERS), rank=3)["wide"].rank == 3


def test_another_scale_changes_the_product_and_not_the_factors() -> None:
    one = drawn(LAYERS, 2, 2.0, 1)["tall"]
    made = factors.with_scale({"tall": one}, 6.0)["tall"]
    assert torch.equal(made.B, one.B) and torch.allclose(product(made), 3 * product(one))


def test_layers_that_only_some_have_are_weighted_over_those_who_do_and_nobody_of_weight_zero_counts() -> None:
    tall = {"tall": LAYERS["tall"]}
    made = Uploads(
        [
            Uploaded(Card("a", 1, 1, 1.0, LAYERS), drawn(LAYERS, 1, 1.0, 1), 0.5),
            Uploaded(Card("b", 1, 1, 1.0, tall), drawn(tall, 1, 1.0, 2), 0.5),
            Uploaded(Card("c", 1, 1, 1.0, {"odd": Layer(2, 2)}), drawn({"odd": Layer(2, 2)}, 1, 1.0, 3), 0.0),
        ]
    )
    found = {name: [weight for weight, _ in terms] for name, terms in factors.by_layer(made)}
    assert found == {"tall": [0.5, 0.5], "wide": [1.0]}
    assert [one.card.id for one in factors.holders(made, "tall")] == ["a", "b"]
    assert [(one.card.id, one.weight) for one in factors.holders(made, "wide")] == [("a", 1.0)]


@settings(max_examples=30, deadline=None)
@given(RANKS, st.integers(4, 6), st.data())
def test_the_average_is_that_of_the_scaled_B_and_of_the_A_padded_with_zeros(
    ranks: list[int], rank: int, data: st.DataObject
) -> None:
    scales = data.draw(st.lists(st.sampled_from([0.5, 2.0, 4.0]), min_size=len(ranks), max_size=len(ranks)))
    given_ = sent(ranks, scales)
    made = factors.average_factors(given_, rank)
    for name, layer in LAYERS.items():
        B, A = torch.zeros(layer.d_out, rank, dtype=torch.float64), torch.zeros(rank, layer.d_in, dtype=torch.float64)
        for _, one, weight in given_.items():
            r = one[name].rank
            B[:, :r] += weight * float(one[name].scale) * one[name].B
            A[:r] += weight * one[name].A
        assert made[name].scale == scales[0]
        assert torch.allclose(scales[0] * made[name].B, B, atol=1e-12)
        assert torch.allclose(made[name].A, A, atol=1e-12)


def test_averaged_factors_multiply_to_other_than_the_averaged_product() -> None:
    """N1: of B_1 A_1 = e1 e1' and B_2 A_2 = e2 e2' the mean has no cross terms, the product of means has."""
    given_ = uploads(t1(), T1_WEIGHTS)
    made = factors.average_factors(given_, 1)["w"]
    assert torch.equal(product(made), torch.tensor([[9.0, 3.0], [3.0, 1.0]], dtype=torch.float64) / 16)
    assert torch.equal(dense_sum(given_, "w"), torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64)))


@settings(max_examples=30, deadline=None)
@given(RANKS, st.data())
def test_a_stack_is_the_weighted_sum_of_products_exactly(ranks: list[int], data: st.DataObject) -> None:
    scales = data.draw(st.lists(st.sampled_from([0.5, 2.0, 4.0]), min_size=len(ranks), max_size=len(ranks)))
    given_ = sent(ranks, scales)
    made = factors.stack_weighted(given_)
    for name in LAYERS:
        assert made[name].rank == sum(ranks) and made[name].scale == 1.0
        assert torch.allclose(product(made[name]), dense_sum(given_, name), atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(RANKS, st.integers(1, 5), st.booleans())
def test_the_best_rank_is_that_of_the_dense_sum(ranks: list[int], rank: int, scaled: bool) -> None:
    given_ = sent(ranks)
    made = factors.best_rank(given_, rank, scaled=scaled)
    for name in LAYERS:
        U, S, Vh = torch.linalg.svd(dense_sum(given_, name), full_matrices=False)
        wanted = U[:, :rank] @ torch.diag(S[:rank]) @ Vh[:rank]
        assert made[name].scale == (1.0 if scaled else 2.0)
        assert torch.allclose(product(made[name]), wanted, atol=1e-10)
        kept = made[name].A[made[name].A.abs().amax(dim=1) > 0]
        assert torch.allclose(kept @ kept.mT, torch.eye(len(kept), dtype=kept.dtype), atol=1e-10)


def test_rows_that_died_come_back_orthonormal_and_change_no_product() -> None:
    one = drawn(LAYERS, 2, 2.0, 3)
    dead = {name: factor.padded(4) for name, factor in one.items()}
    made = factors.completed(dead, KEY)
    for name, factor in made.items():
        assert factor.rank == 4 and torch.allclose(product(factor), product(one[name]), atol=1e-12)
        added = factor.A[2:]
        assert torch.allclose(added @ added.mT, torch.eye(2, dtype=added.dtype), atol=1e-6)
        assert float((added @ factor.A[:2].mT).abs().max()) < 1e-6
    whole = factors.completed(one, KEY)
    assert all(whole[name] is one[name] for name in LAYERS)


def test_of_a_layer_narrower_than_the_rank_the_rest_of_the_rows_stays_zero() -> None:
    narrow = {"w": LowRank(torch.zeros(5, 4), torch.zeros(4, 3), 1.0)}
    made = factors.completed(narrow, KEY)["w"]
    assert made.rank == 4 and torch.allclose(made.A[:3] @ made.A[:3].mT, torch.eye(3), atol=1e-6)
    assert not made.A[3].any()


def test_an_upload_that_is_no_adapter_of_the_client_is_refused_by_name() -> None:
    one, right = card("1", 1), adapter(t1()["1"])
    factors.check_adapter(right, one, 1)
    for payload, told in (
        ({}, "client 1: one term for each of 1 layers expected, not 0 entries"),
        ("nothing", "client 1: one term for each of 1 layers expected, not str"),
        ({"w": torch.ones(2)}, "client 1, layer w: low-rank factors expected, not Tensor"),
        (adapter(replace(t1()["1"], scale=3.0)), r"client 1, layer w: scale 3.0 where the client's is 1"),
        (adapter(t2()["2"]), "client 1, layer w: rank 2 where 1 is expected"),
    ):
        with pytest.raises(ModelError, match=told):
            factors.check_adapter(payload, one, 1)
    factors.check_adapter(adapter(t2()["2"]), one)  # where any rank will do


def test_one_factor_of_every_layer_is_told_from_anything_else() -> None:
    one = card("1", 2)
    assert factors.is_factor({"w": torch.zeros(2, 2)}, one, "A")
    wide = replace(one, layers={"w": Layer(2, 5)})
    assert factors.is_factor({"w": torch.zeros(2, 5)}, wide, "A")
    assert not factors.is_factor({"w": torch.zeros(2, 5)}, wide, "B")
    for payload in ({}, None, {"w": 1.0}, {"w": torch.zeros(2, 2), "v": torch.zeros(2, 2)}):
        with pytest.raises(ModelError, match=r"client 1: an upload must be one B \(m, 2\) for each adapted layer"):
            factors.check_factor(payload, one, "B")


def test_what_a_method_needs_alike_is_refused_by_the_two_clients_that_differ() -> None:
    a, b = cards({"a": 2, "b": 4})

    def told(check: Any, *members: Card) -> str:
        with pytest.raises(ConfigError) as caught:
            check(Federation(members, 1), "This")
        return str(caught.value)

    assert "a has 2 and b has 4" in told(factors.require_equal_ranks, a, b)
    assert "of a and c only one has second" in told(
        factors.require_equal_layers, a, replace(a, id="c", layers={"first": a.layers["first"]})
    )
    assert "a has 2 and b has 3" in told(factors.require_common_scale, a, replace(b, scale=3.0))
    alike = Federation((a, replace(b, rank=2)), 1)
    for check in (factors.require_equal_ranks, factors.require_equal_layers, factors.require_common_scale):
        check(alike, "This")


def test_terms_of_one_layer_are_averaged_by_their_weights() -> None:
    made = factors.mean_factors([(0.25, term([[4], [0]], [[0, 8]], 2.0)), (0.75, term([[0], [4]], [[8, 0]], 2.0))])
    assert torch.equal(made.B, torch.tensor([[1.0], [3.0]]).double()) and made.scale == 2.0
    assert torch.equal(made.A, torch.tensor([[6.0, 2.0]]).double())
