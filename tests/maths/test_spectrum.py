"""The spectrum of a product against that of the dense matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from reference.random_factors import bounded, mixtures, pair

from coterie.maths.spectrum import product_spectrum
from coterie.maths.stacking import stack_factors


@bounded
@given(mixtures())
def test_it_is_that_of_the_dense_product_whatever_rank_and_dependence(
    mixture: tuple[list[tuple[torch.Tensor, torch.Tensor]], list[float]],
) -> None:
    B, A = stack_factors(*mixture)
    found, whole = product_spectrum(B, A), torch.linalg.svdvals(B @ A)
    assert len(found) == min(B.shape)
    expected = torch.nn.functional.pad(whole, (0, max(0, len(found) - len(whole))))[: len(found)]
    size = float(B.norm() * A.norm())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-6 * size + 1e-12)
    assert not whole[len(found) :].gt(1e-9 * size + 1e-12).any()  # what is not told is zero


def test_it_descends_and_its_squares_are_the_energy() -> None:
    B, A = pair(1, 20, 6, 15)
    found = product_spectrum(B, A)
    assert found.tolist() == sorted(found.tolist(), reverse=True)
    assert float(found.square().sum()) == pytest.approx(float((B @ A).square().sum()))


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"B \(3, 2\) and A \(3, 4\)"):
        product_spectrum(torch.zeros(3, 2), torch.zeros(3, 4))
