"""FedSLM's nested subspaces: projectors, what they leave out, and what frozen factors do to a core.

Letters, all float64: W (m, n) the server's layer, lambda its singular values; U (m, r), V (r, n) a client's frozen
factors, X (r, r) a core or a difference of two; P, Q the orthogonal projectors on the columns of U and the rows of V,
Pi[M] = P M Q. Projectors are taken from the factors by QR, so whitened ones, whose rows are not orthonormal, are
served too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Subspace:
    """What cores between two factors can reach: U0 X V0 with U0 (m, r) orthonormal in columns, V0 (r, n) in rows."""

    U0: Tensor
    V0: Tensor

    @property
    def rank(self) -> int:
        return self.U0.shape[1]

    def cut(self, rank: int) -> Subspace:
        """The subspace of the first `rank` directions of either side."""
        return Subspace(self.U0[:, :rank], self.V0[:rank])

    def coordinates(self, M: Tensor) -> Tensor:
        """U0^T M V0^T (r, r) of M (m, n)."""
        return self.U0.T @ M.double() @ self.V0.T

    def project(self, M: Tensor) -> Tensor:
        """Pi[M] = P M Q, the nearest matrix to M (m, n) in the subspace."""
        return self.U0 @ self.coordinates(M) @ self.V0

    def leave(self, M: Tensor) -> Tensor:
        """M - Pi[M]."""
        return M.double() - self.project(M)


def subspace(U: Tensor, V: Tensor) -> Subspace:
    """The subspace of factors U (m, r) and V (r, n), which need not be orthonormal (Definition 2, Lemma 3).

    Leading directions stay leading: `cut(k)` belongs to U[:, :k] and V[:k].

    Raises:
        ValueError: factors without full rank, of which r directions do not exist.
    """
    U, V = U.double(), V.double()
    rank = U.shape[1]
    held = int(torch.linalg.matrix_rank(U)), int(torch.linalg.matrix_rank(V))
    if V.shape[0] != rank or min(held) < rank:
        raise ValueError(
            f"factors {tuple(U.shape)} and {tuple(V.shape)} have ranks {held[0]} and {held[1]}: both must have {rank}"
        )
    return Subspace(torch.linalg.qr(U).Q, torch.linalg.qr(V.T).Q.T)


def truncated(W: Tensor, rank: int, S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The factors of Eqs. 13 and 15: U = U0 L^1/2 S^-1 (m, r) and V = S L^1/2 V0 (r, n), L the leading spectrum of W.

    As the paper prints it, S (r, r) is between the factors and cancels in U V, which stays the plain truncation; what S
    changes is the way a core acts.

    Raises:
        ValueError: a rank outside 1 ... min(m, n).
    """
    if not 1 <= rank <= min(W.shape):
        raise ValueError(f"a layer {tuple(W.shape)} has no truncation of rank {rank}")
    U0, spectrum, V0 = torch.linalg.svd(W.double(), full_matrices=False)
    root = spectrum[:rank].sqrt()
    U, V = U0[:, :rank] * root, root[:, None] * V0[:rank]
    return (U, V) if S is None else (torch.linalg.solve(S, U, left=False), S @ V)


@dataclass(frozen=True)
class Nesting:
    """||P1 P2 - P1||_F and ||Q1 Q2 - Q1||_F: both 0 where Proposition 1 holds."""

    left: float
    right: float


def proposition_1(small: Subspace, large: Subspace) -> Nesting:
    """How far a smaller subspace is from lying in a larger one (Eq. 20): its directions outside the other.

    Truncations of one decomposition are nested; models compressed on their own are not, and then no statement that uses
    nesting applies to them. Can be measured on a run.
    """
    left = small.U0 - large.U0 @ (large.U0.T @ small.U0)
    right = small.V0 - (small.V0 @ large.V0.T) @ large.V0
    return Nesting(float(left.norm()), float(right.norm()))


def shells(space: Subspace, M: Tensor) -> Tensor:
    """Energy of M (m, n) by rank (q + 1,): ||(Pi_k - Pi_{k-1})[M]||_F^2 for k = 1 ... q, then what is outside of Pi_q.

    q is the rank of `space`, Pi_k belongs to `space.cut(k)`. For M = W, the layer that was decomposed by plain SVD,
    they are lambda_k^2, and at full rank 0 at the end. Another M of a layer that is not square may keep energy outside
    even at full rank.
    """
    squares = space.coordinates(M).square()
    by_rank = squares.tril().sum(dim=1) + squares.triu(1).sum(dim=0)
    return torch.cat([by_rank, space.leave(M).square().sum()[None]])


def residuals(energies: Tensor) -> Tensor:
    """delta_r for r = 0 ... q (q + 1,), from `shells`: Definition 3 for all ranks at once.

    With the energies (lambda_1^2, ..., lambda_q^2, 0) it is the closed form of Eckart, Young and Mirsky.
    """
    left_out: Tensor = energies.double().flip(0).cumsum(0).flip(0)
    return left_out.sqrt()


def geometric_core(U: Tensor, V: Tensor, W_hat: Tensor) -> Tensor:
    """U^+ What V^+ (r, r), Eq. 22: the core whose U X V is nearest to What (m, n), and equals Pi[What] (Eq. 23)."""
    core: Tensor = torch.linalg.pinv(U.double()) @ W_hat.double() @ torch.linalg.pinv(V.double())
    return core


@dataclass(frozen=True)
class Amplification:
    """The least and the greatest ||U X V||_F / ||X||_F; both are reached."""

    least: float
    greatest: float


def amplification(U: Tensor, V: Tensor) -> Amplification:
    """What factors U (m, r) and V (r, n) do to the norm of a core: products of their extreme singular values."""
    left, right = torch.linalg.svdvals(U.double()), torch.linalg.svdvals(V.double())
    return Amplification(float(left[-1] * right[-1]), float(left[0] * right[0]))


@dataclass(frozen=True)
class Lemma6:
    """||U X V||_F between the paper's bounds and, closer, between those of the factors themselves.

    lower <= least <= measured <= greatest <= upper, with lower = lambda_r ||X||_F / kappa(S) and upper =
    lambda_1 kappa(S) ||X||_F.
    """

    lower: float
    least: float
    measured: float
    greatest: float
    upper: float


def lemma_6(W: Tensor, X: Tensor, S: Tensor | None = None) -> Lemma6:
    """Lemma 6 (Eq. 48) for the factors of `truncated`, X (r, r) and the scaling S (r, r), None for I."""
    rank = X.shape[0]
    U, V = truncated(W, rank, S)
    spectrum = torch.linalg.svdvals(W.double())
    kappa, size, factors = condition(S), float(X.double().norm()), amplification(U, V)
    return Lemma6(
        lower=float(spectrum[rank - 1]) / kappa * size,
        least=factors.least * size,
        measured=float((U @ X.double() @ V).norm()),
        greatest=factors.greatest * size,
        upper=float(spectrum[0]) * kappa * size,
    )


def condition(S: Tensor | None) -> float:
    """kappa(S) = ||S||_2 ||S^-1||_2, and 1 for None."""
    return 1.0 if S is None else float(torch.linalg.cond(S.double()))


def effective_smoothness(L: float, lambda_1: float, S: Tensor | None = None) -> float:
    """L_eff = L lambda_1^2 kappa(S)^2 (Definition 1, Eq. 16)."""
    return L * lambda_1**2 * condition(S) ** 2


def smoothness_of_factors(L: float, U: Tensor, V: Tensor) -> float:
    """L ||U||_2^2 ||V||_2^2, the smoothness of X -> loss(U X V) that holds for factors of every kind.

    It equals `effective_smoothness` for the even split of Eq. 13, is never above it for Eq. 15, and serves factors
    whose whitening stands outside of V, for which the paper's kappa(S) is not defined.
    """
    return L * amplification(U, V).greatest ** 2
