"""Whole federations on images, and of language models that see: run, used, exported, compressed, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.vision import CLASSES, PATCH, file_of, picture, write_image_model, write_pictures, write_seeing_model

import coterie
from coterie.compress.factored import FactoredLinear
from coterie.data.tasks import LOADERS
from coterie.data.tasks.images import image_folder
from coterie.errors import CoterieError
from coterie.experiments.build import build
from coterie.experiments.calibrating import Calibration
from coterie.experiments.compression import compress_model
from coterie.experiments.config import parse
from coterie.experiments.exports import export


def raw(base: Path, task: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "method": "fedit",
        "rounds": 2,
        "model": {"base": str(base)},
        "task": task,
        "clients": {"count": 3, "ranks": 2},
        "partition": {"kind": "iid", "minimum": 4},
        "train": {"batch_size": 8, "steps": 12, "lr": 2e-2},
        "evaluate": {"objective_examples": 4},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 3},
    } | sections


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"name": "image-folder", "path": str(write_pictures(tmp_path_factory.mktemp("shots") / "all", 24))}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("method", ["fedit", "flexlora", "local-only"])
def test_a_federation_learns_to_tell_images_apart(
    base: Path, shots: dict[str, Any], tmp_path: Path, method: str
) -> None:
    sections = {"clients": {"count": 3, "ranks": [2, 3]}} if method == "flexlora" else {}
    result = coterie.run(raw(base, shots, method=method, **sections), folder=tmp_path / "run")
    assert result.summary["personal"]["clients"]["mean"] > 0.9
    where = {} if method != "local-only" else {"client": "00"}
    predictor = coterie.load(tmp_path / "run", **where)  # type: ignore[arg-type]
    fresh = [picture(label, 500 + label) for label in (0, 1, 2, 1)]
    assert predictor.labels == CLASSES and predictor.predict(fresh) == ["dark", "light", "striped", "light"]
    paths = [tmp_path / f"{place}.png" for place in range(4)]
    for path, pixels in zip(paths, fresh, strict=True):
        path.write_bytes(file_of(pixels))
    assert torch.equal(predictor.logits(paths), predictor.logits(fresh))


def test_a_merged_export_answers_alike_at_the_size_of_training(
    base: Path, shots: dict[str, Any], tmp_path: Path
) -> None:
    config = raw(base, shots, rounds=1, model={"base": str(base), "image_size": 6 * PATCH})
    coterie.run(config, folder=tmp_path / "run")
    adapted = coterie.load(tmp_path / "run")
    export(tmp_path / "run", tmp_path / "whole", merged=True)
    whole = coterie.load(tmp_path / "whole")
    fresh = [picture(label, 700 + label, 30) for label in range(3)]
    assert whole.base.vision is not None and whole.base.vision.size == 6 * PATCH == adapted.base.vision.size  # type: ignore[union-attr]
    assert torch.allclose(whole.logits(fresh), adapted.logits(fresh), atol=1e-4) and whole.labels == CLASSES


def test_an_exported_adapter_keeps_that_it_is_of_images(base: Path, shots: dict[str, Any], tmp_path: Path) -> None:
    config = raw(base, shots, rounds=1, model={"base": str(base), "image_size": 6 * PATCH})
    coterie.run(config, folder=tmp_path / "run")
    export(tmp_path / "run", tmp_path / "adapter")
    fresh = [picture(label, 800 + label) for label in range(3)]
    found = [coterie.load(place).logits(fresh) for place in (tmp_path / "run", tmp_path / "adapter")]
    assert torch.equal(found[0], found[1])


def test_a_pool_of_images_is_counted_in_the_bytes_of_their_files(
    base: Path, shots: dict[str, Any], tmp_path: Path
) -> None:
    config = raw(base, shots, rounds=1, method="fedmkt", options={"top_k": 3}, server_data={"pool": 0.25})
    result = coterie.run(config, folder=tmp_path / "run")
    assert result.summary["failures"] == 0 and result.summary["personal"]["clients"]["mean"] > 0.3
    built = build(parse(config))
    sizes = [len(file) for file in built.task.train.pictures]  # type: ignore[union-attr]
    count = len(built.setting.sites["00"].data["pool"])
    assert count * min(sizes) <= sum(built.setting.given.values()) <= count * max(sizes)


def test_images_do_not_suit_a_model_of_texts_nor_texts_one_of_images(
    base: Path, shots: dict[str, Any], tmp_path: Path
) -> None:
    from experiments.decoders import write_decoder

    with pytest.raises(CoterieError) as caught:
        build(parse(raw(write_decoder(tmp_path / "decoder", "llama"), shots)))
    assert "\n" not in str(caught.value)
    texts = tmp_path / "texts.csv"
    texts.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(30)))
    with pytest.raises(CoterieError) as other:
        build(parse(raw(base, {"name": "file", "path": str(texts)})))
    assert "\n" not in str(other.value)


@pytest.mark.parametrize("method", ["svd-llm", "svd"])
def test_a_compressed_image_model_loads_into_a_federation(
    base: Path, shots: dict[str, Any], tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOADERS, "mine", lambda: image_folder(shots["path"]))  # type: ignore[arg-type]
    calibration = Calibration(text="mine", samples=8, held_out=40)
    notes = compress_model(str(base), tmp_path / "small", ratio=0.5, method=method, calibration=calibration)
    assert 0 < notes.figures["hidden_states"]["relative_error"] < 1
    built = build(parse(raw(tmp_path / "small", shots)))
    kinds = {type(slot.base) for slot in built.base.slots.layers.values()}
    assert kinds == {FactoredLinear} and built.base.vision is not None


def test_texts_do_not_calibrate_an_image_model(base: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text\n\nanother\n")
    with pytest.raises(CoterieError, match="calibrated on images"):
        compress_model(str(base), tmp_path / "small", ratio=0.5, calibration=Calibration(text=str(text)))


def test_clients_of_unequal_size_are_cut_from_one_image_model(
    base: Path, shots: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    sections = {
        "model": {"base": str(base), "targets": "all-linear"},
        "clients": {"count": 3, "ranks": 2, "ratios": [0.5, "full"]},
        "compression": {"method": "svd", "samples": 4},
    }
    built = build(parse(raw(base, shots, method="local-only", **sections)))
    assert {site.card.spec for site in built.setting.sites.values()} == {"ratio-0.5", "base"}


def test_a_language_model_that_sees_learns_from_what_it_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    problems = {}
    for number in range(72):
        split = "train" if number < 48 else "test"
        (folder / split / str(number)).mkdir(parents=True)
        (folder / split / str(number) / "image.png").write_bytes(file_of(picture(number % 2, number)))
        problems[str(number)] = {
            "question": "is the film good",
            "choices": ["no", "yes"],
            "answer": number % 2,
            "image": "image.png",
            "split": split,
        }
    (folder / "problems.json").write_text(json.dumps(problems))
    sections = {
        "train": {"batch_size": 8, "steps": 25, "lr": 1e-2},
        "clients": {"count": 2, "ranks": 4},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 2},
    }
    task = {"name": "scienceqa", "path": str(folder)}
    result = coterie.run(raw(write_seeing_model(tmp_path / "llava"), task, **sections), folder=tmp_path / "run")
    # The question is always the same, so only the image can tell the answer.
    assert result.summary["global"]["pooled"]["accuracy"] > 0.9
