"""SVD-LLM: the SVD of W L with L L^T = X X^T, so that what is cut off is exactly what the output loses.

SVD-LLM, arXiv 2403.07378. ||W X - W' X|| is the root of the discarded squared singular values of W L, and no other
matrix of that rank comes nearer. With `update`, each U is then fitted by least squares to W X', X' what reaches the
layer in the compressed network: U = W X' (V X')^+.
Deviations: where X X^T is not positive definite, its diagonal is raised by a share of its largest eigenvalue, where the
paper's code adds 1e-6 whatever the size of the inputs; the update is made for all layers of a block at once, from one
pass of the block with its truncated layers; it looks at all calibration text, where the paper takes 16 of 256 samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.compress.base import Compressor, Group
from coterie.compress.inputs import Inputs, factor_of
from coterie.compress.ranked import Ranked, ranked_svd


def whitened(W: Tensor, gram: Tensor) -> Ranked:
    """The terms of W (d_out, d_in) by what they give on inputs of Gram matrix G (d_in, d_in)."""
    L = factor_of(gram.double())
    return ranked_svd(W.double() @ L, lambda V: torch.linalg.solve_triangular(L, V, upper=False, left=False))


def fitted_left(W: Tensor, V: Tensor, gram: Tensor) -> Tensor:
    """U = W G V^T (V G V^T)^+, the least-squares U (d_out, k) of W X ~ U V X, float64."""
    V, gram = V.double(), gram.double()
    GV = gram @ V.mT
    inner = V @ GV
    # The smallest eigenvalues are rounding where the text has fewer directions than V.
    U: Tensor = (W.double() @ GV) @ torch.linalg.pinv(inner, rtol=1e-10, hermitian=True)
    return U


@dataclass(frozen=True)
class SVDLLM(Compressor):
    """SVD of the weight times a whitening factor of its inputs (arXiv 2403.07378).

    update: fit U to the inputs that the compressed network has; a smaller model is no slice of it any more.
    """

    title = "SVD-LLM"
    paper = "arXiv 2403.07378"

    update: bool = False

    @property
    def refits(self) -> bool:
        return self.update

    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        return whitened(W, inputs.gram)
