"""Slow twins of `coterie.serve`: one text at a time through a plain network, without padding, cache or batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def logits(
    network: nn.Module, tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int
) -> Tensor:
    """(n, C), each text by itself."""
    rows = []
    for place, text in enumerate(texts):
        second = () if pairs is None else (pairs[place],)
        rows.append(
            network(**tokenizer(text, *second, truncation=True, max_length=max_length, return_tensors="pt")).logits
        )
    return torch.cat(rows)


@torch.no_grad()
def greedy(network: nn.Module, ids: Sequence[int], count: int, end: int) -> list[int]:
    """The likeliest next token, `count` times or up to the end token; the whole sequence is computed anew each time."""
    whole = list(ids)
    for _ in range(count):
        whole.append(int(network(input_ids=torch.tensor([whole])).logits[0, -1].argmax()))
        if whole[-1] == end:
            break
    return whole[len(ids) :]


@torch.no_grad()
def log_likelihood(network: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Σ log p(answer token | all before it)."""
    scores = network(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(dim=-1)
    return sum(float(scores[len(prompt) + place - 1, token]) for place, token in enumerate(answer))
