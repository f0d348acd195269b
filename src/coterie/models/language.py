"""Whether a network is a language model, which predicts each token from those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coterie.models.targets import output_layer


def is_language_network(network: nn.Module) -> bool:
    """Whether this predicts the next token, of which it sees nothing."""
    return output_layer(network) is not None and _is_causal(network)


def _is_causal(network: nn.Module) -> bool:
    """Whether no earlier token's prediction has a gradient by the last token's embedding.

    By gradients, since predictions themselves do not tell it of a network whose layers quantise what enters them over
    all tokens together.
    """
    seen: list[Tensor] = []

    def keep(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        seen.append(embedded.detach().requires_grad_())
        return seen[-1]

    embedding = network.get_input_embeddings()  # type: ignore[operator]
    ids = torch.tensor([[0, 1, 2, 3]], device=next(network.parameters()).device)
    hook = embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            (grad,) = torch.autograd.grad(logits[:, :-1].float().square().sum(), seen[0])
    finally:
        hook.remove()
    return bool(grad[:, -1].abs().max() <= 1e-6 * grad.abs().max())
