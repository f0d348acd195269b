"""Losses of a strong model that learns from a weak one and has confidence in itself.

Burns et al. 2023 (arXiv 2312.09390), Appendix A.4; FedSLM, Eqs. 10 and 11 and Appendix B. Letters: z (b, C) the strong
model's scores of an example's classes or options, -inf where it has no such option; f_s = softmax(z); f_w (b, C) the
weak model's distributions, 0 there; f_hat (b, C), one-hot. Losses are (b,), one for each example.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Hardening = Literal["quantile", "median", "argmax"]


def confidence_losses(z: Tensor, f_w: Tensor, f_hat: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) CE(f_w, f_s) + alpha CE(f_hat, f_s) (FedSLM, Eq. 10); no gradient passes through f_hat."""
    target = (1 - alpha) * f_w + alpha * f_hat.detach()
    return -(target * _log_softmax(z)).sum(dim=-1)


def entropy_losses(z: Tensor, f_w: Tensor, alpha: float) -> Tensor:
    """CE(f_w, f_s) + alpha H(f_s) (FedSLM, Appendix B)."""
    return -((f_w + alpha * z.softmax(dim=-1)) * _log_softmax(z)).sum(dim=-1)


def hardened(z: Tensor, f_w: Tensor, rule: Hardening) -> Tensor:
    """f_hat (b, C), a constant: what the strong model says when it has to choose.

    argmax: its likeliest option. The other rules are thresholds of the examples with two options, taken together;
    more options, and a single such example, have none and take the argmax. median: exactly the upper half by p(1) is
    of class 1 (FedSLM, Eq. 11), by rank: of equals the earlier, of an odd number the smaller half. quantile: class 0
    from the quantile of p(0) on that leaves below it the weak model's mean p(1) (Burns et al.'s code).
    """
    f_s = z.detach().softmax(dim=-1)
    chosen = f_s.argmax(dim=-1)
    pairs = (torch.isfinite(z).sum(dim=-1) == 2).nonzero().squeeze(1)
    if rule != "argmax" and len(pairs) > 1:
        # Padding is on the right, so that the two options are the first two entries.
        chosen[pairs] = _by_rank(f_s[pairs, 1]) if rule == "median" else _by_quantile(f_s[pairs, 0], f_w[pairs, 1])
    return torch.nn.functional.one_hot(chosen, z.shape[-1]).to(z.dtype)


def _by_rank(p: Tensor) -> Tensor:
    upper = p.argsort(descending=True, stable=True)[: len(p) // 2]
    return torch.zeros(len(p), dtype=torch.int64, device=p.device).index_fill(0, upper, 1)


def _by_quantile(p: Tensor, weak: Tensor) -> Tensor:
    return (p < torch.quantile(p, weak.mean().to(p.dtype).clamp(0, 1))).long()


def _log_softmax(z: Tensor) -> Tensor:
    """log f_s, and 0 where there is no option, lest 0 times infinity be no number."""
    return z.log_softmax(dim=-1).masked_fill(z == -torch.inf, 0.0)
