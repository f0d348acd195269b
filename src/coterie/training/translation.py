"""What one language model predicts, written in another's tokens, so that the other can learn from it (FedMKT)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.data.sequences import Classified, DataSet, SequenceSet
from coterie.data.vocabulary import token_strings
from coterie.errors import DataError, ModelError
from coterie.maths.alignment import Vocabulary, counterparts
from coterie.models.loading import Base
from coterie.protocol import TopLogits


class Translator:
    """From the tokens of one vocabulary to those of another; tokens that have been looked up are remembered."""

    def __init__(self, source: Sequence[str], target: Sequence[str]) -> None:
        self.source, self.target = tuple(source), Vocabulary(target)
        self.same = self.source == self.target.tokens
        self._known: dict[int, int] = {}

    def id_of(self, token: int) -> int:
        """The target's nearest token to a source's token, both as ids."""
        if token not in self._known:
            self._known[token] = self.target.nearest(self.source[token])
        return self._known[token]

    def ids_of(self, tokens: Tensor) -> Tensor:
        """The same of ids of any shape, int64."""
        found, place = torch.unique(tokens, return_inverse=True)
        return torch.tensor([self.id_of(token) for token in found.tolist()], dtype=torch.int64)[place]

    def rows(self, source: list[int], target: list[int]) -> list[int]:
        """For each token of one answer the source's token whose prediction it can learn from, else -1.

        That is its counterpart under `counterparts`, where the vocabularies take the two for one token.
        """
        words = [self.source[i] for i in source], [self.target.tokens[i] for i in target]
        found = counterparts(*words)
        return [i if i >= 0 and self.id_of(source[i]) == target[j] else -1 for j, i in enumerate(found)]


def strings_of(base: Base, spec: str) -> list[str]:
    """The tokens of a language model as strings, one for each of its logits.

    Raises:
        ModelError: a base without a tokeniser.
    """
    if base.tokenizer is None or base.slots.output is None:
        raise ModelError(f"the base model {spec!r} has no tokeniser, by which its tokens could be compared")
    return token_strings(base.tokenizer, int(base.slots.output.weight.shape[0]))


def translated(said: TopLogits, source: DataSet, target: DataSet, by: Translator | None, who: str) -> TopLogits:
    """What `said` of `source` says of `target`, the same examples in other tokens; losses stay.

    A token without a counterpart is sure to be what it is: there is nothing to learn there beyond the label. Logits of
    tokens that become one are put together by the sum of their exponentials, the others of a row are -inf.

    Raises:
        DataError: sets of unequal numbers of examples, or sequences on one side only.
        ModelError: rows or ids that do not fit the source.
    """
    if len(source) != len(target) or len(said.losses) != len(source):
        raise DataError(
            f"{who}: {len(said.losses)} losses of {len(source)} examples for {len(target)} of one's own; all parties "
            "must hold the same pool, in one order"
        )
    if isinstance(source, Classified) and isinstance(target, Classified):
        _check_rows(said, len(source), source.num_classes, who)
        return said
    if by is None or not isinstance(source, SequenceSet) or not isinstance(target, SequenceSet):
        raise DataError(f"{who}: only answers are translated into answers, and classes into classes")
    _check_rows(said, int(source.labelled.sum()), len(by.source), who)
    if by.same:
        return said
    theirs, mine = _answers(source), _answers(target)
    starts = [0, *torch.tensor([len(one) for one in theirs]).cumsum(0).tolist()]
    places = [
        start + i if i >= 0 else -1
        for start, pair in zip(starts, zip(theirs, mine, strict=True), strict=False)
        for i in by.rows(*pair)
    ]
    rows, gold = torch.tensor(places), torch.tensor([token for answer in mine for token in answer])
    there = rows >= 0
    ids, logits = _joined(by.ids_of(said.ids.long()), said.logits)
    made_ids, made = ids[rows.clamp(min=0)], logits[rows.clamp(min=0)]
    sure = torch.full_like(made, -torch.inf)
    sure[:, 0] = 0.0
    made = torch.where(there[:, None], made, sure)
    return TopLogits(made, torch.where(there[:, None], made_ids, gold[:, None]).to(torch.int32), said.losses)


def _joined(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (n, K) of ids, of which equal ones become one with the logarithm of their exponentials' sum; falling."""
    order = ids.sort(dim=1, stable=True)
    ordered = logits.double().gather(1, order.indices)
    fresh = torch.ones_like(order.values)
    fresh[:, 1:] = (order.values[:, 1:] != order.values[:, :-1]).long()
    group = fresh.cumsum(dim=1) - 1
    top = ordered.amax(dim=1, keepdim=True)
    summed = torch.zeros_like(ordered).scatter_add_(1, group, (ordered - top).exp())
    kept = torch.zeros_like(ids).scatter_(1, group, order.values)
    falling = (summed.log() + top).sort(dim=1, descending=True, stable=True)
    return kept.gather(1, falling.indices), falling.values.float()


def _check_rows(said: TopLogits, rows: int, size: int, who: str) -> None:
    if len(said.logits) != rows:
        raise ModelError(f"{who}: {len(said.logits)} rows of logits for {rows} labels; predict the pool as it is")
    if rows and int(said.ids.max()) >= size:
        raise ModelError(f"{who}: an id of {int(said.ids.max())} where there are {size} tokens or classes")


def _answers(data: SequenceSet) -> list[list[int]]:
    """The tokens of each answer."""
    starts, ends = data.offsets[data.rows] + data.prompts[data.rows], data.offsets[data.rows + 1]
    return [data.ids[a:b].tolist() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
