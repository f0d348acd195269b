"""How many tasks a pool of clients has, which FedSEE takes as known: an estimate that is not the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.theory.fedsee.extraction import extract, public_losses
from coterie.theory.fedsee.synthetic import Moments


class TaskCount(NamedTuple):
    """tasks: the larger of both counts. from_pool: the affine rank of the pool above the noise, plus one. distinct: how
    many experts the public sets tell apart, None without them. singular: of the centred pool, descending. noise: what
    singular values had to exceed."""

    tasks: int
    from_pool: int
    distinct: int | None
    singular: list[float]
    noise: float


def task_count(
    first: Tensor,
    second: Tensor,
    public: Sequence[tuple[Moments, Moments]] | None = None,
    *,
    margin: float = 1.2,
) -> TaskCount:
    """An estimate of M from clients' parameters estimated on two halves of their data, and from public sets in halves.

    From the pool: client optima lie in the affine hull of the experts, of dimension M - 1 (Theorem 1). The pool is the
    mean of the halves; half their difference has the law of its error, so singular values of the centred pool that
    exceed the largest one of that difference, times `margin`, are counted as directions between tasks. From public
    sets: each label's expert is extracted with one half (Eq. 8) and judged on the other; two labels are different
    tasks if the four preferences for the own expert are on average more than they differ by, and so all positive.

    Both counts are lower bounds up to noise. The pool's rests on one linear model over shared features, fitted alike on
    both halves; on at least M clients with affinely independent mixtures; and on experts that are affinely independent
    (h > 0). It is too small for collinear experts, for fewer clients than tasks, and where mixtures are nearly uniform,
    so that clients differ by less than their estimates' errors; more data per client help against the last alone.
    Where tasks' second moments differ, optima leave the hull (Remark 1), and it may be too large. The public count has
    no more than the labels it is given and falls short where no upload is near an expert.

    Args:
        first, second: estimates (N, l, r) from disjoint halves of equal size. public: for each label its two halves.

    Raises:
        ValueError: shapes of the halves that differ, or fewer than two clients.
    """
    if first.shape != second.shape or first.ndim != 3 or len(first) < 2:
        raise ValueError(
            f"two halves (N, l, r) of at least two clients are needed, not {(*first.shape,)} and {(*second.shape,)}"
        )
    pool, error = (first + second) / 2, (first - second).flatten(1) / 2
    singular = torch.linalg.svdvals((pool - pool.mean(dim=0)).flatten(1))
    noise = max(margin * float(torch.linalg.matrix_norm(error, 2)), 1e-12 * float(pool.norm()))
    from_pool = 1 + int((singular > noise).sum())
    distinct = None if public is None else _distinct(pool, public)
    return TaskCount(max(from_pool, distinct or 1), from_pool, distinct, singular.tolist(), noise)


def _distinct(pool: Tensor, public: Sequence[tuple[Moments, Moments]]) -> int:
    """Labels up to those that held-out public losses do not tell apart, which count as one task."""
    halves = [public_losses([pair[which] for pair in public]) for which in (0, 1)]
    tables = []
    for fitted, held_out in (halves, halves[::-1]):
        experts = extract(pool, fitted).experts
        squares = torch.einsum("klr,mrs,kls->mk", experts, held_out.H, experts)
        losses = squares - 2 * torch.einsum("klr,mlr->mk", experts, held_out.G)
        tables.append(losses - losses.diagonal()[:, None])  # what label m loses by expert k
    count = len(public)
    owner = list(range(count))
    for m in range(count):
        for k in range(m):
            preferences = torch.stack([table[pair] for table in tables for pair in ((m, k), (k, m))])
            if preferences.mean() <= preferences.max() - preferences.min():
                owner = [owner[k] if label == owner[m] else label for label in owner]
    return len(set(owner))
