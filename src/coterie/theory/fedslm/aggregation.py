"""FedSLM's fusion across groups: Theorem 2 as far as a run shows it, Theorem 3 from a spectrum alone.

Letters as in `subspaces`; p_i the groups' shares of the data, W_g = sum_i p_i W_i the barycentre of Eq. 9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.theory.fedslm.subspaces import Subspace, residuals, subspace


@dataclass(frozen=True, eq=False)
class Group:
    """A group's weights W_i (m, n), its share of the data, and the subspace that W_i lies in: None for full models."""

    share: float
    W: Tensor
    space: Subspace | None = None


def compressed_group(share: float, U: Tensor, V: Tensor, core: Tensor | None = None) -> Group:
    """A group of factors U (m, r), V (r, n) and its aggregated core (r, r), Eq. 8; None for the identity."""
    middle = V if core is None else core.double() @ V.double()
    return Group(share, U.double() @ middle.double(), subspace(U, V))


def barycentre(groups: Sequence[Group]) -> Tensor:
    """W_g (m, n), the minimiser of sum_i p_i ||W - W_i||_F^2 (Eqs. 4 and 9).

    Raises:
        ValueError: shares that do not sum to 1.
    """
    _check_shares([group.share for group in groups])
    return torch.stack([group.share * group.W.double() for group in groups]).sum(dim=0)


@dataclass(frozen=True)
class Theorem2:
    """||W_g - What||_F and what bounds it.

    measured <= orthogonal = sum_i p_i (moved_i^2 + delta_i^2)^1/2 <= bound = sum_i p_i (moved_i + delta_i). residual =
    sum_i p_i delta_i, Theorem 3's bound, is what is left where nothing moved.
    moved: ||eps_opt + eps_mis||_F = ||W_i - Pi_i[What]||_F of every group, the sum that a run shows; its two parts need
    the best core. residuals: delta_i of every group.
    """

    measured: float
    orthogonal: float
    bound: float
    residual: float
    moved: tuple[float, ...]
    residuals: tuple[float, ...]


def theorem_2(W_hat: Tensor, groups: Sequence[Group]) -> Theorem2:
    """Theorem 2 (Eq. 25) against a reference What (m, n). Can be measured on a run.

    What a group moved lies in its subspace and what it leaves out does not, so the norm of their sum is known.

    Raises:
        ValueError: shares that do not sum to 1.
    """
    W_hat = W_hat.double()
    moved, left = [], []
    for group in groups:
        target = W_hat if group.space is None else group.space.project(W_hat)
        moved.append(float((group.W.double() - target).norm()))
        left.append(float((W_hat - target).norm()))
    shares = [group.share for group in groups]
    parts = list(zip(shares, moved, left, strict=True))
    return Theorem2(
        measured=float((barycentre(groups) - W_hat).norm()),
        orthogonal=math.fsum(p * math.hypot(inside, outside) for p, inside, outside in parts),
        bound=math.fsum(p * (inside + outside) for p, inside, outside in parts),
        residual=math.fsum(p * outside for p, _, outside in parts),
        moved=tuple(moved),
        residuals=tuple(left),
    )


@dataclass(frozen=True)
class Theorem3:
    """||W_g - What||_F where every group sits at Pi_i[What]: `exact` <= `bound` (Eq. 30) <= `worst` = delta_rmin."""

    exact: float
    bound: float
    worst: float


def theorem_3(energies: Tensor, ranks: Sequence[int], shares: Sequence[float]) -> Theorem3:
    """Theorem 3, and the error itself, for nested groups; nothing needs to be trained.

    Direction k is missing in the groups of rank below k. So the error's squared norm is sum_k q_k^2 e_k with q_k the
    share of those groups, which the triangle inequality of the paper only bounds.

    Args:
        energies: e (q + 1,), from `shells`; for What = W the squared singular values and 0 (Eq. 31).
        ranks: r_i, 0 ... q + 1; a group of full models has q + 1.
        shares: p_i, one a group.

    Raises:
        ValueError: shares that do not sum to 1, or ranks outside their range.
    """
    _check_shares(shares)
    if not all(0 <= rank <= len(energies) for rank in ranks):
        raise ValueError(f"ranks {list(ranks)} lie outside 0 ... {len(energies)}, the last for full models")
    weights = torch.tensor(list(shares), dtype=torch.float64)
    held = torch.tensor(list(ranks))
    missing = (held[:, None] <= torch.arange(len(energies))).double()  # (K, q + 1)
    delta = torch.cat([residuals(energies), torch.zeros(1, dtype=torch.float64)])[held]
    return Theorem3(
        exact=math.sqrt(float(((weights @ missing).square() * energies.double()).sum())),
        bound=float(weights @ delta),
        worst=float(delta.max()),
    )


def _check_shares(shares: Sequence[float]) -> None:
    if min(shares) < 0 or abs(math.fsum(shares) - 1) > 1e-9:
        raise ValueError(f"shares of the data must be 0 or more and sum to 1, not {list(shares)}")
