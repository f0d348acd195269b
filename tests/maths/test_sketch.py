"""Sketches: linear, exact up to their rank, and within Lemma 2 beyond it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_sketch as dense
from reference.dense_lowrank import best_rank
from reference.random_factors import bounded, normal, pair, with_spectrum

from coterie.maths import sketch as sketching
from coterie.maths.keys import Key
from coterie.maths.sketch import (
    PRIOR,
    error_bound,
    sketch,
    sketch_matrices,
    tail_energies,
    unsketch,
    unsketch_shrunk,
)

SPECTRA = {
    "fast": 2.0 ** -torch.arange(24, dtype=torch.float64),
    "slow": 1 / torch.arange(1, 25, dtype=torch.float64),
    "flat": torch.ones(24, dtype=torch.float64),
}


def gaussian(seed: int, m: int, n: int, s: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return sketch_matrices(Key(seed), m, n, s, k)


@bounded
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5), st.integers(1, 6), st.integers(1, 8), st.integers(0))
def test_a_sketch_is_that_of_the_dense_product(m: int, n: int, r: int, s: int, k: int, seed: int) -> None:
    B, A = pair(seed % 1000, m, r, n)
    Omega, Psi = gaussian(seed % 1000, m, n, s, k)
    for made, wanted in zip(sketch(B, A, Omega, Psi), dense.sketch(B @ A, Omega, Psi), strict=True):
        torch.testing.assert_close(made, wanted, rtol=0, atol=1e-11)


@bounded
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 999))
def test_the_mean_of_sketches_is_the_sketch_of_the_mean_whatever_the_ranks(ranks: list[int], seed: int) -> None:
    Omega, Psi = gaussian(seed, 9, 7, 3, 5)
    weights = [(i + 1) / sum(range(1, len(ranks) + 1)) for i in range(len(ranks))]
    factors = [pair(seed + i, 9, r, 7) for i, r in enumerate(ranks)]
    sketches = [sketch(B, A, Omega, Psi) for B, A in factors]
    W = sum(w * B @ A for w, (B, A) in zip(weights, factors, strict=True))
    for part, wanted in enumerate(dense.sketch(W, Omega, Psi)):
        mean = sum(w * one[part] for w, one in zip(weights, sketches, strict=True))
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-11)


@bounded
@given(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 999))
def test_a_product_of_rank_up_to_the_columns_comes_back_exactly(r: int, more: int, extra: int, seed: int) -> None:
    s = max(1, r + more)
    B, A = pair(seed, 20, r, 15)
    Omega, Psi = gaussian(seed, 20, 15, s, s + 2 + extra)
    Y, Z = sketch(B, A, Omega, Psi)
    scale = max(1.0, float((B @ A).norm()))
    Q, found = unsketch(Y, Z, Psi)
    assert float((Q @ found - B @ A).norm()) <= 1e-10 * scale
    left, right = unsketch_shrunk(Y, Z, Omega, Psi, max(1, r))
    assert float((left @ right - B @ A).norm()) <= 1e-10 * scale


@bounded
@given(st.integers(1, 6), st.integers(2, 5), st.integers(0, 999))
def test_both_reconstructions_are_their_dense_twins_and_no_better_than_the_best(s: int, more: int, seed: int) -> None:
    B, A = pair(seed, 20, 10, 15)
    Omega, Psi = gaussian(seed, 20, 15, s, s + more)
    Y, Z = sketch(B, A, Omega, Psi)
    scale = float((B @ A).norm())
    Q, found = unsketch(Y, Z, Psi)
    assert float((Q @ found - dense.unsketch(Y, Z, Psi)).norm()) <= 1e-7 * scale
    rank = max(1, s - 1)
    left, right = unsketch_shrunk(Y, Z, Omega, Psi, rank)
    assert float((left @ right - dense.unsketch_shrunk(Y, Z, Omega, Psi, rank, PRIOR)).norm()) <= 1e-7 * scale
    for made, r in ((Q @ found, s), (left @ right, rank)):
        assert float((made - B @ A).norm()) >= float(best_rank(B @ A, r)[2]) * (1 - 1e-12)
    for basis in (Q, left):
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(basis.shape[-1], dtype=torch.float64), rtol=0, atol=1e-10
        )


def test_the_hand_example_n12() -> None:
    Omega = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    Psi = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    B, A = torch.tensor([[2.0], [0.0]], dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    Q, found = unsketch(*sketch(B, A, Omega, Psi), Psi)
    torch.testing.assert_close(Q.abs(), torch.tensor([[1.0], [0.0]], dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(Q @ found, torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("r", [3, 4])
def test_three_clients_of_rank_one_come_back_from_three_and_from_four_columns(r: int) -> None:
    factors = [pair(i, 20, 1, 15) for i in range(3)]
    Omega, Psi = gaussian(1, 20, 15, r, r + 2)
    sketches = [sketch(B, A, Omega, Psi) for B, A in factors]
    Y, Z = (sum(one[part] for one in sketches) / 3 for part in (0, 1))
    Q, found = unsketch(Y, Z, Psi)
    assert float((Q @ found - sum(B @ A for B, A in factors) / 3).norm()) < 1e-10


def test_a_zero_update_comes_back_as_zero_with_an_orthonormal_basis() -> None:
    Omega, Psi = gaussian(1, 8, 6, 3, 5)
    Y, Z = torch.zeros(8, 3, dtype=torch.float64), torch.zeros(5, 6, dtype=torch.float64)
    for Q, A in (unsketch(Y, Z, Psi), unsketch_shrunk(Y, Z, Omega, Psi, 2)):
        assert not A.any() and torch.isfinite(Q).all()
        torch.testing.assert_close(Q.mT @ Q, torch.eye(Q.shape[-1], dtype=torch.float64), rtol=0, atol=1e-12)


def test_where_psi_cannot_tell_columns_apart_a_ridge_keeps_the_solution_finite_and_least() -> None:
    B, A = pair(3, 8, 2, 6)
    Psi = torch.zeros(4, 8, dtype=torch.float64)
    Psi[0, 0] = 1.0
    Omega = normal(5, 6, 2)
    Y, Z = sketch(B, A, Omega, Psi)
    Q, found = unsketch(Y, Z, Psi)
    assert float((Q @ found - dense.unsketch(Y, Z, Psi)).norm()) < 1e-6 * float(found.norm())
    assert float((Psi @ Q @ found - Z).norm()) < 1e-6 * float(Z.norm())


def test_a_stack_of_layers_is_every_layer_by_itself() -> None:
    B, A = pair(2, 9, 5, 7, 3)
    Omega, Psi = gaussian(4, 9, 7, 3, 5)
    Y, Z = sketch(B, A, Omega, Psi)
    stacked = (*unsketch(Y, Z, Psi), *unsketch_shrunk(Y, Z, Omega, Psi, 2))
    for i in range(3):
        alone = (*unsketch(Y[i], Z[i], Psi), *unsketch_shrunk(Y[i], Z[i], Omega, Psi, 2))
        for whole, one in zip(stacked, alone, strict=True):
            torch.testing.assert_close(whole[i], one, rtol=0, atol=1e-10)


def test_smaller_sketch_matrices_are_slices_of_larger_ones_and_shapes_have_streams_of_their_own() -> None:
    small, large = sketch_matrices(Key(1), 9, 7, 2, 4), sketch_matrices(Key(1), 9, 7, 5, 8)
    assert torch.equal(small.Omega, large.Omega[:, :2]) and torch.equal(small.Psi, large.Psi[:4])
    other = sketch_matrices(Key(1), 7, 9, 5, 8)
    assert not torch.equal(other.Omega[:7], large.Omega) and not torch.equal(other.Psi[:, :7], large.Psi[:, :7])
    draws = sketch_matrices(Key(2), 300, 200, 40, 60)
    for matrix in draws:
        assert abs(float(matrix.mean())) < 0.03 and abs(float(matrix.std()) - 1) < 0.03


def mean_square_errors(spectrum: torch.Tensor, s: int, k: int, rank: int, draws: int = 60) -> tuple[float, float]:
    """Of `unsketch` and of `unsketch_shrunk`, over test matrices."""
    B, A = with_spectrum(1, 60, 50, spectrum)
    W, plain, shrunk = B @ A, 0.0, 0.0
    for seed in range(draws):
        Omega, Psi = gaussian(seed, 60, 50, s, k)
        Y, Z = sketch(B, A, Omega, Psi)
        Q, found = unsketch(Y, Z, Psi)
        plain += float((Q @ found - W).square().sum()) / draws
        left, right = unsketch_shrunk(Y, Z, Omega, Psi, rank)
        shrunk += float((left @ right - W).square().sum()) / draws
    return plain, shrunk


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize(("s", "k"), [(4, 8), (6, 13), (8, 24)])
def test_the_mean_squared_error_keeps_lemma_2(kind: str, s: int, k: int) -> None:
    plain, _ = mean_square_errors(SPECTRA[kind], s, k, s)
    assert tail_energies(SPECTRA[kind])[s] <= plain <= error_bound(SPECTRA[kind], s, k)


def test_lemma_2_can_fail_a_basis_drawn_without_looking_breaks_it() -> None:
    B, A = with_spectrum(1, 60, 50, SPECTRA["fast"])
    blind = torch.linalg.qr(normal(3, 60, 4)).Q
    Omega, Psi = gaussian(0, 60, 50, 4, 8)
    _, Z = sketch(B, A, Omega, Psi)
    found = torch.linalg.lstsq(Psi.double() @ blind, Z).solution
    assert float((blind @ found - B @ A).square().sum()) > float(error_bound(SPECTRA["fast"], 4, 8))


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("k", [10, 16])
def test_the_shrunk_reconstruction_errs_less_from_the_very_same_sketch(kind: str, k: int) -> None:
    plain, shrunk = mean_square_errors(SPECTRA[kind], 8, k, 8)
    assert shrunk < plain
    if kind == "flat":  # never worse than deploying nothing, where the plain one is
        assert shrunk < float(SPECTRA[kind].square().sum()) < mean_square_errors(SPECTRA[kind], 8, 10, 8)[0]


@bounded
@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(2, 10), st.integers(2, 20))
def test_the_bound_is_lemma_2_term_by_term_and_its_factor_falls_with_k(values: list[float], r: int, more: int) -> None:
    spectrum = sorted(values, reverse=True)
    got = float(error_bound(torch.tensor(spectrum, dtype=torch.float64), r, r + more))
    assert got == pytest.approx(dense.error_bound(spectrum, r, r + more), abs=1e-12)
    assert float(error_bound(torch.tensor(spectrum, dtype=torch.float64), r, math.inf)) <= got


def test_the_k_dependent_factors_that_the_specification_names() -> None:
    flat = torch.ones(20, dtype=torch.float64)
    floor = float(error_bound(flat, 16, math.inf))
    assert float(error_bound(flat, 16, 18)) / floor == pytest.approx(17)
    assert float(error_bound(flat, 16, 32)) / floor == pytest.approx(2.0666667)


def test_tail_energies_are_what_the_best_approximation_leaves() -> None:
    tails = tail_energies(torch.tensor([3.0, 1.0, 0.1]))
    torch.testing.assert_close(tails, torch.tensor([10.01, 1.01, 0.01, 0.0], dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("r", "k"), [(1, 4), (4, 5), (4, 4)])
def test_there_is_no_bound_below_two_columns_or_without_two_rows_more(r: int, k: int) -> None:
    with pytest.raises(ValueError, match="k > r"):
        error_bound(torch.ones(3), r, k)


def test_shapes_that_do_not_fit_are_told() -> None:
    B, A = pair(1, 8, 2, 6)
    Omega, Psi = gaussian(1, 8, 6, 3, 5)
    Y, Z = sketch(B, A, Omega, Psi)
    with pytest.raises(ValueError, match="do not fit a product of 8 x 6"):
        sketch(B, A, Omega[:-1], Psi)
    with pytest.raises(ValueError, match="3 columns"):
        unsketch(Y, Z[:2], Psi[:2])
    with pytest.raises(ValueError, match="rank 4 outside"):
        unsketch_shrunk(Y, Z, Omega, Psi, 4)


@pytest.mark.parametrize(("n", "s", "dependent"), [(200, 6, False), (40, 40, False), (30, 5, True)])
def test_columns_are_made_orthonormal_to_the_last_digits_however_dependent_they_are(
    n: int, s: int, dependent: bool
) -> None:
    X = Key(3).normal((2, n, s), dtype=torch.float64)
    if dependent:
        X[1, :, 1] = X[1, :, 0] + 1e-9 * X[1, :, 1]
    P, T = sketching._orthonormal(X)
    torch.testing.assert_close(P.mT @ P, torch.eye(s, dtype=torch.float64).expand(2, s, s), rtol=0, atol=1e-13)
    torch.testing.assert_close(P @ T, X, rtol=0, atol=1e-12)
    assert not T.tril(-1).any()
