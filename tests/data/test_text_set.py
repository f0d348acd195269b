"""Token sets: what a batch holds, cheap selections, and a cache that is never believed when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coterie.data import text as module
from coterie.data.text import TextSet, joint_batch, tokenise, tokenizer_identity
from coterie.errors import DataError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "dog"]


def make_tokenizer(pad: str | None = "[PAD]", special: bool = True, words: list[str] = WORDS) -> Any:
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        raw.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=pad, unk_token="[UNK]", model_input_names=names)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    return tmp_path / "tokens"


TEXTS = ["the cat sat", "dog", "the cat sat on the mat"]


def test_a_batch_is_padded_on_the_right_and_masked() -> None:
    held = tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(), 16)
    assert len(held) == 3 and held.num_classes == 2
    assert held.lengths.tolist() == [5, 3, 8] and held.labels.tolist() == [0, 1, 1]
    batch = held.batch([1, 0], 6)
    assert batch["input_ids"].tolist() == [[2, 9, 3, 0, 0, 0], [2, 4, 5, 6, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [1, 0]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_pairs_bring_token_types() -> None:
    held = tokenise(["the cat", "dog"], ["sat", "on mat"], [0, 1], make_tokenizer(), 16)
    batch = held.batch([0, 1], 7)
    assert batch["input_ids"][0].tolist() == [2, 4, 5, 3, 6, 3, 0]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 0]]


def test_beside_pairs_a_text_without_a_second_one_is_as_it_is_alone() -> None:
    mixed = tokenise(["the cat", "dog"], ["sat", ""], [0, 1], make_tokenizer(), 16)
    alone = tokenise(["dog"], None, [1], make_tokenizer(), 16)
    pair = tokenise(["the cat"], ["sat"], [0], make_tokenizer(), 16)
    assert mixed.lengths.tolist() == [*pair.lengths, *alone.lengths]
    assert torch.equal(mixed.ids, torch.cat([pair.ids, alone.ids]))
    assert mixed.batch([1], 5)["token_type_ids"].sum() == 0 and mixed.batch([0], 7)["token_type_ids"].sum() > 0


def test_long_texts_are_cut_and_a_missing_pad_token_is_zero() -> None:
    held = tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(pad=None, special=False), 4)
    assert held.lengths.tolist() == [3, 1, 4] and held.pad_id == 0
    assert held.batch([1], 3)["input_ids"].tolist() == [[9, 0, 0]]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=12))
def test_a_batch_equals_padding_row_by_row(data: st.DataObject, examples: list[list[int]]) -> None:
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in examples])])
    labels = torch.arange(len(examples))
    flat = torch.tensor([token for row in examples for token in row], dtype=torch.int32)
    held = TextSet(flat, offsets, labels, torch.arange(len(examples)), len(examples), pad_id=7)
    chosen = data.draw(st.lists(st.integers(0, len(examples) - 1), min_size=1, max_size=9))
    again = data.draw(st.lists(st.integers(0, len(chosen) - 1), min_size=1, max_size=9))
    view = held.select(chosen)
    wanted = [examples[chosen[i]] for i in again]
    width = max(map(len, wanted)) + data.draw(st.integers(0, 3))
    batch = view.batch(again, width)
    assert batch["input_ids"].tolist() == [row + [7] * (width - len(row)) for row in wanted]
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(row) for row in wanted]
    assert batch["labels"].tolist() == [chosen[i] for i in again]
    assert view.lengths.tolist() == [len(examples[i]) for i in chosen]


def test_selections_share_the_tokens() -> None:
    held = tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(), 16)
    views = [held.select([i % 3]).select(np.array([0])) for i in range(10_000)]
    assert all(view.ids is held.ids and view.stored_labels is held.stored_labels for view in views)
    assert views[2].batch([0], 8)["input_ids"].tolist() == held.batch([2], 8)["input_ids"].tolist()


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    held = tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(), 16)
    with pytest.raises(DataError, match="8 tokens does not fit a batch padded to 7"):
        held.batch([0, 2], 7)
    for outside in ([3], [-1]):
        with pytest.raises(DataError, match="in a set of 3 examples"):
            held.select(outside)
    with pytest.raises(DataError, match="3 texts and 2 labels"):
        tokenise(TEXTS, None, [0, 1], make_tokenizer(), 16)
    with pytest.raises(DataError, match="3 texts, 1 second texts and 3 labels"):
        tokenise(TEXTS, ["one"], [0, 1, 1], make_tokenizer(), 16)
    with pytest.raises(DataError, match="labels run from 0 to 2; they must lie in 0 … 1"):
        tokenise(TEXTS, None, [0, 1, 2], make_tokenizer(), 16, num_classes=2)
    with pytest.raises(DataError, match="example 1 has no tokens"):
        tokenise(["cat", " "], None, [0, 1], make_tokenizer(special=False), 16)


def test_no_texts_are_an_empty_set() -> None:
    held = tokenise([], None, [], make_tokenizer(), 16, num_classes=3)
    assert len(held) == 0 and held.num_classes == 3
    assert held.batch([], 4)["input_ids"].shape == (0, 4)


def never(*_: object) -> dict[str, torch.Tensor]:
    raise AssertionError("tokenised again")


def test_the_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    first = tokenise(TEXTS, TEXTS, [0, 1, 1], tokenizer, 16)
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]
    monkeypatch.setattr(module, "_encode", never)
    # Other labels and the settings that a call leaves in the tokeniser are no reason to tokenise again.
    tokenizer(["cat"], padding="max_length", max_length=3, truncation=True)
    again = tokenise(TEXTS, TEXTS, [1, 0, 2], tokenizer, 16)
    for name in ("ids", "offsets", "segments"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert again.labels.tolist() == [1, 0, 2]


@pytest.mark.parametrize("change", ["texts", "border", "length", "tokenizer", "pairs"])
def test_anything_that_changes_tokens_is_another_cache_entry(cache: Path, change: str) -> None:
    tokenise(["the cat", "sat"], None, [0, 1], make_tokenizer(), 16)
    texts = {"texts": ["the cat", "on"], "border": ["the ca", "tsat"]}.get(change, ["the cat", "sat"])
    words = [*WORDS[:-2], "dog", "mat"] if change == "tokenizer" else WORDS
    pairs = ["", ""] if change == "pairs" else None
    tokenise(texts, pairs, [0, 1], make_tokenizer(words=words), 8 if change == "length" else 16)
    assert len(list(cache.iterdir())) == 2


def damage(kind: str, path: Path) -> None:
    raw = path.read_bytes()
    if kind == "flipped bit":
        path.write_bytes(raw[:-6] + bytes([raw[-6] ^ 1]) + raw[-5:])
    else:
        path.write_bytes({"cut": raw[:-9], "empty": b"", "noise": b"\xff" * 200}[kind])


@pytest.mark.parametrize("kind", ["flipped bit", "cut", "empty", "noise"])
def test_a_damaged_cache_is_rebuilt_silently(cache: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    good = tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(), 16)
    (entry,) = cache.iterdir()
    before = entry.read_bytes()
    damage(kind, entry)
    again = tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(), 16)
    assert torch.equal(again.ids, good.ids) and torch.equal(again.offsets, good.offsets)
    assert entry.read_bytes() == before and len(list(cache.iterdir())) == 1
    assert capfd.readouterr() == ("", "")


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "file"))
    assert len(tokenise(TEXTS, None, [0, 1, 1], make_tokenizer(), 16)) == 3


def test_a_tokenizers_identity_is_what_decides_its_ids() -> None:
    one, same = make_tokenizer(), make_tokenizer()
    same(["cat"], padding="max_length", max_length=3, truncation=True)
    assert tokenizer_identity(one) == tokenizer_identity(same)
    assert tokenizer_identity(one) != tokenizer_identity(make_tokenizer(special=False))


def test_a_joint_batch_of_sets_over_one_storage_is_their_batches_joined() -> None:
    whole = TextSet(
        torch.arange(30, dtype=torch.int32),
        torch.tensor([0, 4, 9, 12, 20, 24, 30]),
        torch.tensor([0, 1, 0, 1, 1, 0]),
        torch.arange(6),
        2,
    )
    parts = [(whole.select([0, 2, 4]), [2, 0]), (whole.select([1, 3, 5]), [1, 1])]
    joint = joint_batch(parts, 8)
    assert joint is not None
    for name, value in joint.items():
        assert torch.equal(value, torch.cat([part.batch(indices, 8)[name] for part, indices in parts]))


def test_sets_over_several_storages_have_no_joint_batch() -> None:
    one, other = (
        TextSet(torch.arange(4, dtype=torch.int32), torch.tensor([0, 4]), torch.tensor([0]), torch.arange(1), 2)
        for _ in range(2)
    )
    assert joint_batch([(one, [0]), (other, [0])], 8) is None
