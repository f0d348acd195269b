"""What one decoder says, in another's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from training.decoders import decoder, sentences, tokeniser, tokens
from training.small import ask, lora, texts

from coterie.data.vocabulary import END, token_strings
from coterie.errors import DataError, ModelError
from coterie.protocol import Model, Predict, TopLogits, Translate
from coterie.training.asks import Ask, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.translation import Translator, strings_of, translated

FEW, MANY = 270, 319


def answered(bases, spec, request, data, source=None):
    key = ask(bases[spec], request, head=False, data=data).key
    (done,) = Executor(bases, TrainSettings(), Plan()).answer([Ask("c", request, spec, None, data, key, source)])
    if isinstance(done, Exception):
        raise done
    return done.answer


@pytest.fixture(scope="module")
def bases():
    return {"few": decoder(FEW), "many": decoder(MANY)}


def said(bases, spec: str, top_k: int = 6, count: int = 12) -> TopLogits:
    model = Model(lora=lora(bases[spec], 2)["lora"])
    return TopLogits.of(answered(bases, spec, Predict(model, "pool", top_k=top_k), tokens(bases[spec], count, "pool")))


def test_tokens_are_strings_with_a_space_where_a_word_begins_and_one_end() -> None:
    strings = token_strings(tokeniser(MANY), MANY + 2)
    assert " sleeps" in strings and strings.count(END) == 1 and strings[-2:] == ["", ""]
    few = token_strings(tokeniser(FEW), FEW)
    assert "".join(few[i] for i in tokeniser(FEW)(" the old dog")["input_ids"]) == " the old dog"


def test_equal_tokens_are_left_as_they_are_also_by_the_general_way(bases) -> None:
    one, data = said(bases, "many"), tokens(bases["many"], 12, "pool")
    by = Translator(strings_of(bases["many"], "many"), strings_of(bases["many"], "many"))
    assert by.same and translated(one, data, data, by, "c") is one
    by.same = False
    other = translated(one, data, data, by, "c")
    assert torch.equal(other.ids, one.ids) and torch.equal(other.losses, one.losses)
    assert torch.allclose(other.logits, one.logits, atol=1e-6)


def test_whole_words_are_learnt_from_and_pieces_are_sure_of_themselves(bases) -> None:
    """Token by token, on the sentences themselves."""
    data = {spec: tokens(base, 12, "pool") for spec, base in bases.items()}
    one = said(bases, "many")
    found = answered(bases, "few", Translate(one, "many", "pool"), data["few"], data["many"])
    strings = {spec: strings_of(base, spec) for spec, base in bases.items()}
    row, start, alike, pieces = 0, 0, 0, 0
    for i in range(12):
        answer = {}
        for spec, held in data.items():
            begin = int(held.offsets[i] + held.prompts[i])
            answer[spec] = [strings[spec][t] for t in held.ids[begin : int(held.offsets[i + 1])].tolist()]
        assert "".join(answer["few"]) == "".join(answer["many"]) == sentences(12, "pool")[1][i] + END
        for token in answer["few"]:
            if token in answer["many"]:
                source = start + answer["many"].index(token)
                words = [strings["few"][t] for t in found.ids[row].tolist()]
                theirs = [strings["many"][t] for t in one.ids[source].tolist()]
                kept = {w for w, x in zip(words, found.logits[row].tolist(), strict=True) if x > -torch.inf}
                assert {word for word in theirs if word in strings["few"]} <= kept
                alike += 1
            else:
                p = found.logits[row].softmax(0)
                assert strings["few"][int(found.ids[row, 0])] == token and p[0] == 1
                pieces += 1
            row += 1
        start += len(answer["many"])
    assert alike > 20 and pieces > 5 and row == len(found.logits)


def test_a_translated_row_is_a_distribution_and_losses_stay(bases) -> None:
    data = {spec: tokens(base, 12, "pool") for spec, base in bases.items()}
    one = said(bases, "few")
    found = answered(bases, "many", Translate(one, "few", "pool"), data["many"], data["few"])
    assert torch.allclose(found.logits.softmax(1).sum(1), torch.ones(len(found.logits)))
    assert torch.equal(found.losses, one.losses) and int(found.ids.max()) < MANY


def test_classes_need_no_translation() -> None:
    data = texts(5)
    one = TopLogits(torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int32), torch.ones(5))
    assert translated(one, data, data, None, "c") is one


def test_another_pool_other_rows_and_unknown_tokens_are_refused(bases) -> None:
    data, one = tokens(bases["few"], 12, "pool"), said(bases, "few")
    by = Translator(*[strings_of(bases["few"], "few")] * 2)
    with pytest.raises(DataError, match=r"c: 12 losses of 12 examples for 9 of one's own"):
        translated(one, data, data.select(range(9)), by, "c")
    with pytest.raises(ModelError, match="rows of logits for"):
        translated(replace(one, logits=one.logits[1:], ids=one.ids[1:]), data, data, by, "c")
    with pytest.raises(ModelError, match="an id of 999"):
        translated(replace(one, ids=torch.full_like(one.ids, 999)), data, data, by, "c")
    bare = replace(bases["few"], tokenizer=None)
    with pytest.raises(ModelError, match="'few' has no tokeniser"):
        strings_of(bare, "few")
