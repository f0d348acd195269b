"""A weight as a ranked list of rank-one terms: a smaller model is a slice of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.maths.lowrank import canonical_signs


@dataclass(frozen=True, eq=False)
class Ranked:
    """W = sum_j u_j v_j over q terms, the most important first.

    U: (d_out, q), the u_j in columns. V: (q, d_in), the v_j in rows; each term's size is split evenly between the two.
    scores: (q,), descending, what a term is worth by its method's measure: a singular value where that is one of W, of
    W S or of W L, so that the root of the discarded squares is the loss in that measure.
    """

    U: Tensor
    V: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.scores)

    def cut(self, rank: int) -> Ranked:
        """The first `rank` terms; views of the same storage.

        Raises:
            ModelError: a rank below 1, or more terms than there are.
        """
        if not 1 <= rank <= len(self):
            raise ModelError(f"rank {rank} of a list of {len(self)} terms; it must lie between 1 and {len(self)}")
        return Ranked(self.U[:, :rank], self.V[:rank], self.scores[:rank])

    def product(self) -> Tensor:
        """sum_j u_j v_j, (d_out, d_in)."""
        return self.U @ self.V

    def tail(self, rank: int) -> float:
        """The root of the squared scores beyond `rank`: the predicted truncation loss."""
        return float(torch.linalg.vector_norm(self.scores[rank:].double()))

    def rows(self, sizes: Sequence[int]) -> list[Tensor]:
        """U of each of several layers that were stacked by rows; V is common to them."""
        return list(torch.split(self.U, list(sizes)))

    def by(self, scores: Tensor) -> Ranked:
        """The same terms in the order of other scores (q,), `order_of`."""
        order = order_of(scores)
        return Ranked(self.U[:, order], self.V[order], scores[order])

    def to(self, dtype: torch.dtype) -> Ranked:
        """The factors in another dtype; the scores stay as they are."""
        return Ranked(self.U.to(dtype), self.V.to(dtype), self.scores)


def order_of(scores: Tensor) -> Tensor:
    """Which comes first, by scores (q,) descending; equal ones keep their order."""
    return scores.argsort(descending=True, stable=True)


def ranked_svd(M: Tensor, undo: Callable[[Tensor], Tensor] | None = None) -> Ranked:
    """The singular triples of M as terms U sqrt(S), sqrt(S) V^T, in float64, signs canonical.

    M: (d_out, d_in), of W S with an invertible S where `undo` maps (q, d_in) rows v to v S^-1: the terms are of W then,
    ranked by their size in W S. Source: FedSLM (arXiv 2607.29071), Eqs. 13 and 15, as the specification reads it (L5).
    """
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    U, Vh = canonical_signs(U, Vh)
    root = S.sqrt()
    V = root[:, None] * Vh
    return Ranked(U * root, V if undo is None else undo(V), S)


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """||(W - U_k V_k) X||^2 as sums over terms, so that it is known for every k, and for terms in any order.

    Source: the loss that SVD-LLM (arXiv 2403.07378) minimises. Terms need not be orthogonal, so that every method is
    measured alike.

    energy: ||W X||^2. cross: (q,), <W X, u_j v_j X>. both: (q, q), <u_i v_i X, u_j v_j X>; all float64.
    """

    energy: Tensor
    cross: Tensor
    both: Tensor

    @classmethod
    def of(cls, W: Tensor, U: Tensor, V: Tensor, gram: Tensor) -> OutputLoss:
        """W (d_out, d_in), U (d_out, q), V (q, d_in), gram X X^T (d_in, d_in)."""
        W, U, V, gram = W.double(), U.double(), V.double(), gram.double()
        VG = V @ gram
        return cls(((W @ gram) * W).sum(), ((U.mT @ W) * VG).sum(dim=-1), (U.mT @ U) * (VG @ V.mT))

    def errors(self, order: Tensor | None = None) -> Tensor:
        """||(W - U_k V_k) X|| for k = 0 … q, (q + 1,); order (q,): of other terms first.

        A difference of squares: below about 1e-8 ||W X|| it is rounding.
        """
        cross, both = self.cross, self.both
        if order is not None:
            cross, both = cross[order], both[order][:, order]
        # The sum over the leading k x k block grows by row and column k.
        blocks = both.tril().sum(dim=-1) + both.triu(1).sum(dim=-2)
        squares = self.energy - 2 * cross.cumsum(0) + blocks.cumsum(0)
        return torch.cat([self.energy[None], squares]).clamp(min=0).sqrt()
