"""What a model says of a data set, short enough to travel: each label's largest logits, each example's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.errors import ModelError
from coterie.protocol.messages import message

if TYPE_CHECKING:
    from coterie.protocol.requests import Predictions

ROW_BYTES, EXAMPLE_BYTES = 8, 4
"""Bytes of a logit with its id, and of an example's loss."""


@message
class TopLogits:
    """logits (n, K) float32, of each label the K largest, falling; ids (n, K) int32, the classes or tokens they are of.

    Of E sequences, n counts the answers' tokens, sequence after sequence. losses (E,) float32: the mean cross-entropy
    of each example's labels under the whole distribution.
    """

    logits: Tensor
    ids: Tensor
    losses: Tensor

    @classmethod
    def of(cls, seen: Predictions) -> TopLogits:
        """Of an answer to `Predict(..., top_k=K)` on examples that all have labels."""
        assert seen.ids is not None and seen.losses is not None and seen.examples is not None
        count = int(seen.examples[-1]) + 1
        sums = torch.zeros(count, dtype=torch.float64).index_put((seen.examples,), seen.losses.double(), True)
        losses = sums / torch.bincount(seen.examples, minlength=count)
        return cls(seen.logits.float(), seen.ids.to(torch.int32), losses.float())

    def check(self, where: str, most: int, pool: tuple[int, int] | None = None) -> None:
        """Raises ModelError unless the parts belong together, with at most so many logits a row.

        pool: how many examples and labels they must be of; None: any.
        """
        shapes = tuple(self.logits.shape), tuple(self.ids.shape), tuple(self.losses.shape)
        fits = self.logits.dim() == 2 and shapes[0] == shapes[1] and self.losses.dim() == 1
        if not fits or not 1 <= self.logits.shape[1] <= most or len(self.losses) > len(self.logits):
            told = f"logits {shapes[0]}, ids {shapes[1]} and losses {shapes[2]}"
            raise ModelError(f"{where}: {told} do not belong together; at most {most} logits a row")
        if int(self.ids.min()) < 0 or bool((self.logits[:, 1:] > self.logits[:, :-1]).any()):
            raise ModelError(f"{where}: logits must fall in each row, and ids cannot be negative")
        if pool is not None and (len(self.losses), len(self.logits)) != pool:
            raise ModelError(
                f"{where}: {len(self.logits)} rows and {len(self.losses)} losses, where its pool has {pool[1]} labels "
                f"of {pool[0]} examples"
            )
