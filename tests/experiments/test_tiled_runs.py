"""Federations of a language model that sees images in tiles: learnt, compressed, fused, pooled, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.vision import file_of, picture, write_seeing_model

import coterie
from coterie.adapters.peft_folder import load_peft
from coterie.compress.factored import FactoredLinear
from coterie.data.images import fingerprint
from coterie.errors import CoterieError
from coterie.experiments.build import build
from coterie.experiments.calibrating import Calibration
from coterie.experiments.client_bases import SERVER
from coterie.experiments.compression import compress_model
from coterie.experiments.config import parse
from coterie.experiments.exports import export
from coterie.serve.scoring import score
from coterie.training.asks import Plan

SHAPES = ((20, 20), (12, 40), (45, 14), (32, 32))


def shot(number: int) -> bytes:
    """Dark or light by turns, in four shapes."""
    return file_of(picture(number % 2, number, *SHAPES[number // 2 % 4]))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp("next") / "llava", tiles=True)


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ScienceQA's layout; the question is always the same, so only the image can tell the answer."""
    folder = tmp_path_factory.mktemp("lessons")
    problems = {}
    for number in range(72):
        split = "train" if number < 56 else "test"
        (folder / split / str(number)).mkdir(parents=True)
        (folder / split / str(number) / "image.png").write_bytes(shot(number))
        asked = {"question": "is the film good", "choices": ["no", "yes"], "answer": number % 2}
        problems[str(number)] = {**asked, "image": "image.png", "split": split}
    problems["without"] = {**asked, "image": None, "split": "train"}
    (folder / "problems.json").write_text(json.dumps(problems))
    return folder


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """VizWiz's layout."""
    folder = tmp_path_factory.mktemp("snapshots")
    for split, numbers in (("train", range(48)), ("val", range(100, 112))):
        (folder / split).mkdir()
        records = []
        for number in numbers:
            (folder / split / f"{number}.png").write_bytes(shot(number))
            right = ("no", "yes")[number % 2]
            answers = [{"answer": right}] * 8 + [{"answer": "why"}] * 2
            records.append({"image": f"{number}.png", "question": "is the film good", "answers": answers})
        (folder / f"{split}.json").write_text(json.dumps(records))
    return folder


def raw(base: Path, task: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "method": "fedit",
        "rounds": 2,
        "model": {"base": str(base)},
        "task": task,
        "clients": {"count": 2, "ranks": 4},
        "partition": {"kind": "iid", "minimum": 4},
        "train": {"batch_size": 8, "steps": 20, "lr": 1e-2},
        "evaluate": {"objective_examples": 0},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    } | sections


def test_a_federation_learns_choices_from_images_of_four_shapes(llava: Path, lessons: Path, tmp_path: Path) -> None:
    config = raw(llava, {"name": "scienceqa", "path": str(lessons)})
    result = coterie.run(config, folder=tmp_path / "run")
    losses = [row["train"]["loss"] for row in result.metrics]
    assert losses[-1] < 0.7 * losses[0]
    assert result.summary["global"]["pooled"]["accuracy"] > 0.9
    chosen = coterie.load(tmp_path / "run").choose(
        ["is the film good\nAnswer:"] * 4, ["no", "yes"], pictures=[shot(number) for number in (301, 302, 303, 304)]
    )
    assert chosen == ["yes", "no", "yes", "no"]
    built = build(parse(config), Plan())
    assert len({*built.setting.sites["00"].data["train"].lengths.tolist()}) >= 3


@pytest.mark.parametrize(
    ("sections", "exact"),
    [
        ({"execution": {"clients_per_step": 1}}, True),
        ({"execution": {"workers": 2, "clients_per_step": 1}}, True),
        ({"train": {"checkpointing": True}}, False),
        ({"train": {"accumulation": 2}}, False),
    ],
    ids=["alone", "workers", "recomputed", "in parts"],
)
@pytest.mark.usefixtures("forked_workers")
def test_how_a_round_is_computed_does_not_change_what_is_learnt(
    llava: Path, lessons: Path, tmp_path: Path, sections: dict[str, Any], exact: bool
) -> None:
    config = raw(llava, {"name": "scienceqa", "path": str(lessons)}, rounds=1)
    config["train"] = {"batch_size": 8, "steps": 3, "lr": 1e-2}
    changed = {name: {**config[name], **own} for name, own in sections.items()}
    adapters = []
    for place, settings in (("plain", config), ("other", config | changed)):
        coterie.run(settings, folder=tmp_path / place)
        adapters.append(load_peft(tmp_path / place / "adapters" / "global").adapter)
    for name, term in adapters[0].items():
        assert torch.allclose(term.B, adapters[1][name].B, rtol=0, atol=0 if exact else 1e-4)


def test_answers_are_generated_about_images_of_four_shapes_also_by_a_merged_export(
    llava: Path, snapshots: Path, tmp_path: Path
) -> None:
    config = raw(llava, {"name": "vizwiz", "path": str(snapshots)}, train={"batch_size": 8, "steps": 30, "lr": 1e-2})
    coterie.run(config, folder=tmp_path / "run")
    found = score(tmp_path / "run", max_new_tokens=3)
    assert found.judged == "agreement" and found.value > 0.9
    export(tmp_path / "run", tmp_path / "whole", merged=True)
    whole, adapted = coterie.load(tmp_path / "whole"), coterie.load(tmp_path / "run")
    asked, pictures = ["is the film good"] * 4, [shot(number) for number in (201, 202, 203, 204)]
    answers = [
        one.generate(asked, 3, pictures=pictures, batch_size=size) for one in (whole, adapted) for size in (1, 4)
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]


def test_a_compressed_model_keeps_its_vision_tower_and_is_calibrated_along_images(
    llava: Path, snapshots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coterie.data.tasks import LOADERS
    from coterie.data.tasks.seeing import vizwiz
    from coterie.models.loading import load_whole

    monkeypatch.setitem(LOADERS, "mine", lambda: vizwiz(str(snapshots)))
    chosen = Calibration(text="mine", samples=4, length=24, held_out=120)
    notes = compress_model(str(llava), tmp_path / "small", ratio=0.6, method="qsvd", calibration=chosen)
    assert all("language_model" in name for name in notes.ranks) and len(notes.ranks) == 14
    assert len(notes.shared) == 2 and all(len(group) == 3 for group in notes.shared)
    assert 0 < notes.figures["perplexity"]["tokens"] < 120
    small, whole = load_whole(tmp_path / "small")[0], load_whole(llava)[0]
    for name, value in whole.named_parameters():
        if "vision_tower" in name or "projector" in name or "newline" in name:
            assert torch.equal(small.get_parameter(name), value)
    with pytest.raises(CoterieError, match="lies beside the language model"):
        compress_model(str(llava), tmp_path / "no", ratio=0.6, layers=["vision_tower.encoder.layers.0.mlp.fc1"])


def fedslm(base: Path, task: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """As the paper's vision-language experiment, in small: QSVD at 0.6 and 0.9, and full clients."""
    return raw(
        base,
        task,
        method="fedslm",
        options={"epochs": 1, "student_rank": 2, "student_alpha": 4.0},
        model={"base": str(base), "targets": "all-linear", "max_length": 64},
        clients={"count": 3, "ranks": 2, "ratios": [0.6, 0.9, "full"]},
        compression={"method": "qsvd", "samples": 3, "length": 24},
        server_data={"unlabeled": 8},
        train={"batch_size": 4, "steps": 2, "lr": 1e-2},
        **sections,
    )


def test_fedslm_fuses_language_models_that_see_and_were_cut_by_qsvd(
    llava: Path, lessons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    config = fedslm(llava, {"name": "scienceqa", "path": str(lessons)})
    built = build(parse(config), Plan())
    assert set(built.executor.bases) == {SERVER, "ratio-0.6", "ratio-0.9"}
    for spec, base in built.executor.bases.items():
        kinds = {type(slot.base) for slot in base.slots.layers.values()}
        assert (kinds == {FactoredLinear}) == (spec != SERVER) and base.vision == built.base.vision
    result = coterie.run(config, folder=tmp_path / "run")
    assert result.summary["failures"] == 0 and set(result.metrics[-1]["personal"]["bases"]) == set(built.executor.bases)
    asked, pictures = ["is the film good"] * 2, [shot(301), shot(302)]
    within = coterie.load(tmp_path / "run", client="00")
    export(tmp_path / "run", tmp_path / "merged", client="00", merged=True)
    merged = coterie.load(tmp_path / "merged")
    assert within.generate(asked, 3, pictures=pictures) == merged.generate(asked, 3, pictures=pictures)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ("fedproto", {}),
        ("fedbiot", {"server_data": {"public": 8}, "options": {"outer": 1, "align": 2}}),
        ("hetlora", {"clients": {"count": 2, "ranks": [2, 4]}}),
        ("fed-rac-lora", {}),
        ("flora", {}),
    ],
)
def test_other_methods_of_the_papers_table_play_a_round(
    lessons: Path, tmp_path: Path, method: str, sections: dict[str, Any]
) -> None:
    llava = write_seeing_model(tmp_path / "llava", tiles=True, layers=4)
    task = {"name": "scienceqa", "path": str(lessons)}
    config = raw(llava, task, method=method, rounds=1, train={"batch_size": 4, "steps": 2, "lr": 1e-2}) | sections
    result = coterie.run(config, folder=tmp_path / "run")
    scores = result.summary["personal"]["clients"] or result.summary["global"]["pooled"]
    assert result.summary["failures"] == 0 and 0 <= scores.get("mean", scores.get("accuracy")) <= 1


@pytest.mark.parametrize("tiles", [True, False], ids=["tiles", "one-size"])
def test_clients_that_share_a_pool_of_images_teach_each_other(tmp_path: Path, lessons: Path, tiles: bool) -> None:
    base = write_seeing_model(tmp_path / "base", tiles=tiles)
    other = write_seeing_model(tmp_path / "other", tiles=tiles, layers=3)
    task = {"name": "scienceqa", "path": str(lessons)}
    config = raw(
        base,
        task,
        method="fedmkt",
        options={"top_k": 8},
        clients={"count": 2, "ranks": 2, "bases": [str(base), str(other)]},
        server_data={"pool": 0.25},
        train={"batch_size": 4, "steps": 2, "lr": 1e-2},
        rounds=1,
    )
    result = coterie.run(config, folder=tmp_path / "run")
    assert result.summary["failures"] == 0
    built = build(parse(config), Plan())
    pools = [site.data["pool"] for site in built.setting.sites.values()]
    assert [len(pool) for pool in pools] == [12, 12] and all(pool.pictures is not None for pool in pools)
    train = built.task.train
    given = {fingerprint(train.pictures[i]): len(train.pictures[i]) for i in range(len(train))}
    sizes = sum(built.setting.given.values())
    texts = 12 * len("is the film good\nAnswer:no\x1fyes")
    assert min(given.values()) * 12 <= sizes - texts <= max(given.values()) * 12
