"""What a language model's tokens see of each other: whether they do not look ahead, and whether a mask may say it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from coterie.models.targets import output_layer


def is_language_network(network: nn.Module) -> bool:
    """Whether this predicts the next token, of which it sees nothing."""
    return output_layer(network) is not None and _is_causal(network)


@torch.no_grad()
def takes_branches(network: nn.Module) -> bool:
    """Whether continuations of one text may stand side by side in a row, told apart by positions and an attention mask.

    Not where tokens see each other by more than attention (states, convolutions), or not all that came before
    (windows). Tried on two continuations: with the mask, the second must be as it is alone, at most a tenth as far from
    it as without.
    """
    config = getattr(network, "config", None)
    parts = [part for part in (config, getattr(config, "text_config", None)) if part is not None]
    if not {"position_ids", "attention_mask"} <= set(inspect.signature(network.forward).parameters):
        return False
    if any(set(getattr(part, "layer_types", None) or ()) - {"full_attention"} for part in parts):
        return False
    if any(getattr(part, "sliding_window", None) and getattr(part, "use_sliding_window", True) for part in parts):
        return False
    device = next(network.parameters()).device
    text, one, other = [0, 1, 2, 3], [4, 5, 6], [5, 6, 4]
    row = torch.tensor([[*text, *one, *other]], device=device)
    at = torch.tensor([[*range(4), *range(4, 7), *range(4, 7)]], device=device)
    seen = torch.ones(10, 10, dtype=torch.bool, device=device).tril()
    seen[7:, 4:7] = False
    try:
        alone = _logits(network, torch.tensor([[*text, *other]], device=device))[4:]
        beside = _logits(network, row, position_ids=at)[7:]
        masked = _logits(network, row, position_ids=at, attention_mask=additive(seen[None, None], network))[7:]
    except (RuntimeError, ValueError, TypeError, IndexError):  # a network that takes no such mask says so in many ways
        return False
    return float((masked - alone).abs().max()) <= 0.1 * float((beside - alone).abs().max())


def additive(seen: Tensor, network: nn.Module) -> Tensor:
    """A mask that says what is seen, bool, as what is added to attention scores, in the dtype of the embeddings."""
    dtype = network.get_input_embeddings().weight.dtype  # type: ignore[operator]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _logits(network: nn.Module, ids: Tensor, **more: Tensor) -> Tensor:
    """(L, V) float64 of one row."""
    given = {"attention_mask": torch.ones_like(ids)} | more
    logits: Tensor = network(input_ids=ids, **given).logits
    return logits[0].double()


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
