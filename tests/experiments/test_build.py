"""From configuration to setting: cards, shares and heads, and refusals before anything is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms import METHODS
from coterie.errors import CoterieError
from coterie.experiments.build import build, sample_size, scale_of
from coterie.experiments.config import Config, parse
from coterie.experiments.methods import algorithm
from coterie.experiments.shares import client_ids, dealt
from coterie.training.asks import Plan

PLAN = Plan()


@pytest.fixture
def raw(tiny_base: Path, reviews_csv: Path) -> dict[str, Any]:
    return {
        "method": "fedit",
        "task": {"name": "file", "path": str(reviews_csv)},
        "model": {"base": str(tiny_base), "targets": ["query", "value"]},
        "clients": {"count": 4, "ranks": [2, 4, 8]},
        "partition": {"minimum": 10},
        "train": {"batch_size": 4, "steps": 2},
    }


def changed(raw: dict[str, Any], **sections: Any) -> Config:
    return parse({k: {**raw.get(k, {}), **v} if isinstance(v, dict) else v for k, v in {**raw, **sections}.items()})


def test_ranks_are_dealt_in_turn_and_scales_follow_the_rule(raw: dict[str, Any]) -> None:
    config = changed(raw, lora={"alpha": 16})
    assert dealt(config.clients.ranks, 4) == [2, 4, 8, 2]
    assert [scale_of(config, r) for r in (2, 8)] == [2.0, 2.0]
    assert [scale_of(changed(raw, lora={"alpha": 16, "scaling": "standard"}), r) for r in (2, 8)] == [8.0, 2.0]
    assert scale_of(changed(raw, lora={"alpha": 16, "scaling": "rslora"}), 4) == 8.0
    assert scale_of(changed(raw, lora={"scaling": "standard", "scale": 0.1}), 4) == 0.1


def test_ids_are_in_number_order(raw: dict[str, Any]) -> None:
    ids = client_ids(changed(raw, clients={"count": 120}))
    assert ids == sorted(ids) and ids[7] == "007"
    assert client_ids(changed(raw, clients={"count": 2, "ids": ["b", "a"]})) == ["b", "a"]


def test_a_fraction_of_the_clients_is_at_least_one(raw: dict[str, Any]) -> None:
    assert sample_size(changed(raw, federation={"sample": 0.5}), 4) == 2
    assert sample_size(changed(raw, federation={"sample": 0.01}), 4) == 1
    assert sample_size(changed(raw, federation={"sample": 3}), 4) == 3


def test_sites_hold_disjoint_shares_of_all_training_examples(raw: dict[str, Any]) -> None:
    built = build(changed(raw, clients={"reference_ranks": [1, 3]}), PLAN)
    cards = [site.card for site in built.setting.sites.values()]
    assert [card.rank for card in cards] == [2, 4, 8, 2]
    assert [card.reference_rank for card in cards] == [1, 3, 1, 3]
    rows = [set(data.rows.tolist()) for site in built.setting.sites.values() for data in site.data.values()]
    assert sum(map(len, rows)) == len(set().union(*rows)) == len(built.task.train)
    for card, held in zip(cards, built.partition["clients"], strict=True):
        assert card.id == held["id"] and card.examples == len(held["train"])
        assert set(built.setting.sites[card.id].data["train"].rows.tolist()) == set(held["train"])
    assert built.setting.pooled_test is not None and len(built.setting.pooled_test) == len(built.task.test)


def test_who_holds_what_and_the_initial_heads_depend_on_the_seed_alone(raw: dict[str, Any]) -> None:
    one, other = build(changed(raw), PLAN), build(changed(raw, method="fedpa-lora", options={"lam": 3}), PLAN)
    assert one.partition == other.partition
    for name, value in one.base.head.items():
        assert torch.equal(value, other.base.head[name])
    for name, site in one.setting.sites.items():
        assert torch.equal(site.data["train"].rows, other.setting.sites[name].data["train"].rows)
    third = build(changed(raw, seed=1), PLAN)
    assert third.partition["clients"] != one.partition["clients"]


def test_the_majority_baselines_are_those_of_the_labels(raw: dict[str, Any]) -> None:
    built = build(changed(raw), PLAN)
    assert built.majority["pooled"] == np.bincount(built.task.test.labels).max() / len(built.task.test)
    scores = []
    for site in built.setting.sites.values():
        train, test = site.data["train"].labels.numpy(), site.data["test"].labels.numpy()
        scores.append(np.mean(test == np.bincount(train).argmax()))
    assert built.majority["own"] == pytest.approx(np.mean(scores))


def test_without_a_test_fraction_clients_have_no_test(raw: dict[str, Any]) -> None:
    built = build(changed(raw, partition={"test_fraction": 0}), PLAN)
    assert all(set(site.data) == {"train"} for site in built.setting.sites.values())
    assert built.majority["own"] is None


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"method": "feditt"}, "no method 'feditt'; did you mean 'fedit'?"),
        ({"method": "fedpa-lora", "options": {"lamb": 1}}, "no option 'lamb'; did you mean 'lam'?"),
        ({"method": "fedpa-lora", "options": {"lam": "much"}}, "options.lam of 'fedpa-lora'"),
        ({"method": "fedit", "options": {"lam": 1}}, "it has none"),
        ({"method": "none.py:Class"}, "no file none.py"),
        ({"method": "coterie.algorithms:FedI"}, "did you mean 'FedIT'?"),
        ({"task": {"name": "fyle"}}, "no task 'fyle'; did you mean 'file'?"),
        ({"task": {"path": "missing.csv"}}, "missing.csv"),
        ({"task": {"path": None}}, "task.path"),
        ({"task": {"columns": {"text": "txet"}}}, "no column 'txet'; did you mean 'text'?"),
        ({"partition": {"minimum": 1000}}, "do not give 4 clients 1000 each"),
        ({"partition": {"kind": "dirichelt"}}, "no partitioner 'dirichelt'; did you mean 'dirichlet'?"),
        ({"model": {"targets": ["querry"]}}, "'querry'"),
        ({"model": {"base": "./nowhere"}}, "no model folder './nowhere'"),
        ({"clients": {"ranks": 33}}, "client 00: rank 33 is above what layer"),
        ({"clients": {"reference_ranks": 64}}, "reference rank: rank 64"),
        ({"federation": {"sample": 5}}, "there are 4 clients"),
        ({"federation": {"min_replies": 5}}, "only 4 clients"),
        ({"faults": [{"client": "1", "round": 1, "kind": "nan"}]}, "no client '1'; did you mean"),
        (
            {"method": "fedsee"},
            "FedSEE needs public data at the server; set training examples aside for it, with server_",
        ),
        ({"method": "fedslm", "server_data": {"public": 9}}, "FedSLM needs unlabeled data at the server; set training"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(raw: dict[str, Any], sections: dict[str, Any], told: str) -> None:
    with pytest.raises(CoterieError) as caught:
        build(changed(raw, **sections), PLAN)
    assert told in str(caught.value) and "\n" not in str(caught.value)


OWN_METHOD = """
from dataclasses import dataclass
from coterie.algorithms import FedIT

@dataclass(frozen=True)
class Mine(FedIT):
    factor: float = 1.0

class Other:
    pass
"""


def test_a_method_of_ones_own_is_loaded_from_its_file(tmp_path: Path) -> None:
    place = tmp_path / "mine.py"
    place.write_text(OWN_METHOD, encoding="utf-8")
    made = algorithm(f"{place}:Mine", {"factor": "2e-1"})
    assert type(made).__name__ == "Mine" and made.factor == 0.2  # type: ignore[attr-defined]
    with pytest.raises(CoterieError, match="derive it from"):
        algorithm(f"{place}:Other", {})
    place.write_text("1/0", encoding="utf-8")
    with pytest.raises(CoterieError, match="does not load"):
        algorithm(f"{place}:Mine", {})


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_made_from_no_options(name: str) -> None:
    assert isinstance(algorithm(name, {}), METHODS[name])


def test_a_given_plan_is_used_and_auto_settles_one(raw: dict[str, Any]) -> None:
    fixed = replace(PLAN, clients_per_step=3)
    assert build(changed(raw), fixed).plan == fixed
    execution = {"dtype": "float32", "attention": "eager", "clients_per_step": 2}
    assert build(changed(raw, execution=execution)).plan.clients_per_step == 2


def test_experts_are_dealt_out_as_ranks_are_and_left_to_the_method_by_default(raw: dict[str, Any]) -> None:
    def found(**clients: Any) -> list[tuple[int | None, int | None]]:
        built = build(changed(raw, clients=clients), PLAN)
        return [(site.card.routed_experts, site.card.trained_experts) for site in built.setting.sites.values()]

    assert found() == [(None, None)] * 4
    assert found(routed_experts=3, trained_experts=[1, 2, 3]) == [(3, 1), (3, 2), (3, 3), (3, 1)]


def test_a_mixtures_parts_are_told_to_make_up_its_pooled_test(raw: dict[str, Any], reviews_csv: Path) -> None:
    part = {"task": "file", "path": str(reviews_csv), "test_fraction": 0.3}
    mixture = {"name": "mixture", "parts": [{"name": "one", **part}, {"name": "two", **part}]}
    setting = build(parse({**raw, "task": mixture}), PLAN).setting
    assert setting.pooled_of == ("one", "two") and build(changed(raw), PLAN).setting.pooled_of == ()
    assert setting.pooled_test is not None
    assert len(setting.pooled_test) == sum(len(setting.more_tests[name]) for name in setting.pooled_of)
