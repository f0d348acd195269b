"""Windows of running text, and how well a language model predicts them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie.compress.calibration import Advance, batched, main_input
from coterie.errors import DataError
from coterie.maths.keys import Key


def windows_of(tokenizer: Any, texts: Sequence[str], length: int) -> Tensor:
    """All texts one after another, cut into windows (N, length) of token ids; what is left over is dropped.

    The special tokens that the tokeniser puts around a text, if any, stand around each window.
    """
    before, after = _around(tokenizer)
    inner = length - len(before) - len(after)
    if inner < 1:
        raise DataError(f"windows of {length} tokens leave no room for text; take longer ones")
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if len(texts) else []
    ids = torch.tensor([token for text in encoded for token in text], dtype=torch.int64)
    count = len(ids) // inner
    body = ids[: count * inner].reshape(count, inner)
    return torch.cat(
        [
            torch.tensor(before, dtype=torch.int64).expand(count, -1),
            body,
            torch.tensor(after, dtype=torch.int64).expand(count, -1),
        ],
        dim=1,
    )


def calibration_and_held_out(windows: Tensor, samples: int, held_out: int, key: Key) -> tuple[Tensor, Tensor]:
    """`samples` windows drawn by `key` from all but the last, and the last `held_out`: no window is in both.

    Raises:
        DataError: too little text.
    """
    count, length = windows.shape[:2]
    if samples < 1 or held_out < 0:
        raise DataError(f"{samples} samples to calibrate on and {held_out} held out; at least 1 and 0 are needed")
    if count < samples + held_out:
        raise DataError(
            f"the calibration text is too short: it gives {count} windows of {length} tokens, and {samples} to "
            f"calibrate on with {held_out} held out are wanted; give more text, or fewer or shorter samples"
        )
    rest = count - held_out
    chosen = torch.tensor(key.choice(rest, samples))
    return windows[chosen], windows[rest:]


@torch.no_grad()
def perplexity(network: nn.Module, windows: Tensor, advance: Advance | None = None) -> tuple[float, int]:
    """exp of the mean cross-entropy of every token of windows (N, L) but their first, and how many these are.

    Tokens below 0 are of images (`with_images`), and nobody predicts them.
    """
    total, tokens = 0.0, 0
    device = next(network.parameters()).device
    for batch in _told(windows, advance):
        ids = batch.to(device)
        logits = network(input_ids=ids).logits[:, :-1]
        # Row by row, since logits of a large vocabulary in float32 would be the largest tensor of all.
        for given, following in zip(logits, ids[:, 1:], strict=True):
            row, labels = given[following >= 0], following[following >= 0]
            total += float(functional.cross_entropy(row.float(), labels, reduction="sum"))
            tokens += len(labels)
    return math.exp(min(total / max(tokens, 1), 700.0)), tokens


@torch.no_grad()
def last_states(network: nn.Module, windows: Tensor, advance: Advance | None = None) -> Tensor:
    """The last hidden states of an encoder, (N, L, d), on the CPU."""
    device = next(network.parameters()).device
    made = []
    for batch in _told(windows, advance):
        given = {main_input(network): batch.to(device)}
        made.append(network(**given, output_hidden_states=True).hidden_states[-1].float().cpu())
    return torch.cat(made)


def _told(windows: Tensor, advance: Advance | None) -> Iterator[Tensor]:
    """The batches; tells when each is done."""
    batches = batched(windows)
    for index, batch in enumerate(batches):
        yield batch
        if advance is not None:
            advance(index + 1, len(batches))


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]
