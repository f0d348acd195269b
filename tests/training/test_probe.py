"""The plan: what is given is kept, what is auto is settled once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from training.small import STEPS, base_of, bert, texts

from coterie.errors import DataError
from coterie.training import probe
from coterie.training.asks import Plan, TrainSettings
from coterie.training.probe import choose_plan

DATA = texts(40, "probe")


def test_what_is_given_is_kept_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_fastest", lambda *_: pytest.fail("timed"))
    plan = choose_plan(
        base_of(), DATA, STEPS, dtype="bfloat16", attention="eager", clients_per_step=3, threads=1, rank=5
    )
    assert plan == Plan("bfloat16", "eager", threads=1, clients_per_step=3, padding_rank=5)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({("float32", "sdpa"): 1.0, ("float32", "eager"): 2.0, ("bfloat16", "eager"): 0.5}, ("bfloat16", "eager")),
        ({("float32", "sdpa"): 1.0, ("float32", "eager"): 0.5, ("bfloat16", "eager"): 0.6}, ("float32", "eager")),
        ({("float32", "sdpa"): 1.0, ("float32", "eager"): 0.99, ("bfloat16", "eager"): 0.95}, ("float32", "sdpa")),
    ],
)
def test_the_fastest_way_wins_and_a_lower_precision_must_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, times, chosen
) -> None:
    monkeypatch.setattr(probe, "_time", lambda base, data, settings, plan: times[plan.dtype, plan.attention])
    plan = choose_plan(base_of(), DATA, STEPS)
    assert (plan.dtype, plan.attention) == chosen


def test_float32_is_kept_unless_the_choice_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(probe, "_time", lambda base, data, settings, plan: tried.append(plan) or 1.0)
    choose_plan(base_of(), DATA, STEPS, dtype="float32")
    assert {plan.dtype for plan in tried} == {"float32"} and len(tried) == 2


def test_a_real_probe_leaves_the_base_as_it_was() -> None:
    base = base_of()
    before = {name: value.clone() for name, value in base.network.state_dict().items()}
    plan = choose_plan(base, DATA, STEPS, rank=64)
    assert plan.dtype in ("float32", "bfloat16") and plan.padding_rank == 64
    after = base.network.state_dict()
    assert base.dtype == torch.float32 and base.network.config._attn_implementation == "eager"
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_wider_batches_are_stacked_less() -> None:
    base = base_of()
    sizes = [choose_plan(base, DATA, TrainSettings(batch_size=b), dtype="float64").clients_per_step for b in (1, 8, 40)]
    assert all(a >= b for a, b in pairwise(sizes))
    wide = base_of(bert(hidden_size=512, num_hidden_layers=1))
    many = texts(64, "many", low=30, high=38)
    assert choose_plan(wide, many, TrainSettings(batch_size=64), dtype="float64").clients_per_step == 1


def test_no_examples_is_an_error() -> None:
    with pytest.raises(DataError, match="no examples"):
        choose_plan(base_of(), DATA.select([]), STEPS)
