"""The slow twin of language-model losses: one sequence and one token at a time, nothing padded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.data.sequences import SequenceSet
from coterie.protocol import Model


@torch.no_grad()
def next_token_logits(network: nn.Module, data: SequenceSet) -> list[Tensor]:
    """For each sequence, logits (answer tokens, V): each from a pass over the tokens before it only."""
    found = []
    for row in data.rows.tolist():
        ids = data.ids[data.offsets[row] : data.offsets[row + 1]].long()
        start = int(data.prompts[row])
        found.append(torch.stack([network(input_ids=ids[None, :t]).logits[0, -1] for t in range(start, len(ids))]))
    return found


def answers(data: SequenceSet) -> list[Tensor]:
    """For each sequence, the tokens of its answer."""
    starts = data.offsets[data.rows] + data.prompts[data.rows]
    ends = data.offsets[data.rows + 1]
    return [data.ids[a:b].long() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def token_losses(network: nn.Module, data: SequenceSet) -> list[Tensor]:
    """For each sequence, -log p of each token of its answer."""
    pairs = zip(next_token_logits(network, data), answers(data), strict=True)
    return [-logits.log_softmax(dim=1)[torch.arange(len(ids)), ids] for logits, ids in pairs]


def with_products(network: nn.Module, model: Model) -> nn.Module:
    """The unwrapped float64 network with every s B A in its weights."""
    network = network.eval().double()
    for layer, term in model["lora"].items():
        linear = network.get_submodule(layer)
        product = term.product().double()
        linear.weight.data += product.mT if type(linear).__name__ == "Conv1D" else product
    return network
