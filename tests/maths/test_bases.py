"""Frozen bases: orthonormal, the same for everybody, nested."""

from __future__ import annotations

import pytest
import torch

from coterie.maths.bases import gaussian_columns, orthonormal_columns
from coterie.maths.keys import root_key

KEY = root_key(5)


def test_columns_are_orthonormal_and_span_what_was_drawn_in_its_order() -> None:
    Q = orthonormal_columns(KEY, 20, 12).double()
    assert torch.allclose(Q.T @ Q, torch.eye(12, dtype=torch.float64), atol=1e-6)
    drawn = KEY.normal((12, 20)).double().T
    R = Q.T @ drawn  # Gram-Schmidt: upper triangular with a positive diagonal
    assert torch.allclose(R.tril(-1), torch.zeros_like(R), atol=1e-5) and bool((R.diagonal() > 0).all())


def test_fewer_columns_are_the_first_ones_and_keys_differ() -> None:
    assert torch.allclose(orthonormal_columns(KEY, 20, 5), orthonormal_columns(KEY, 20, 12)[:, :5], atol=1e-6)
    assert torch.equal(gaussian_columns(KEY, 20, 5), gaussian_columns(KEY, 20, 12)[:, :5])
    assert not torch.allclose(orthonormal_columns(KEY.fold("other"), 20, 5), orthonormal_columns(KEY, 20, 5), atol=0.1)


def test_gaussian_columns_have_norm_one_in_the_mean() -> None:
    norms = gaussian_columns(KEY, 400, 200).square().sum(dim=0)
    assert abs(float(norms.mean()) - 1) < 0.03


def test_no_more_orthogonal_columns_than_there_is_room_for() -> None:
    with pytest.raises(ValueError, match="no 5 orthogonal columns of length 4"):
        orthonormal_columns(KEY, 4, 5)
