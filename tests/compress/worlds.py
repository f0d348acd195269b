"""Random layers and their inputs, and small networks with windows of text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from training.small import WORDS

from coterie.compress.inputs import Inputs, moments
from coterie.maths.keys import Key, root_key

KEY = root_key(23)


def layer(m: int, n: int, tokens: int, name: str | int = "layer") -> tuple[Tensor, Tensor]:
    """W (m, n), and inputs X (n, tokens) that are correlated and of unequal channels, float64."""
    key = KEY.fold("layer", name)
    W = key.fold("W").normal((m, n), dtype=torch.float64)
    mixing = torch.eye(n, dtype=torch.float64) + key.fold("mixing").normal((n, n), 0.5 * n**-0.5, torch.float64)
    scale = torch.logspace(1, -1, n, dtype=torch.float64)[:, None]
    return W, scale * (mixing @ key.fold("X").normal((n, tokens), dtype=torch.float64))


def positive_definite(gram: Tensor) -> bool:
    """Whether a Gram matrix is that beyond rounding, which Cholesky and eigenvectors treat each in its way."""
    values = torch.linalg.eigvalsh(gram)
    return bool(values[0] > 1e-8 * values[-1])


def seen(X: Tensor, *more: Tensor, inputs: Inputs | None = None) -> Inputs:
    """What is kept of batches (d_in, T)."""
    kept = Inputs() if inputs is None else inputs
    for batch in (X, *more):
        kept.add(moments(batch.mT))
    return kept


def windows(count: int, length: int, name: str = "windows") -> Tensor:
    """Token ids (count, length) of the networks of `training.small`."""
    ids = 1 + KEY.fold(name).unit(count * length) * (WORDS - 1)
    return torch.from_numpy(ids.astype("int64")).reshape(count, length)


def frozen(network: nn.Module) -> nn.Module:
    return network.eval().requires_grad_(False)


def key(name: str) -> Key:
    return KEY.fold(name)
