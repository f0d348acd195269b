"""Questions in rows: every option's tokens, positions and what they see are those of its own sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data.branches import branched
from coterie.data.sequences import IGNORED, ChoiceSet, SequenceSet


def questions(made: list[list[tuple[list[int], list[int]]]]) -> ChoiceSet:
    """Of each question the options, each as its prompt and its own tokens."""
    pairs = [pair for question in made for pair in question]
    counts = [len(question) for question in made]
    ids = torch.tensor([token for prompt, option in pairs for token in (*prompt, *option)], dtype=torch.int32)
    offsets = torch.tensor([0, *[len(prompt) + len(option) for prompt, option in pairs]]).cumsum(0)
    prompts = torch.tensor([len(prompt) for prompt, _ in pairs])
    options = SequenceSet(ids, offsets, prompts, torch.arange(len(pairs)), pad_id=99)
    return ChoiceSet(
        options,
        torch.tensor([0, *counts]).cumsum(0),
        torch.zeros(len(made), dtype=torch.int64),
        torch.arange(len(made)),
    )


def paths(batch: dict[str, torch.Tensor], row: int) -> list[list[tuple[list[int], int]]]:
    """Of each labelled token the ids that precede it, by position, and its own, option after option."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for place in batch["labels"][row].ne(IGNORED).nonzero().squeeze(1).tolist():
        before = int(batch["before"][row, place])
        seen = batch["attention_mask"][row, 0, before].nonzero().squeeze(1)
        told = sorted(
            zip(batch["position_ids"][row, seen].tolist(), batch["input_ids"][row, seen].tolist(), strict=True)
        )
        assert [position for position, _ in told] == list(range(len(told)))
        found.setdefault(int(batch["branches"][row, place]), []).append(
            ([token for _, token in told], int(batch["labels"][row, place]))
        )
    return [found[branch] for branch in sorted(found)]


TOKENS = st.lists(st.integers(1, 9), min_size=1, max_size=4)
QUESTION = st.one_of(
    st.tuples(TOKENS, st.lists(TOKENS, min_size=2, max_size=4)).map(lambda q: [(q[0], option) for option in q[1]]),
    st.lists(st.tuples(TOKENS, TOKENS), min_size=2, max_size=4),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(QUESTION, min_size=1, max_size=4), st.integers(0, 5))
def test_each_token_of_an_option_is_predicted_from_what_precedes_it_in_its_own_sequence(made, more: int) -> None:
    rows = branched(questions(made))
    batch = rows.batch(range(len(made)), int(rows.lengths.max()) + more)
    for row, question in enumerate(made):
        expected = [[((*prompt, *option[:i]), token) for i, token in enumerate(option)] for prompt, option in question]
        assert [[(tuple(seen), token) for seen, token in path] for path in paths(batch, row)] == expected


def test_a_prompt_stands_once_where_all_options_follow_it_and_again_where_one_has_another() -> None:
    rows = branched(questions([[([1, 2, 3], [4]), ([1, 2, 3], [5, 6])], [([1, 2], [4]), ([2], [5, 6]), ([2], [7])]]))
    assert rows.lengths.tolist() == [3 + 1 + 2, 2 + 1 + 1 + 2 + 1]
    batch = rows.batch([1, 0], 8)
    assert batch["input_ids"].tolist() == [[1, 2, 4, 2, 5, 6, 7, 99], [1, 2, 3, 4, 5, 6, 99, 99]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 1, 0], [0, 1, 2, 3, 3, 4, 0, 0]]
    assert batch["before"].tolist() == [[-1, -1, 1, -1, 3, 4, 3, -1], [-1, -1, -1, 2, 2, 4, -1, -1]]
    assert batch["branches"].tolist() == [[-1, -1, 0, -1, 1, 1, 2, -1], [-1, -1, -1, 0, 1, 1, -1, -1]]


def test_no_token_sees_padding_and_padding_sees_one_token_that_is_not_itself() -> None:
    rows = branched(questions([[([1], [2]), ([1], [3])]]))
    seen = rows.batch([0], 5)["attention_mask"][0, 0]
    assert seen[:3, :3].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert not seen[:3, 3:].any() and seen[3:].sum(dim=1).tolist() == [1, 1] and seen[3:, 0].all()


def test_a_selection_of_questions_has_the_rows_of_these_in_its_order() -> None:
    whole = questions([[([1], [2]), ([1], [3])], [([4, 5], [6]), ([4, 5], [7])], [([8], [9]), ([8], [1])]])
    own = branched(replace(whole, rows=torch.tensor([2, 0])))
    assert own.batch([0, 1], 4)["input_ids"].tolist() == [[8, 9, 1, 99], [1, 2, 3, 99]]
