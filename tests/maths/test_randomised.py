import math

import pytest
import torch
from reference import dense_lowrank as dense
from reference.random_factors import normal, pair, with_spectrum

from coterie.maths import lowrank
from coterie.maths.keys import Key
from coterie.maths.lowrank import best_rank
from coterie.maths.randomised import range_factors

M, N, Q, R = 40, 30, 24, 4
SPECTRA = {
    "fast decay": 10.0 ** -torch.arange(Q, dtype=torch.float64),
    "slow decay": 1 / torch.arange(1, Q + 1, dtype=torch.float64),
    "flat": torch.ones(Q, dtype=torch.float64),
}
DRAWS = 40


def spectral(x: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(x, ord=2).item()


def halko_bound(p: int, spectrum: torch.Tensor) -> float:
    """Theorem 1.1: E||D - approximation||_2 is at most this."""
    return (2 + 4 * math.sqrt((R + p) * min(M, N)) / (p - 1)) * spectrum[R].item()


def halko_sharp_bound(p: int, spectrum: torch.Tensor) -> float:
    """Theorem 10.6 for the range finder, plus sigma_{R+1} for truncation to rank R (section 9.4)."""
    rest = spectrum[R:].square().sum().sqrt().item()
    return (2 + math.sqrt(R / (p - 1))) * spectrum[R].item() + math.e * math.sqrt(R + p) / p * rest


def mean_error(B: torch.Tensor, A: torch.Tensor, **options) -> float:
    errors = []
    for draw in range(DRAWS):
        best = best_rank([(B, A)], [1.0], R, method="randomised", key=Key(draw), **options)
        errors.append(spectral(best.B @ best.A - B @ A))
    return sum(errors) / DRAWS


@pytest.mark.parametrize("p", [2, 5])
@pytest.mark.parametrize("kind", SPECTRA)
def test_the_expected_spectral_error_keeps_both_bounds_of_halko(kind, p):
    B, A = with_spectrum(1, M, N, SPECTRA[kind])
    error = mean_error(B, A, oversample=p)
    assert error >= SPECTRA[kind][R].item() * (1 - 1e-9)  # nothing of rank R comes closer
    assert error <= halko_bound(p, SPECTRA[kind])
    assert error <= halko_sharp_bound(p, SPECTRA[kind])


def test_the_bounds_can_fail_a_range_drawn_without_looking_at_the_product_breaks_both():
    B, A = with_spectrum(1, M, N, SPECTRA["fast decay"])
    D = B @ A
    errors = []
    for draw in range(DRAWS):
        blind = torch.linalg.qr(normal(draw, M, R + 2)).Q
        errors.append(spectral(dense.best_rank(blind @ blind.mT @ D, R)[0] - D))
    error = sum(errors) / DRAWS
    assert error > halko_bound(2, SPECTRA["fast decay"])
    assert error > halko_sharp_bound(2, SPECTRA["fast decay"])


def test_power_steps_bring_the_error_near_the_least_one():
    B, A = with_spectrum(1, M, N, SPECTRA["slow decay"])
    least = SPECTRA["slow decay"][R].item()
    errors = [mean_error(B, A, power=power) for power in (0, 1, 4)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1.02 * least


def test_power_steps_keep_small_directions_that_plain_powers_lose():
    spectrum = torch.tensor([1.0, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    B, A = with_spectrum(1, M, N, spectrum)
    best = best_rank([(B, A)], [1.0], 4, method="randomised", power=4, oversample=0, key=Key(1))
    torch.testing.assert_close(best.singular_values, spectrum, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("m", "n", "ranks"), [(40, 30, (4, 4, 4)), (20, 15, (8, 8, 8)), (15, 20, (2, 3)), (30, 40, (1, 1, 1))]
)
@pytest.mark.parametrize("rank", [1, 3, 30])
def test_with_full_oversampling_the_randomised_form_equals_the_exact_one(m, n, ranks, rank):
    factors = [pair(i, m, r, n) for i, r in enumerate(ranks)]
    weights = [1 / len(ranks)] * len(ranks)
    exact = best_rank(factors, weights, rank, method="exact")
    sampled = best_rank(factors, weights, rank, method="randomised", oversample=sum(ranks), key=Key(1))
    torch.testing.assert_close(sampled.B, exact.B, rtol=0, atol=1e-10)
    torch.testing.assert_close(sampled.A, exact.A, rtol=0, atol=1e-10)
    torch.testing.assert_close(sampled.singular_values, exact.singular_values, rtol=0, atol=1e-10)
    scale = exact.singular_values.norm().item()
    torch.testing.assert_close(sampled.tail, exact.tail, rtol=1e-9, atol=1e-7 * scale)


@pytest.mark.parametrize("power", [0, 2])
@pytest.mark.parametrize("kind", SPECTRA)
def test_the_reported_tail_is_the_true_error(kind, power):
    B, A = with_spectrum(1, M, N, SPECTRA[kind])
    for draw in range(5):
        best = best_rank([(B, A)], [1.0], R, method="randomised", power=power, key=Key(draw))
        true = torch.linalg.matrix_norm(best.B @ best.A - B @ A).item()
        least = SPECTRA[kind][R:].norm().item()
        assert best.tail.item() == pytest.approx(true, rel=1e-6)
        assert least * (1 - 1e-6) <= true


def test_where_nothing_is_left_out_the_tail_is_rounding():
    B, A = pair(1, M, R, N)
    tails = [best_rank([(B, A)], [1.0], R, method="randomised", key=Key(draw)).tail.item() for draw in range(10)]
    assert min(tails) >= 0
    assert max(tails) < 1e-7 * torch.linalg.matrix_norm(B @ A).item()


def test_rows_of_A_are_orthonormal_and_zero_updates_give_zeros():
    best = best_rank([pair(1, M, Q, N)], [1.0], R, method="randomised", key=Key(1))
    torch.testing.assert_close(best.A @ best.A.mT, torch.eye(R, dtype=torch.float64), rtol=0, atol=1e-12)
    B, A = pair(1, M, Q, N)
    zero = best_rank([(torch.zeros_like(B), A)], [1.0], R, method="randomised", key=Key(1))
    assert not zero.B.any()
    assert not zero.A.any()
    assert zero.tail.item() == 0


def test_a_key_decides_the_draw():
    factors = [pair(1, M, Q, N)]
    first, again, other = (best_rank(factors, [1.0], R, method="randomised", key=Key(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.B, again.B)
    assert not torch.equal(first.B, other.B)


def test_range_factors_project_on_an_orthonormal_range():
    B, A = pair(1, M, Q, N)
    for power in (0, 2):
        Q_, C = range_factors(B, A, 6, Key(1), power=power)
        assert (Q_.shape, C.shape) == ((M, 6), (6, N))
        torch.testing.assert_close(Q_.mT @ Q_, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12)
        torch.testing.assert_close(C, Q_.mT @ (B @ A), rtol=0, atol=1e-10)
    assert range_factors(B, A, 1000, Key(1))[0].shape == (M, Q)
    with pytest.raises(ValueError, match="power -1"):
        range_factors(B, A, 1, Key(1), power=-1)


@pytest.mark.parametrize(
    ("m", "n", "r_tot", "rank", "sampled"),
    [
        (200, 180, 130, 8, True),
        (600, 400, 130, 8, False),  # below a third of the smaller size
        (90, 90, 120, 8, False),  # so small that exact costs nothing
        (200, 180, 130, 128, False),  # nothing saved: rank + oversample reaches r_tot
    ],
)
def test_auto_samples_only_where_that_saves_work_and_a_key_is_given(m, n, r_tot, rank, sampled, monkeypatch):
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return range_factors(*arguments, **options)

    monkeypatch.setattr(lowrank, "range_factors", counted)
    factors = [pair(1, m, r_tot, n, dtype=torch.float32)]
    best_rank(factors, [1.0], rank, key=Key(1))
    assert len(calls) == int(sampled)
    best_rank(factors, [1.0], rank)
    assert len(calls) == int(sampled)
