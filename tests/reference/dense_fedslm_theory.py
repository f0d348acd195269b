"""FedSLM's theory the slow way: projectors of m and n rows, operators of m n rows, and every allocation there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def projectors(W: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """P (m, m) and Q (n, n) on the leading singular vectors of W."""
    U, _, Vh = torch.linalg.svd(W)
    return U[:, :rank] @ U[:, :rank].T, Vh[:rank].T @ Vh[:rank]


def commutator(A: Tensor, C: Tensor, P: Tensor, Q: Tensor) -> float:
    """||H Pi - Pi H||_op on vec(M), row by row: H = A x C and Pi = P x Q."""
    H, Pi = torch.kron(A, C), torch.kron(P, Q)
    return float(torch.linalg.matrix_norm(H @ Pi - Pi @ H, 2))


def core_map(U: Tensor, V: Tensor) -> Tensor:
    """The matrix (m n, r^2) of X -> U X V on vectors, row by row."""
    return torch.einsum("mr,sn->mnrs", U, V).reshape(U.shape[0] * V.shape[1], -1)


def best_core(A: Tensor, C: Tensor, Wloc: Tensor, U: Tensor, V: Tensor, near: Tensor) -> Tensor:
    """The minimiser of 1/2 <U X V - Wloc, A (U X V - Wloc) C> nearest to `near`, by least squares on vec(X)."""
    to_weights, H = core_map(U, V), torch.kron(A, C)
    hessian = to_weights.T @ H @ to_weights
    gradient = to_weights.T @ H @ (to_weights @ near.flatten() - Wloc.flatten())
    return near - (torch.linalg.pinv(hessian, rtol=1e-11, hermitian=True) @ gradient).reshape(near.shape)


def rank_vectors(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ranks of all layers, each from 1 to its size."""
    return itertools.product(*(range(1, size + 1) for size in sizes))


def least_loss(spectra: Sequence[Sequence[float]], costs: Sequence[int], budgets: Sequence[int]) -> float:
    """The least sum over clients of truncation losses over all ranks within budgets that are nested; exhaustive.

    Budgets ascend, and so must ranks, in every layer.
    """

    def loss(ranks: Sequence[int]) -> float:
        return sum(value**2 for rank, spectrum in zip(ranks, spectra, strict=True) for value in spectrum[rank:])

    def size(ranks: Sequence[int]) -> int:
        return sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))

    every = [(ranks, size(ranks), loss(ranks)) for ranks in rank_vectors([len(s) for s in spectra])]

    def best(index: int, above: tuple[int, ...]) -> float:
        """The least loss of clients up to `index`, none with more in a layer than `above`."""
        if index < 0:
            return 0.0
        fits = (
            (ranks, value)
            for ranks, bytes_, value in every
            if bytes_ <= budgets[index] and all(r <= limit for r, limit in zip(ranks, above, strict=True))
        )
        return min(value + best(index - 1, ranks) for ranks, value in fits)

    return best(len(budgets) - 1, tuple(len(s) for s in spectra))
