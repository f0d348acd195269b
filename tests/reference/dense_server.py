"""Dense twins of what servers compute from factors: every m x n matrix is formed, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from reference.dense_lowrank import mixture
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]


def cosine(X: Tensor, Y: Tensor) -> Tensor:
    """Of the flattened matrices."""
    return (X * Y).sum() / (X.norm() * Y.norm())


def cosine_objective(X: Tensor, B: Tensor, A: Tensor, D: Tensor, penalty: float) -> Tensor:
    """1 - cos(D, X A) + penalty ||X - B||^2."""
    return 1 - cosine(D, X @ A) + penalty * (X - B).square().sum()


def cosine_correction(
    B: Tensor, A: Tensor, factors: Pairs, weights: Sequence[float], penalty: float, steps: int
) -> Tensor:
    """Gradient descent by autograd with steps that halve until the objective falls."""
    D, X, step = mixture(factors, weights), B.clone().requires_grad_(), float(B.square().sum())
    for _ in range(steps):
        value = cosine_objective(X, B, A, D, penalty)
        (gradient,) = torch.autograd.grad(value, X)
        step *= 2
        while step > 1e-30:
            tried = X.detach() - step * gradient
            if cosine_objective(tried, B, A, D, penalty) < value:
                break
            step /= 2
        else:
            break
        X = tried.requires_grad_()
    return X.detach()


def ridge_correction(B: Tensor, A: Tensor, factors: Pairs, weights: Sequence[float], penalty: float) -> Tensor:
    """Least squares for dB row by row, the penalty as further equations."""
    D = mixture(factors, weights)
    equations = torch.cat([A.mT, penalty**0.5 * torch.eye(A.shape[0], dtype=A.dtype)])
    wanted = torch.cat([(D - B @ A).mT, torch.zeros(A.shape[0], B.shape[0], dtype=A.dtype)])
    return B + torch.linalg.lstsq(equations, wanted, driver="gelsd").solution.mT


def alternating_errors(factors: Pairs, weights: Sequence[float], start: Sequence[float], sweeps: int) -> list[float]:
    """||Bhat Ahat - D|| before the first sweep and after each, from least squares on flattened m x n matrices."""
    D = mixture(factors, weights).flatten()
    Bs, As = torch.stack([B for B, _ in factors]), torch.stack([A for _, A in factors])
    P = Q = torch.tensor(start, dtype=torch.float64)

    def solved(matrices: list[Tensor]) -> Tensor:
        columns = torch.stack([matrix.flatten() for matrix in matrices], dim=1)
        solution: Tensor = torch.linalg.lstsq(columns, D[:, None], rcond=1e-10, driver="gelsd").solution
        return solution[:, 0]

    def error() -> float:
        return float(((torch.einsum("u,umr->mr", Q, Bs) @ torch.einsum("u,urn->rn", P, As)).flatten() - D).norm())

    errors = [error()]
    for _ in range(sweeps):
        Q = solved([B @ torch.einsum("u,urn->rn", P, As) for B in Bs])
        P = solved([torch.einsum("u,umr->mr", Q, Bs) @ A for A in As])
        errors.append(error())
    return errors
