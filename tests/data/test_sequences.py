"""Sequences: joined, cut and labelled as they should be, whatever special tokens and sides a tokeniser has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.tokenisers import WORDS, tokenizer

from coterie.data.sequences import IGNORED, ChoiceSet, SequenceSet, tokenise_choices, tokenise_sequences
from coterie.errors import DataError

PLAIN = tokenizer(eos_token="<end>")
BEGINS = tokenizer(adds_begin=True, bos_token="<begin>", eos_token="<end>")
BARE = tokenizer()
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)


def parts(data: SequenceSet, row: int) -> tuple[list[int], list[int]]:
    """The ids of prompt and answer."""
    ids = data.ids[data.offsets[row] : data.offsets[row + 1]].tolist()
    return ids[: int(data.prompts[row])], ids[int(data.prompts[row]) :]


def plain(text: str, by=PLAIN) -> list[int]:
    return list(by(text, add_special_tokens=False)["input_ids"])


def test_prompt_and_answer_are_joined_with_the_end_token_after_the_answer() -> None:
    data = tokenise_sequences(["the film is", "why"], [" good", " yes no"], PLAIN, 32)
    assert parts(data, 0) == (plain("the film is"), [*plain(" good"), PLAIN.eos_token_id])
    assert parts(data, 1) == (plain("why"), [*plain(" yes no"), PLAIN.eos_token_id])
    assert data.lengths.tolist() == [len(a) + len(b) for a, b in (parts(data, 0), parts(data, 1))]
    assert data.labelled.tolist() == [2, 3]


def test_a_begin_token_comes_first_where_the_tokeniser_sets_one() -> None:
    data = tokenise_sequences(["the film"], [" good"], BEGINS, 32)
    assert parts(data, 0)[0] == [BEGINS.bos_token_id, *plain("the film", BEGINS)]
    named_only = tokenizer(bos_token="<begin>", eos_token="<end>")
    assert parts(tokenise_sequences(["the film"], [" good"], named_only, 32), 0)[0] == plain("the film", named_only)


@given(prompt=texts, answer=texts, room=st.integers(1, 12))
def test_a_prompt_is_cut_on_the_left_and_an_answer_never(prompt: str, answer: str, room: int) -> None:
    for by in (PLAIN, BEGINS):
        own = [*plain(answer, by), by.eos_token_id]
        head, tail = parts(tokenise_sequences([prompt], [answer], by, len(own) + room), 0)
        assert tail == own and 1 <= len(head) <= room
        whole = plain(prompt, by)
        begin = [by.bos_token_id] if by is BEGINS else []
        if len(begin) + len(whole) <= room:
            assert head == [*begin, *whole]
        elif room > len(begin):
            assert head == [*begin, *whole[len(whole) - room + len(begin) :]]
        else:
            assert head == whole[-1:]


@given(prompt=texts, answer=texts, room=st.integers(2, 12))
def test_an_answer_that_may_be_cut_leaves_the_prompt_half_the_room(prompt: str, answer: str, room: int) -> None:
    asked, said = plain(prompt), [*plain(answer), PLAIN.eos_token_id]
    head, tail = parts(tokenise_sequences([prompt], [answer], PLAIN, room, cut=True), 0)
    whole = asked or [PLAIN.eos_token_id]
    assert tail == said[: room - min(len(whole), room // 2)] and head == whole[-len(head) :]
    assert len(head) == min(len(whole), room - len(tail)) and len(head) >= min(len(whole), room // 2)


def test_an_empty_prompt_is_the_begin_token_or_else_the_end_token() -> None:
    assert parts(tokenise_sequences([""], ["good"], BEGINS, 8), 0)[0] == [BEGINS.bos_token_id]
    assert parts(tokenise_sequences([""], ["good"], PLAIN, 8), 0)[0] == [PLAIN.eos_token_id]


@pytest.mark.parametrize(
    ("prompts", "answers", "by", "message"),
    [
        (["a"], [], PLAIN, "1 prompts and 0 answers"),
        (["a", "the"], [" no", " very very very very"], PLAIN, "example 1: its answer of 5 tokens.*max_length 5"),
        (["a", ""], ["no", "no"], BARE, "example 1 has no prompt"),
        (["a", "a"], ["no", ""], BARE, "example 1 has no answer"),
    ],
)
def test_what_cannot_be_a_sequence_is_refused_in_one_line(prompts, answers, by, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        tokenise_sequences(prompts, answers, by, 5)
    assert "\n" not in str(caught.value)


@given(pairs=st.lists(st.tuples(texts, texts), min_size=1, max_size=6), more=st.integers(0, 5))
def test_labels_are_the_answers_and_nothing_else(pairs: list[tuple[str, str]], more: int) -> None:
    data = tokenise_sequences([p for p, _ in pairs], [f" {a}" for _, a in pairs], PLAIN, 64)
    batch = data.batch(range(len(pairs)), int(data.lengths.max()) + more)
    for row in range(len(pairs)):
        prompt, answer = parts(data, row)
        length, labels = len(prompt) + len(answer), batch["labels"][row].tolist()
        assert batch["input_ids"][row, :length].tolist() == prompt + answer
        assert labels == [IGNORED] * len(prompt) + answer + [IGNORED] * (len(labels) - length)
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (len(labels) - length)


def test_neither_the_tokeniser_s_padding_side_nor_its_lack_of_a_padding_token_changes_a_batch() -> None:
    kinds = [
        tokenizer(eos_token="<end>", padding_side=side, **pad)
        for side in ("right", "left")
        for pad in ({}, {"pad_token": "<end>"})
    ]
    made = [tokenise_sequences(["the film is", "why"], [" good", " no no no"], kind, 32) for kind in kinds]
    batches = [data.batch([0, 1], 9) for data in made]
    assert kinds[0].pad_token is None
    for batch in batches[1:]:
        for name, value in batch.items():
            kept = value if name != "input_ids" else value * batch["attention_mask"]
            first = batches[0][name] if name != "input_ids" else batches[0][name] * batches[0]["attention_mask"]
            assert torch.equal(kept, first)


def test_a_selection_shares_its_storage_and_checks_its_indices() -> None:
    data = tokenise_sequences(["a", "the", "why"], [" no", " yes yes", " good"], PLAIN, 16)
    chosen = data.select([2, 0]).select([1])
    assert chosen.ids is data.ids and chosen.labelled.tolist() == [2]
    assert torch.equal(chosen.batch([0], 4)["input_ids"], data.batch([0], 4)["input_ids"])
    with pytest.raises(DataError, match="indices run"):
        data.select([3])
    with pytest.raises(DataError, match="does not fit a batch padded to 2"):
        data.batch([1], 2)


def test_a_sequence_needs_a_prompt() -> None:
    with pytest.raises(DataError, match="sequence 1 has no prompt"):
        SequenceSet(torch.arange(5), torch.tensor([0, 2, 5]), torch.tensor([1, 0]), torch.arange(2))


def options() -> ChoiceSet:
    return tokenise_choices(["why", "the film is"], [[" no", " yes yes", " a"], [" good", " bad"]], [1, 0], PLAIN, 16)


def test_each_option_is_a_sequence_of_its_question_s_prompt_without_an_end_token() -> None:
    data = options()
    flat = data.sequences()
    assert (len(data), len(flat), data.counts.tolist(), data.labels.tolist()) == (2, 5, [3, 2], [1, 0])
    assert [parts(flat, i) for i in range(5)] == [
        (plain("why"), plain(" no")),
        (plain("why"), plain(" yes yes")),
        (plain("why"), plain(" a")),
        (plain("the film is"), plain(" good")),
        (plain("the film is"), plain(" bad")),
    ]
    assert data.lengths.tolist() == [3, 4]


def test_all_options_follow_what_the_longest_of_their_question_leaves_of_the_prompt() -> None:
    data = tokenise_choices(["the film is bad why", "why"], [[" no", " yes yes"], [" no", " a"]], [0, 1], PLAIN, 5)
    flat = data.sequences()
    kept = plain("the film is bad why")[-(5 - len(plain(" yes yes"))) :]
    assert 0 < len(kept) < len(plain("the film is bad why")) - len(plain(" no"))
    assert [parts(flat, i) for i in range(4)] == [
        (kept, plain(" no")),
        (kept, plain(" yes yes")),
        (plain("why"), plain(" no")),
        (plain("why"), plain(" a")),
    ]
    with pytest.raises(DataError, match="example 0: its answer of 2 tokens leaves no room"):
        tokenise_choices(["why"], [[" no", " yes yes"]], [0], PLAIN, 2)


def test_a_selection_of_questions_keeps_their_options_together() -> None:
    chosen = options().select([1, 0, 1])
    assert chosen.counts.tolist() == [2, 3, 2] and chosen.labels.tolist() == [0, 1, 0]
    assert chosen.sequences().rows.tolist() == [3, 4, 0, 1, 2, 3, 4]
    assert chosen.answers().rows.tolist() == [3, 1, 3]
    assert len(options().select([]).sequences()) == 0


@pytest.mark.parametrize(
    ("choices", "labels", "message"),
    [
        ([[" no", " yes"]], [2], "example 0 has the label 2, but only options 0 … 1"),
        ([[" no"]], [0], "example 0 has 1 option"),
        ([[" no", " yes"]], [0, 1], "1 prompts, 1 lists of options and 2 labels"),
        ([[" no", ""]], [0], "example 0 has no answer"),
    ],
)
def test_what_is_no_choice_is_refused_in_one_line(choices, labels, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenise_choices(["why"], choices, labels, PLAIN, 16)
