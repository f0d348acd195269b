"""Lemma 2 of SeFoRA, measured, and what it says of sketch sizes."""

from __future__ import annotations

import math

import pytest
import torch
from reference import dense_sketch as dense
from reference.random_factors import with_spectrum

from coterie.maths.keys import Key
from coterie.theory.sefora import lemma_2, sketch_sizes

FAST = 2.0 ** -torch.arange(20, dtype=torch.float64)
FLAT = torch.ones(20, dtype=torch.float64)


@pytest.mark.parametrize("spectrum", [FAST, FLAT], ids=["fast", "flat"])
@pytest.mark.parametrize(("r", "k"), [(4, 9), (8, 24)])
def test_what_is_measured_lies_between_the_best_approximation_and_the_bound(
    spectrum: torch.Tensor, r: int, k: int
) -> None:
    bound, measured = lemma_2(*with_spectrum(1, 50, 40, spectrum), r, k, Key(3), draws=40)
    assert float(spectrum[r:].square().sum()) <= measured <= bound
    assert bound == pytest.approx(dense.error_bound(spectrum.tolist(), r, k), rel=1e-9)


def test_sizes_keep_the_budget_and_leave_no_room_for_a_row_more() -> None:
    sizes = sketch_sizes(FAST, 4 * 2000, 50, 40)
    assert sizes == sorted(sizes, key=lambda one: one.bound)
    for one in sizes:
        assert one.bytes_up == (50 * one.r + one.k * 40) * 4 <= 8000 < one.bytes_up + 40 * 4
        assert one.bound == pytest.approx(
            math.sqrt(dense.error_bound(FAST.tolist(), one.r, one.k) / float((FAST**2).sum()))
        )
        assert one.least <= one.floor <= one.bound


def test_the_rows_needed_meet_the_tolerance_and_one_less_does_not() -> None:
    energy = float((FAST**2).sum())
    told = [one for one in sketch_sizes(FAST, 4 * 2000, 50, 40, tolerance=0.2) if one.k_needed is not None]
    assert told
    for one in told:
        assert math.sqrt(dense.error_bound(FAST.tolist(), one.r, one.k_needed) / energy) <= 0.2 * (1 + 1e-12)
        if one.k_needed > one.r + 2:
            assert math.sqrt(dense.error_bound(FAST.tolist(), one.r, one.k_needed - 1) / energy) > 0.2


def test_of_a_flat_spectrum_no_k_is_enough_and_of_an_exhausted_one_the_smallest_is() -> None:
    assert all(one.k_needed is None for one in sketch_sizes(FLAT, 4 * 2000, 50, 40))
    two = torch.tensor([1.0, 0.5, 0.0])
    for one in sketch_sizes(two, 4 * 2000, 50, 40):
        assert (one.k_needed == one.r + 2) == (one.r >= 4)  # rho = 2 needs r >= 4
        assert one.bound == 0 if one.r >= 4 else one.bound > 0


def test_dissimilar_clients_are_better_served_by_fewer_columns_and_more_rows() -> None:
    """At the bytes of r = 16, k = 18: half of the columns with the rest in rows halve the bound and more."""
    spectrum = torch.ones(60, dtype=torch.float64)
    sizes = {one.r: one for one in sketch_sizes(spectrum, 34 * 256 * 4, 256, 256)}
    assert (sizes[16].k, sizes[8].k) == (18, 26)
    assert sizes[8].bound < 0.5 * sizes[16].bound


def test_budgets_and_spectra_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="1040"):
        sketch_sizes(FAST, 1000, 50, 40)
    with pytest.raises(ValueError, match="energy"):
        sketch_sizes(torch.zeros(3), 8000, 50, 40)
