"""A forgotten yield must raise, so requests and their answers share no field name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from coterie.errors import ModelError
from coterie.protocol import Evaluate, Fit, Fitted, Predict, Predictions, Score, matching

PAIRS = [(Fit, Fitted), (Evaluate, Score), (Predict, Predictions)]


@pytest.mark.parametrize(("request_class", "answer_class"), PAIRS)
def test_no_request_has_a_field_named_like_one_of_its_answer(request_class: type, answer_class: type) -> None:
    assert not {f.name for f in fields(request_class)} & {f.name for f in fields(answer_class)}


def test_patterns_choose_parameters_by_name() -> None:
    names = ["lora.a.B", "lora.a.A", "shared.a.B"]
    assert matching(names, ["lora.*.B"]) == {"lora.a.B"}
    assert matching(names, ["lora.*", "shared.*"]) == set(names)


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'lora\.b\.B' matches no parameter; did you mean 'lora\.a\.B'"):
        matching(["lora.a.B", "router.x.W"], ["lora.b.B"])
