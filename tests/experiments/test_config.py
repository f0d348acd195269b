"""The configuration schema: defaults, overrides, per-method sections, and errors that name the nearest key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.setting import Fault, Measuring
from coterie.errors import ConfigError
from coterie.experiments.config import (
    Config,
    EvaluateSection,
    FaultSection,
    TrainSection,
    dotted_keys,
    dump,
    load,
    parse,
    parse_override,
    resolve,
)
from coterie.training.asks import TrainSettings

BASE = {"method": "fedit", "task": {"name": "movie"}}


def refused(*overrides: str, **extra: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve({**BASE, **extra}, [parse_override(text) for text in overrides])
    text = str(caught.value)
    assert "\n" not in text
    return text


def settled(*overrides: str, **extra: Any) -> Config:
    return resolve({**BASE, **extra}, [parse_override(text) for text in overrides])


def test_everything_but_method_and_task_has_a_default() -> None:
    config = parse(BASE)
    assert (config.clients.count, config.train.steps, config.federation.head) == (10, 8, "averaged")
    told = refused_whole({})
    assert "method is missing" in told and "task is missing" in told


def refused_whole(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "kind"),
    [(TrainSection, TrainSettings), (EvaluateSection, Measuring), (FaultSection, Fault)],
)
def test_sections_have_the_fields_and_defaults_of_what_they_become(section: Any, kind: Any) -> None:
    fields = {f.name: f.default for f in dataclasses.fields(kind)}
    assert set(section.model_fields) == set(fields)
    for name, field in section.model_fields.items():
        if not field.is_required() and name != "steps":  # steps is settled together with epochs
            assert field.default == fields[name]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.lrr=1", "train.lr"),
        ("trian.lr=1", "'train'"),
        ("lora.dropout=0.1", "train.dropout"),
        ("clients.rank=3", "clients.ranks"),
        ("federation.haed=local", "federation.head"),
        ("roundz=3", "rounds"),
    ],
)
def test_an_unknown_key_names_itself_and_the_nearest(override: str, nearest: str) -> None:
    told = refused(override)
    assert repr(override.partition("=")[0]) in told or override.partition(".")[0] in told
    assert nearest in told


def test_every_key_with_a_letter_missing_is_refused_with_some_known_key() -> None:
    keys = set(dotted_keys())
    for key in keys:
        parent, _, last = key.rpartition(".")
        wrong = f"{parent}.{last[:-1]}" if parent else last[:-1]
        listed = any(name in key for name in ("faults", "parts", "zero_shot"))
        if wrong in keys or parent in ("options", "per_method") or listed or len(last) < 4:
            continue
        told = refused(f"{wrong}=1")
        assert "did you mean" in told, told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("clients.ranks=[2,0]", "clients.ranks[1]: must be greater than or equal to 1, not 0"),
        ("clients.ranks=hello", "clients.ranks: must be a valid integer or a valid list"),
        ("federation.head=avg", "did you mean 'averaged'?"),
        ("train={steps: 2, epochs: 1}", "train: give steps or epochs, not both"),
        ("rounds=0", "rounds: must be greater than or equal to 1"),
        ("task=movie", "task: settings are expected"),
        ("train.lr=.nan", "train.lr: must be a finite number"),
        ("partition.beta=-1", "partition.beta: must be greater than 0"),
        ("clients={count: 2, ids: [a, a]}", "2 different names"),
        ("nothing", "write key=value"),
        ("train.betas=[0.9", "is not YAML"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(override: str, told: str) -> None:
    assert told in refused(override)


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    config = settled("train.lr=1e-3", "lora.alpha=3e1", "clients.ranks=[2,4,16]", "train.clip=null")
    assert config.train.lr == 1e-3
    assert config.lora.alpha == 30.0
    assert config.clients.ranks == [2, 4, 16]
    assert config.train.clip is None


def test_a_whole_number_samples_clients_and_a_fraction_a_share() -> None:
    assert isinstance(settled("federation.sample=1").federation.sample, int)
    assert isinstance(settled("federation.sample=0.5").federation.sample, float)


def test_epochs_take_the_place_of_steps() -> None:
    assert settled("train.epochs=2").train.steps is None
    assert settled("train.steps=5").train.epochs is None


def test_per_method_sections_hold_for_that_method_only_and_overrides_win() -> None:
    extra = {
        "options": {"a": 1},
        "per_method": {"flexlora": {"train": {"lr": 0.5, "steps": 3}, "options": {"b": 2}}},
    }
    assert settled(**extra).train.lr == 1e-3
    chosen = settled("method=flexlora", "train.lr=0.25", **extra)
    assert (chosen.train.lr, chosen.train.steps, chosen.options) == (0.25, 3, {"a": 1, "b": 2})
    assert chosen.per_method == {}


def test_a_mistake_in_any_per_method_section_is_told() -> None:
    told = refused(per_method={"flexlora": {"train": {"lrate": 1}}})
    assert told.startswith("per_method.flexlora: ") and "'train.lr'" in told


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rounds": st.integers(1, 100),
            "seed": st.integers(0, 9),
            "clients": st.fixed_dictionaries({"ranks": st.lists(st.integers(1, 9), min_size=1, max_size=4)}),
            "train": st.fixed_dictionaries({"lr": st.floats(1e-9, 1e3), "epochs": st.integers(1, 3)}),
            "federation": st.fixed_dictionaries({"sample": st.one_of(st.integers(1, 9), st.floats(0.01, 1))}),
            "model": st.fixed_dictionaries({"targets": st.one_of(st.none(), st.just("all-linear"), st.just(["q"]))}),
        },
    )
)
def test_what_is_dumped_is_read_back_the_same(extra: dict[str, Any]) -> None:
    config = parse({**BASE, **extra})
    assert parse(yaml.safe_load(yaml.safe_dump(dump(config)))) == config


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 99), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=5,
)


@given(st.lists(st.tuples(st.sampled_from(sorted(dotted_keys())), JSON), min_size=1, max_size=3))
def test_any_value_anywhere_is_taken_or_refused_in_one_line(settings: list[tuple[str, Any]]) -> None:
    try:
        resolve(BASE, [(key.split("."), value) for key, value in settings])
    except ConfigError as error:
        assert "\n" not in str(error)


def test_a_file_gives_its_name_and_ignores_what_a_run_recorded(tmp_path: Path) -> None:
    place = tmp_path / "mine.yaml"
    place.write_text(yaml.safe_dump({**BASE, "recorded": {"plan": 1}}), encoding="utf-8")
    assert load(place).name == "mine"
    assert load(place, ["name=other"]).name == "other"


@pytest.mark.parametrize(
    ("content", "told"),
    [("a: [1", "not YAML"), ("- 1", "a mapping of settings"), ("", "a mapping of settings"), (None, "cannot be read")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    place = tmp_path / "bad.yaml"
    if content is not None:
        place.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        load(place)
