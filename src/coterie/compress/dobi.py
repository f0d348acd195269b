"""Dobi-SVD: the output of a layer projected on the directions in which its activations lie.

Dobi-SVD, arXiv 2502.02723. Of each batch of calibration text, the first gamma right singular vectors of the activations
Y = X W^T; their projectors are pooled, and the layer becomes V V^T W with V the pooled directions. Positions gamma are
the uniform ranks, or learnt (`gates`).
Deviations: all batches are pooled at once, by the eigenvectors of the mean projector, in place of an incremental PCA;
one basis at the largest ratio is cut for the smaller ones (FedSLM's specification, L6), where the paper's code trains
each ratio apart; storage in 8-bit halves is left out, `remap` only takes its ranks; what is learnt is fitted to the
parameters that the ratio allows; the penalty's weight, the gate's steepness and the step in shares of a layer's size
are ours, since the paper's are for one size of model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from coterie.compress.base import Compressor, Group, Loss, Ranking, language_loss, said, stacked_shape
from coterie.compress.gates import learnt_ranks
from coterie.compress.inputs import Inputs, Moments
from coterie.compress.ranked import Ranked
from coterie.compress.ranks import check_ratio, rank_of
from coterie.errors import ConfigError
from coterie.maths.lowrank import canonical_signs
from coterie.protocol.parties import Layer


class Activations(Inputs):
    """Moments, and the mean projector on the first directions of each batch's activations.

    In coordinates of an orthonormal basis Q of W's range, W = Q R, so that nothing is larger than min(d_out, d_in).
    """

    def __init__(self, W: Tensor, rank: int) -> None:
        super().__init__()
        self.Q, self.R = torch.linalg.qr(W.double())
        self.rank = rank
        self._pooled = torch.zeros(len(self.R), len(self.R), dtype=torch.float64, device=W.device)
        self._batches = 0

    def add(self, batch: Moments) -> None:
        super().add(batch)
        values, E = torch.linalg.eigh(self.R @ batch.gram @ self.R.mT)
        # A batch of fewer tokens than the rank has fewer directions; the others are noise of its null space.
        first = E[:, -self.rank :] * (values[-self.rank :] > 1e-12 * values[-1])
        self._pooled += first @ first.mT
        self._batches += 1

    @property
    def projector(self) -> Tensor:
        """The mean over batches, in the coordinates of Q."""
        return self._pooled / self._batches


def projected(Q: Tensor, R: Tensor, projector: Tensor, covariance: Tensor, rank: int) -> Ranked:
    """W = Q R as terms v_j (v_j^T W), the v_j the eigenvectors of the mean projector (r, r), by eigenvalue.

    Up to `rank` of them: with one batch, directions of equal eigenvalue 1, ordered by what lies in them on average,
    the diagonal of V^T covariance V; so are all whose eigenvalues coincide.
    """
    values, F = torch.linalg.eigh(projector)
    values, F = values.flip(-1).clamp(0, 1), F.flip(-1)
    values, F = values[:rank], _ordered_where_equal(F, values, covariance)[:, :rank]
    left, right = canonical_signs(Q @ F, F.mT @ R)
    root = torch.linalg.vector_norm(right, dim=-1).sqrt()
    inverse = torch.where(root > 0, 1 / root, 0)
    return Ranked(left * root, right * inverse[:, None], values)


def _ordered_where_equal(F: Tensor, values: Tensor, covariance: Tensor) -> Tensor:
    """The same spaces, with principal directions of the covariance within each space of one eigenvalue."""
    starts = [0, *(int(at) + 1 for at in (values[:-1] - values[1:] > 1e-9).nonzero().flatten()), len(values)]
    parts = []
    for start, end in pairwise(starts):
        part = F[:, start:end]
        _, turn = torch.linalg.eigh(part.mT @ covariance @ part)
        parts.append(part @ turn.flip(-1))
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class Dobi(Compressor):
    """Outputs projected on the directions of the activations (arXiv 2502.02723).

    learned: learn a position for each layer from a language model's loss; epochs, rate: of that. remap: ranks
    ratio min(m, n), as for storage in 8-bit halves, which holds max(m, n) k numbers in place of k (m + n).
    """

    title = "Dobi-SVD"
    paper = "arXiv 2502.02723"

    learned: bool = False
    epochs: int = 20
    rate: float = 0.01
    remap: bool = False

    def __post_init__(self) -> None:
        if self.learned and self.remap:
            raise ConfigError("dobi: learned positions are fitted to the parameters kept; leave remap or learned out")
        if self.epochs < 1 or not 0 < self.rate <= 1:
            raise ConfigError(
                f"dobi: epochs {self.epochs} must be at least 1, and rate {self.rate:g}, a step as a share of a "
                "layer's size, above 0 and at most 1"
            )

    def planned(
        self, network: nn.Module, layers: Mapping[str, Layer], windows: Tensor, ratio: float, loss: Loss | None
    ) -> dict[Group, int]:
        uniform = {
            group: rank_of(said(group), stacked_shape(group, layers), ratio, remap=self.remap)
            for group in self.groups(layers)
        }
        if not self.learned:
            return uniform
        wanted = loss or language_loss
        return learnt_ranks(network, layers, windows, wanted, uniform, ratio, epochs=self.epochs, rate=self.rate)

    def inputs(self, W: Tensor, rank: int) -> Inputs:
        return Activations(W, rank)

    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        assert isinstance(inputs, Activations)
        covariance = inputs.R @ inputs.gram @ inputs.R.mT
        return projected(inputs.Q, inputs.R, inputs.projector, covariance, inputs.rank)

    def ranks(self, ranking: Ranking, ratio: float) -> dict[Group, int]:
        check_ratio(ratio)
        if self.learned:
            share = ratio / ranking.ratio
            return {group: max(1, int(share * rank + 1e-9)) for group, rank in ranking.planned.items()}
        return {group: rank_of(said(group), ranking.shape(group), ratio, remap=self.remap) for group in ranking.lists}
