"""Which positions of a batch of texts are computed: those that hold a token, one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.maths.rows import Rows


@dataclass(frozen=True)
class Places:
    """Of a batch of S clients, `texts` rows of `length` positions in all, those that a pass computes.

    rows: of the batch seen as one row, of each client the same number n: its tokens in order, then some of its padding;
    None for all positions. first: where the texts' first tokens lie among those, with which alone the last block goes
    on; None where it goes on with all positions. padded: whether there is padding at all.
    """

    clients: int
    texts: int
    length: int
    rows: Rows | None
    first: Rows | None
    padded: bool = True

    def packed(self, states: Tensor) -> Tensor:
        """(texts, length, d) -> (S, n, d); states that are packed, or need not be, come back."""
        if self.rows is None or states.shape[:2] != (self.texts, self.length):
            return states
        return self.rows.picked(states.flatten(0, 1)).view(self.clients, -1, states.shape[-1])

    def spread(self, states: Tensor) -> Tensor:
        """(S, n, d) -> (texts, length, d), zeros where nothing was computed."""
        if self.rows is None:
            return states
        return self.rows.placed(states.flatten(0, 1)).view(self.texts, self.length, -1)

    def ending(self, states: Tensor) -> Tensor:
        """(S, n, d) -> (texts, 1, d), the texts' first tokens, where the last block goes on with no others."""
        return states if self.first is None else self.first.picked(states.flatten(0, 1)).unsqueeze(1)


def computed(tokens: int, texts: int, length: int) -> int:
    """How many positions n are computed of one client's texts, which hold so many tokens.

    A multiple of a sixteenth or so, lest hardly two clients' batches have one shape; all where an eighth or less would
    be spared, which moving states costs.
    """
    whole = texts * length
    step = 16 * -(-whole // 256)
    rounded = step * -(-tokens // step)
    return rounded if 8 * rounded < 7 * whole else whole


def places_of(mask: Tensor, clients: int) -> Places:
    """Those of a batch whose mask (S * b, L) is 1 at tokens: as many of each client as one of them needs at most.

    All, where some text does not begin with a token.
    """
    texts, length = mask.shape
    held = mask.bool().view(clients, -1)
    whole = held.shape[1]
    tokens = held.sum(dim=1)
    # Told together, since a GPU that is asked is waited for.
    most, fewest, begun = torch.stack([tokens.max(), tokens.min(), mask[:, 0].bool().sum()]).tolist()
    n = computed(most, texts // clients, length)
    start = torch.arange(clients, device=mask.device).unsqueeze(1)
    rows, first = None, torch.arange(texts, device=mask.device) * length
    if n < whole and begun == texts:
        index = held.byte().argsort(dim=1, descending=True, stable=True)[:, :n] + start * whole
        ends_at = mask.bool().sum(dim=1).view(clients, -1).cumsum(dim=1)
        first = (torch.cat([torch.zeros_like(start), ends_at[:, :-1]], dim=1) + start * n).flatten()
        rows = Rows.of(index.flatten(), clients * whole)
    taken = Rows.of(first, clients * (whole if rows is None else n))
    return Places(clients, texts, length, rows, taken, padded=fewest < whole)
