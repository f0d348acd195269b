"""Ranks from spectra: within budgets, nested, and as good as any where terms cost the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_fedslm_theory as dense
from reference.random_factors import bounded

from coterie.theory.fedslm.allocation import BYTES, Spectrum, allocate, at_ratio, truncation_loss


def spectrum(values: list[float], d_out: int = 3, d_in: int = 3) -> Spectrum:
    return Spectrum(torch.tensor(sorted(values, reverse=True), dtype=torch.float64), d_out, d_in)


@st.composite
def federations(draw: st.DrawFn, equal: bool) -> tuple[dict[str, Spectrum], dict[str, int]]:
    """Two or three small layers, with ties, and two or three budgets, equal ones too; costs are equal or not."""
    count = draw(st.integers(2, 3))
    value = st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 3.5, 4.0])
    layers = {}
    for index in range(count):
        values = draw(st.lists(value, min_size=1, max_size=3))
        layers[f"layer {index}"] = spectrum(values, 3, 3 if equal else draw(st.integers(1, 7)))
    first = sum(layer.bytes_per_rank for layer in layers.values())
    extra = draw(st.lists(st.integers(0, 45), min_size=2, max_size=3))
    return layers, {f"client {i}": first + BYTES * more for i, more in enumerate(extra)}


def least_loss(layers: dict[str, Spectrum], budgets: list[int]) -> float:
    spectra = [layer.values.tolist() for layer in layers.values()]
    return dense.least_loss(spectra, [layer.bytes_per_rank for layer in layers.values()], sorted(budgets))


@bounded
@given(federations(equal=True))
def test_where_terms_cost_the_same_no_nested_ranks_of_all_clients_lose_less(
    world: tuple[dict[str, Spectrum], dict[str, int]],
) -> None:
    layers, budgets = world
    found = allocate(layers, budgets)
    together = sum(each.loss for each in found.values())
    assert together == pytest.approx(least_loss(layers, list(budgets.values())), abs=1e-9)
    for client, budget in budgets.items():
        assert found[client].loss == pytest.approx(least_loss(layers, [budget]), abs=1e-9)


@bounded
@given(federations(equal=False))
def test_whatever_terms_cost_the_best_ranks_lie_between_what_is_found_and_what_is_named_as_the_least(
    world: tuple[dict[str, Spectrum], dict[str, int]],
) -> None:
    layers, budgets = world
    found = allocate(layers, budgets)
    for client, each in found.items():
        best = least_loss(layers, [budgets[client]])
        assert each.least <= best + 1e-9
        assert best <= each.loss + 1e-9
        gains = [float(layer.values[1:].square().max()) for layer in layers.values() if len(layer.values) > 1]
        assert each.loss - each.least <= max(gains, default=0.0) + 1e-9
    assert least_loss(layers, list(budgets.values())) <= sum(each.loss for each in found.values()) + 1e-9


@bounded
@given(federations(equal=False))
def test_ranks_keep_their_budgets_are_nested_and_leave_no_room_for_a_term(
    world: tuple[dict[str, Spectrum], dict[str, int]],
) -> None:
    layers, budgets = world
    found = allocate(layers, budgets)
    assert list(found) == list(budgets)
    order = sorted(budgets, key=lambda client: budgets[client])
    for client, each in found.items():
        assert each.bytes == sum(each.ranks[name] * layer.bytes_per_rank for name, layer in layers.items())
        assert each.bytes <= budgets[client]
        assert each.loss == pytest.approx(truncation_loss(layers, each.ranks))
    for small, large in pairwise(order):
        assert all(found[small].ranks[name] <= found[large].ranks[name] for name in layers)
    last = found[order[-1]]
    for name, layer in layers.items():
        if last.ranks[name] < int((layer.values > 0).sum()):
            assert last.bytes + layer.bytes_per_rank > budgets[order[-1]]


@bounded
@given(federations(equal=False), st.integers(0, 6))
def test_a_budget_that_ends_at_a_term_of_the_list_has_no_better_ranks_whatever_terms_cost(
    world: tuple[dict[str, Spectrum], dict[str, int]], length: int
) -> None:
    layers, _ = world
    terms = sorted(
        ((float(v**2) / one.bytes_per_rank, one.bytes_per_rank) for one in layers.values() for v in one.values[1:]),
        key=lambda term: -term[0],
    )
    budget = sum(layer.bytes_per_rank for layer in layers.values()) + sum(cost for _, cost in terms[:length])
    found = allocate(layers, {"a": budget, "larger": budget + 40})
    assert found["a"].loss == pytest.approx(found["a"].least, abs=1e-9)
    assert found["a"].loss == pytest.approx(least_loss(layers, [budget]), abs=1e-9)


def test_with_unequal_costs_terms_by_gain_per_byte_can_miss_the_best_ranks() -> None:
    """A knapsack: 3 for 2 is the better rate, 4 for 3 what a budget of 3 should buy."""
    layers = {"narrow": spectrum([9, 3**0.5], 1, 1), "wide": spectrum([9, 2], 1, 2)}
    first = 5 * BYTES
    found = allocate(layers, {"a": first + 3 * BYTES})["a"]
    assert found.ranks == {"narrow": 2, "wide": 1}
    assert found.loss == pytest.approx(4)
    assert least_loss(layers, [first + 3 * BYTES]) == pytest.approx(3)
    assert found.least == pytest.approx(4 - 4 / 3)


def test_a_smaller_client_gets_no_term_that_a_larger_one_lacks() -> None:
    """The larger client's one term of the wide layer leaves it no room for what would fit into the smaller's budget."""
    layers = {"narrow": spectrum([9, 1, 1, 1], 1, 1), "wide": spectrum([9, 3], 1, 3)}
    first = 6 * BYTES
    found = allocate(layers, {"small": first + 4 * BYTES, "smaller": first + 3 * BYTES})
    assert found["small"].ranks == {"narrow": 1, "wide": 2}
    assert found["smaller"].ranks == {"narrow": 1, "wide": 1}


def test_a_term_too_large_does_not_stop_those_behind_it() -> None:
    layers = {"narrow": spectrum([9, 1, 1], 1, 1), "wide": spectrum([9, 8], 1, 3)}
    assert allocate(layers, {"a": 9 * BYTES})["a"].ranks == {"narrow": 2, "wide": 1}


def test_directions_without_energy_are_not_bought() -> None:
    layers = {"a": spectrum([2, 1, 0, 0])}
    found = allocate(layers, {"rich": 10_000})["rich"]
    assert (found.ranks, found.loss, found.least) == ({"a": 2}, 0, 0)


def test_fixture_rank_204_of_a_layer_of_1024_at_ratio_0_4_and_166464_bytes_of_its_core() -> None:
    """L1."""
    layer = Spectrum(torch.ones(1024), 1024, 1024)
    assert layer.rank_at(0.4) == 204
    assert layer.rank_at(0.4) ** 2 * BYTES == 166_464
    assert layer.rank_at(1e-6) == 1
    assert Spectrum(torch.ones(200), 200, 200).rank_at(0.29) == 29  # 0.29 * 100 is below 29 in floating point


def test_ranks_from_spectra_lose_less_than_one_ratio_for_all_layers_at_its_bytes() -> None:
    """Layers of one shape, one of a flat spectrum and one of a fast one; equal spectra leave nothing to gain."""
    flat, fast = torch.ones(16), 2.0 ** -torch.arange(16)
    layers = {"flat": Spectrum(flat, 16, 16), "fast": Spectrum(fast, 16, 16)}
    uniform = at_ratio(layers, 0.5)
    assert uniform.ranks == {"flat": 4, "fast": 4}
    found = allocate(layers, {"a": uniform.bytes})["a"]
    assert found.bytes == uniform.bytes
    assert found.ranks == {"flat": 7, "fast": 1}
    assert found.loss == pytest.approx(uniform.least)
    assert found.loss < 0.8 * uniform.loss
    same = {"one": Spectrum(fast, 16, 16), "other": Spectrum(fast, 16, 16)}
    uniform = at_ratio(same, 0.5)
    assert allocate(same, {"a": uniform.bytes})["a"].ranks == uniform.ranks


def test_budgets_and_spectra_that_make_no_model_are_refused() -> None:
    layers = {"a": spectrum([2, 1])}
    with pytest.raises(ValueError, match="client poor: 20 bytes are below rank 1 in every layer, 24 bytes"):
        allocate(layers, {"poor": 20})
    for wrong in ([1.0, 2.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0], []):
        with pytest.raises(ValueError, match="layer a: singular values"):
            allocate({"a": Spectrum(torch.tensor(wrong), 3, 3)}, {"b": 100})
