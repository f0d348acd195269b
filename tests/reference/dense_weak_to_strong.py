"""The slow twin of learning from a teacher: one example and one option at a time, in probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.data.sequences import ChoiceSet, SequenceSet
from coterie.data.text import TextSet
from coterie.protocol import WeakToStrong


def chosen_by(rule: str, p: Sequence[Sequence[float]], weak: Sequence[Sequence[float]]) -> list[int]:
    """What each example is hardened to; p and weak without padding."""
    chosen = [max(range(len(row)), key=lambda c: (row[c], -c)) for row in p]
    pairs = [place for place, row in enumerate(p) if len(row) == 2]
    if rule == "argmax" or len(pairs) < 2:
        return chosen
    if rule == "median":
        falling = sorted(pairs, key=lambda place: -p[place][1])
        return [int(place in falling[: len(pairs) // 2]) if place in pairs else c for place, c in enumerate(chosen)]
    rising = sorted(p[place][0] for place in pairs)
    at = sum(weak[place][1] for place in pairs) / len(pairs) * (len(pairs) - 1)
    low = min(int(at), len(pairs) - 2)
    threshold = rising[low] + (at - low) * (rising[low + 1] - rising[low])
    return [int(p[place][0] < threshold) if place in pairs else c for place, c in enumerate(chosen)]


def loss_of(p: Sequence[float], weak: Sequence[float], hard: int, alpha: float, form: str) -> float:
    """The loss of one example."""
    imitation = -sum(w * math.log(q) for w, q in zip(weak, p, strict=True) if w > 0)
    if form == "entropy":
        return imitation - alpha * sum(q * math.log(q) for q in p if q > 0)
    return (1 - alpha) * imitation - alpha * math.log(p[hard])


def option_scores(network: nn.Module, weights: Mapping[str, Tensor], data: ChoiceSet, question: int) -> Tensor:
    """(options,): each by a pass of its own over prompt and option."""
    options: SequenceSet = data.select([question]).sequences()
    found = []
    for row in options.rows.tolist():
        ids = options.ids[options.offsets[row] : options.offsets[row + 1]].long()
        start = int(options.prompts[row])
        logits = functional_call(network, dict(weights), kwargs={"input_ids": ids[None]}).logits[0]
        tokens = logits[:-1].log_softmax(dim=1)[torch.arange(len(ids) - 1), ids[1:]][start - 1 :]
        found.append(tokens.mean() if data.score == "mean" else tokens.sum())
    return torch.stack(found)


def token_scores(network: nn.Module, weights: Mapping[str, Tensor], data: SequenceSet, index: int) -> Tensor:
    """(answer tokens, V): what the tokens before each of them say."""
    row = int(data.rows[index])
    ids = data.ids[data.offsets[row] : data.offsets[row + 1]].long()
    logits = functional_call(network, dict(weights), kwargs={"input_ids": ids[None]}).logits[0]
    return logits[int(data.prompts[row]) - 1 : -1]


def taught_loss(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    data: TextSet | ChoiceSet | SequenceSet,
    indices: Sequence[int],
    loss: WeakToStrong,
    progress: float,
) -> Tensor:
    """The mean loss of the examples at `indices`, or of their answers' tokens, differentiable by `weights`."""
    alpha = loss.alpha * min(1.0, progress / loss.warmup) if loss.warmup else loss.alpha
    logs, weak = [], []
    for index in indices:
        if isinstance(data, SequenceSet):
            start = int(data.labelled[:index].sum())
            for place, row in enumerate(token_scores(network, weights, data, index)):
                logs.append(row.log_softmax(dim=0))
                weak.append(loss.targets[start + place])
            continue
        if isinstance(data, ChoiceSet):
            scores = option_scores(network, weights, data, index)
        else:
            batch = data.batch([index], int(data.lengths[index]))
            batch.pop("labels")
            scores = functional_call(network, dict(weights), kwargs=batch).logits[0]
        logs.append(scores.log_softmax(dim=0))
        weak.append(loss.targets[index][: len(scores)])
    hard = chosen_by(loss.hardening, [row.exp().tolist() for row in logs], [row.tolist() for row in weak])
    losses = []
    for log_p, w, c in zip(logs, weak, hard, strict=True):
        imitation = -(w * log_p).sum()
        if loss.form == "entropy":
            losses.append(imitation - alpha * (log_p.exp() * log_p).sum())
        else:
            losses.append((1 - alpha) * imitation - alpha * log_p[c])
    return torch.stack(losses).mean()
