"""A whole federation over a language model: sequences to train on, options to be tested with, no head anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from training.small import choices, gpt2_lm, language_base_of, sequences

from coterie.algorithms import Algorithm, FedIT, FedPALoRA
from coterie.engines.in_process import InProcess, Played
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Volatile
from coterie.protocol import Card
from coterie.training.asks import Plan
from coterie.training.executor import Executor
from coterie.wire.ledger import Ledger
from engines.world import FAST, play


def federation(algorithm: Algorithm, ranks: tuple[int, ...], initial: Any, **fields: Any) -> list[Played]:
    base = language_base_of(gpt2_lm())
    sites = {
        f"c{i}": Site(
            Card(f"c{i}", rank, 16 + i, 2.0, base.layers),
            {"train": sequences(16 + i, f"c{i}"), "test": choices(5, f"test{i}")},
        )
        for i, rank in enumerate(ranks)
    }
    setting = Setting(
        algorithm=algorithm,
        sites=sites,
        rounds=2,
        heads={"base": initial},
        pooled_test=sequences(10, "pooled"),
        measuring=Measuring(objective_examples=8),
        strict=True,
        **fields,
    )
    plan = Plan(clients_per_step=3, padding_rank=8)
    return play(
        InProcess(setting, Executor({"base": base}, replace(FAST, lr=0.5, steps=8), plan), Volatile(), Ledger())
    )


@pytest.mark.parametrize(
    ("algorithm", "ranks"), [(FedIT(), (4, 4, 4)), (FedPALoRA(lam=0.1), (2, 4, 8))], ids=["fedit", "fedpa-lora"]
)
@pytest.mark.parametrize("head", [{}, None], ids=["empty head", "no head"])
@pytest.mark.parametrize("policy", ["averaged", "local", "frozen"])
def test_a_federation_trains_a_language_model_and_scores_options(
    algorithm: Algorithm, ranks: tuple[int, ...], head: Any, policy: Any
) -> None:
    played = federation(algorithm, ranks, head, head=policy)
    assert len(played) == 2
    first, last = (one.metrics for one in played)
    assert not last["failed"] and set(last["personal"]["clients"]["accuracy"]) == {"c0", "c1", "c2"}
    assert last["train"]["loss"] < first["train"]["loss"]
    assert last["objective"]["task"] < first["objective"]["task"] and last["global"]["pooled"]["examples"] == 10
    assert ("head" in last["bytes"]) == (head is not None and policy == "averaged")
