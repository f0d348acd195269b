"""SVD-LLM V2: whitening by eigenvectors, and more removed from layers that lose less.

SVD-LLM V2, arXiv 2503.12340. G = Q Lambda Q^T, the SVD of W Q Lambda^1/2; where G is positive definite the terms are
those of SVD-LLM, and where it is not, directions without input count for nothing. Layers of one type share the ratio R
that is removed: each gives up |group| R s_j / sum s with s = 1 / log(its loss at the uniform rank).
Deviations: where the least loss of a group is below e, all its losses are multiplied by what makes it e, since the
logarithm of a loss below 1 is negative; no layer gives up more than 0.95 (or R, if that is more), and the others of its
type take the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.compress.base import Compressor, Group, Ranking, said
from coterie.compress.inputs import Inputs
from coterie.compress.ranked import Ranked, ranked_svd
from coterie.compress.ranks import rank_by_method, rank_of

MOST_REMOVED = 0.95
"""The largest share of a layer's parameters that is removed."""

_VANISHING = 1e-12
"""Eigenvalues of G below this share of the largest are 0."""


def eigen_whitened(W: Tensor, gram: Tensor) -> Ranked:
    """The terms of W (d_out, d_in) by what they give on inputs of Gram matrix G, which may be singular."""
    values, Q = torch.linalg.eigh(gram.double())
    values = values.where(values > _VANISHING * values[-1], 0).clamp(min=0)
    root = values.sqrt()
    inverse = torch.where(root > 0, 1 / root, 0)
    return ranked_svd((W.double() @ Q) * root, lambda V: (V * inverse) @ Q.mT)


def removed_ratios(losses: Sequence[float], removed: float) -> list[float]:
    """The share that each layer of a group gives up; their mean is `removed`. losses: ||W X - W' X|| at that ratio."""
    most = max(MOST_REMOVED, removed)
    highest = max(losses)
    if highest <= 0:
        return [removed] * len(losses)
    floored = [max(loss, 1e-9 * highest) for loss in losses]
    raised = max(1.0, math.e / min(floored))
    scores = [1 / math.log(loss * raised) for loss in floored]
    full: set[int] = set()
    while True:
        left = len(losses) * removed - most * len(full)
        total = sum(score for index, score in enumerate(scores) if index not in full)
        shares = [most if index in full else left * score / total for index, score in enumerate(scores)]
        over = {index for index, share in enumerate(shares) if share > most and index not in full}
        if not over or len(full) + len(over) == len(losses):
            return shares
        full |= over


@dataclass(frozen=True)
class SVDLLMV2(Compressor):
    """SVD-LLM with a ratio for each layer by its loss (arXiv 2503.12340)."""

    title = "SVD-LLM V2"
    paper = "arXiv 2503.12340"
    ranks_by_lists = True

    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        return eigen_whitened(W, inputs.gram)

    def ranks(self, ranking: Ranking, ratio: float) -> dict[Group, int]:
        alike: dict[tuple[str, int, int], list[Group]] = defaultdict(list)
        for group in ranking.lists:
            shape = ranking.shape(group)
            alike[group[0].rpartition(".")[2], shape.d_out, shape.d_in].append(group)
        ranks: dict[Group, int] = {}
        for groups in alike.values():
            uniform = [rank_of(said(group), ranking.shape(group), ratio) for group in groups]
            losses = [ranking.lists[group].tail(rank) for group, rank in zip(groups, uniform, strict=True)]
            for group, share in zip(groups, removed_ratios(losses, 1 - ratio), strict=True):
                ranks[group] = rank_by_method(said(group), ranking.shape(group), 1 - share, ratio, self.title)
        return {group: ranks[group] for group in ranking.lists}
