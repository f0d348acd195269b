"""Tokenised examples of unequal length, kept flat, and the cache that spares a second tokenisation."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coterie.assets import cache_root
from coterie.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class TextSet:
    """Tokenised, labelled examples: rows of a shared flat store.

    ids: (tokens,) int32, all examples of the store one after another; offsets: (stored + 1,) int64, example
    i is ids[offsets[i]:offsets[i + 1]]; stored_labels: (stored,) int64 in [0, num_classes); rows: (n,)
    int64, the examples that this set holds; segments: (tokens,) uint8 token types of text pairs, or None. A
    selection shares all but `rows`, so ten thousand clients cost ten thousand index vectors.
    """

    ids: Tensor
    offsets: Tensor
    stored_labels: Tensor
    rows: Tensor
    num_classes: int
    pad_id: int = 0
    segments: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each example, (n,) int64."""
        return self.offsets[self.rows + 1] - self.offsets[self.rows]

    @property
    def labels(self) -> Tensor:
        """Class of each example, (n,) int64."""
        return self.stored_labels[self.rows]

    def select(self, indices: ArrayLike | Tensor) -> TextSet:
        """The examples at `indices` (positions in this set, in this order) as a set over the same storage."""
        return replace(self, rows=self.rows[_positions(indices, len(self))])

    def batch(self, indices: ArrayLike | Tensor, pad_to: int) -> dict[str, Tensor]:
        """The examples at `indices` (b,), padded on the right to `pad_to` = L tokens.

        Returns input_ids (b, L) int64, attention_mask (b, L) int64, token_type_ids (b, L) int64 where the
        set has pairs and its tokeniser types them, labels (b,) int64.

        Raises:
            DataError: an index outside the set, or an example longer than `pad_to`.
        """
        return self._padded(self.rows[_positions(indices, len(self))], pad_to)

    def _padded(self, rows: Tensor, pad_to: int) -> dict[str, Tensor]:
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        longest = int(lengths.max()) if len(rows) else 0
        if longest > pad_to:
            raise DataError(f"an example of {longest} tokens does not fit a batch padded to {pad_to}")
        columns = torch.arange(pad_to)
        mask = columns < lengths[:, None]
        # Places beyond an example's end read some other token, which the mask then replaces.
        places = (starts[:, None] + columns).clamp_(max=max(len(self.ids) - 1, 0))
        batch = {
            "input_ids": torch.where(mask, self.ids[places].long(), self.pad_id),
            "attention_mask": mask.long(),
            "labels": self.stored_labels[rows],
        }
        if self.segments is not None:
            batch["token_type_ids"] = self.segments[places].long() * mask
        return batch


def joint_batch(parts: Sequence[tuple[TextSet, ArrayLike | Tensor]], pad_to: int) -> dict[str, Tensor] | None:
    """The batches of several sets over one storage as one, set after set; None where they lie in several.

    The same as batching each set and joining, in one pass instead of many.
    """
    first = parts[0][0]
    if any(part.ids is not first.ids for part, _ in parts):
        return None
    rows = [part.rows[_positions(indices, len(part))] for part, indices in parts]
    return first._padded(torch.cat(rows), pad_to)


def tokenise(
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    labels: ArrayLike,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    num_classes: int | None = None,
    cached: bool = True,
) -> TextSet:
    """Tokenise texts (or pairs of texts), cut to `max_length` tokens, the longer text of a pair first.

    A text whose second text is empty is tokenised alone, so that tasks on pairs and on single texts can be one set.
    labels: (n,) integers; `num_classes` defaults to the largest label + 1. Token ids come from the per-user
    cache when these texts were tokenised before by the same tokeniser and length; a cache that is damaged or
    cannot be written costs time only. cached=False neither looks there nor leaves anything there.

    Raises:
        DataError: texts, pairs and labels of unequal number, a label outside the classes, an example of no
            tokens.
    """
    classes = np.asarray(labels, dtype=np.int64).reshape(-1)
    if len(texts) != len(classes) or (pairs is not None and len(pairs) != len(texts)):
        second = "" if pairs is None else f", {len(pairs)} second texts"
        raise DataError(f"{len(texts)} texts{second} and {len(classes)} labels: there must be equally many")
    count = num_classes if num_classes is not None else int(classes.max(initial=-1)) + 1
    if len(classes) and not 0 <= classes.min() <= classes.max() < count:
        raise DataError(f"labels run from {classes.min()} to {classes.max()}; they must lie in 0 … {count - 1}")
    tokens = (_cached if cached else _encode)(texts, pairs, tokenizer, max_length)
    pad = tokenizer.pad_token_id
    return TextSet(
        ids=tokens["ids"],
        offsets=tokens["offsets"],
        stored_labels=torch.from_numpy(classes.copy()),
        rows=torch.arange(len(texts)),
        num_classes=count,
        pad_id=pad if isinstance(pad, int) else 0,
        segments=tokens.get("segments"),
    )


def _cached(
    texts: Sequence[str], pairs: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Tensor]:
    """`_encode`, out of the cache where it holds these texts, and into it where not."""
    place = cache_root() / "tokens" / f"{_digest(texts, pairs, tokenizer, max_length)}.safetensors"
    tokens = _read(place, len(texts))
    if tokens is None:
        tokens = _encode(texts, pairs, tokenizer, max_length)
        with suppress(OSError, SafetensorError):
            _write(place, tokens)
    return tokens


def _positions(indices: ArrayLike | Tensor, count: int) -> Tensor:
    places = torch.as_tensor(np.asarray(indices), dtype=torch.int64).reshape(-1)
    if len(places) and (int(places.min()) < 0 or int(places.max()) >= count):
        raise DataError(f"indices run from {int(places.min())} to {int(places.max())} in a set of {count} examples")
    return places


def _encode(
    texts: Sequence[str], pairs: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Tensor]:
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    lengths: list[int] = []
    for start in range(0, len(texts), _CHUNK):
        part = slice(start, start + _CHUNK)
        # An empty second text would still get its separator, which a model of single texts has never seen.
        batch = list(texts[part]) if pairs is None else list(map(_coupled, texts[part], pairs[part]))
        found: Any = tokenizer(
            batch, truncation=True, max_length=max_length, padding=False, return_attention_mask=False
        )
        lengths += map(len, found["input_ids"])
        ids += [np.asarray(row, dtype=np.int32) for row in found["input_ids"]]
        if pairs is not None and "token_type_ids" in found:
            segments += [np.asarray(row, dtype=np.uint8) for row in found["token_type_ids"]]
    if 0 in lengths:
        raise DataError(f"example {lengths.index(0)} has no tokens; drop empty texts")
    tokens = {
        "ids": _flat(ids, np.int32),
        "offsets": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
    }
    return {**tokens, "segments": _flat(segments, np.uint8)} if segments else tokens


def _coupled(text: str, second: str) -> str | tuple[str, str]:
    return (text, second) if second else text


def _flat(rows: list[np.ndarray], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(rows) if rows else np.empty(0, dtype))


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which ids a tokeniser gives: 32 hexadecimal digits.

    A fast tokeniser is its serialised JSON, less the truncation and padding that the latest call happened to
    leave in it; any other is the files that it saves.
    """
    hashed = hashlib.blake2b(digest_size=16)
    kind = [type(tokenizer).__name__, tokenizer.truncation_side, *tokenizer.model_input_names]
    _feed(hashed, kind)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        plain = tokenizers.Tokenizer.from_str(backend.to_str())
        plain.no_truncation()
        plain.no_padding()
        _feed(hashed, [plain.to_str()])
        return hashed.hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                _feed(hashed, [path.name])
                hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _digest(
    texts: Sequence[str], pairs: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> str:
    """The name of a cache entry. Library versions are in it, since normalisation may change with them."""
    hashed = hashlib.blake2b(digest_size=16)
    versions = [tokenizers.__version__, version("transformers")]
    pairing = "some" if pairs is not None and "" in pairs else str(pairs is not None)
    _feed(hashed, [*versions, tokenizer_identity(tokenizer), str(max_length), pairing])
    _feed(hashed, texts)
    _feed(hashed, pairs or ())
    return hashed.hexdigest()


def _feed(hashed: hashlib.blake2b, strings: Iterable[str]) -> None:
    """Hash strings with their lengths, so that moving text from one to the next is another hash."""
    for string in strings:
        raw = string.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "big"))
        hashed.update(raw)


def _checksum(tokens: dict[str, Tensor]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for name in sorted(tokens):
        _feed(hashed, [name, str(tokens[name].dtype)])
        hashed.update(tokens[name].numpy().tobytes())
    return hashed.hexdigest()


def _read(place: Path, count: int) -> dict[str, Tensor] | None:
    """The cached tokens of `count` examples; None when there are none or they cannot be trusted."""
    try:
        with safe_open(place, framework="pt") as file:
            tokens = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            checksum = (file.metadata() or {}).get("checksum")
    except (OSError, SafetensorError):
        return None
    whole = {"ids", "offsets"} <= set(tokens) and len(tokens["offsets"]) == count + 1
    return tokens if whole and checksum == _checksum(tokens) else None


def _write(place: Path, tokens: dict[str, Tensor]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=place.parent)
    os.close(descriptor)
    try:
        save_file(tokens, name, metadata={"checksum": _checksum(tokens)})
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)
