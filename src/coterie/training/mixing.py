"""Inputs that share two terms as they resemble a site's own: a pass for the features, before the pass that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.models.loading import Base, inputs_of
from coterie.protocol import Model


def pooled(base: Base, seen: Tensor | None, batch: Mapping[str, Tensor]) -> Tensor:
    """What entered the last layer; of a classifying decoder, at the token whose logits are taken.

    That is the last one that is no padding token, as transformers looks for it.
    """
    assert seen is not None
    if seen.dim() == 2:
        return seen
    tokens = batch["input_ids"].to(seen.device)
    is_token = (tokens != base.network.config.pad_token_id).long()  # type: ignore[union-attr]
    last = (is_token * torch.arange(tokens.shape[1], device=seen.device)).argmax(dim=1)
    return seen[torch.arange(seen.shape[0], device=seen.device), last]


@torch.no_grad()
def share_out(base: Base, batch: Mapping[str, Tensor], kept: Sequence[Tensor] | None = None) -> None:
    """Give each input of the passes to come its shares, where the bound model is mixed; else nothing.

    kept: of sequences, the places at which they are predicted, (mᵢ,) for each client of the stack; the first of a row
    is the last token of its prompt, whose state stands for the input. A row without any counts as unlike all anchors.
    """
    binding = base.slots.binding
    mix, terms, size = binding.mix, binding.terms, binding.size
    if mix is None:
        return
    binding.shares = {}
    binding.terms = {layer: [held for held in own if held[0] == mix.by] for layer, own in terms.items()}
    try:
        if kept is None:
            base.network(**inputs_of(base, batch))
            features = pooled(base, binding.seen, batch)
        else:
            width = batch["input_ids"].shape[1]
            rows = [places // width for places in kept]
            first = [torch.diff(row, prepend=row.new_full((1,), -1)) > 0 for row in rows]
            with base.slots.keeping([places[one] for places, one in zip(kept, first, strict=True)]):
                base.network(**inputs_of(base, batch))
            assert binding.seen is not None
            each = len(batch["input_ids"]) // size
            features = binding.seen.new_zeros(size * each, binding.seen.shape[-1])
            features[torch.cat([row[one] + i * each for i, (row, one) in enumerate(zip(rows, first, strict=True))])] = (
                binding.seen
            )
    finally:
        binding.terms = terms
    shared = mix.shares(features.to(mix.anchors.dtype).view(size, -1, features.shape[-1]))
    binding.shares = {name: share.reshape(-1) for name, share in shared.items()}


def require_unmixed(model: Model, who: str) -> None:
    """Raises ModelError for a model of which each input takes its own share, or that is judged by prototypes.

    Such a one is used, not trained.
    """
    if model.nearest is not None:
        raise ModelError(f"{who}: a model judged by prototypes answers, but is not trained; leave `nearest` out")
    if model.mix is not None:
        raise ModelError(
            f"{who}: a model that is mixed by nearness to anchors answers, but is not trained or measured; leave the "
            "mix out, and put a share that is one number into the terms' scales"
        )
