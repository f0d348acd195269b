"""Runs of unequal base models from a configuration: what is dealt out, decomposed once, kept, resumed and exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.decoders import raw_config, write_decoder, write_questions

from coterie.adapters.core_folder import load_cores
from coterie.adapters.peft_folder import load_peft
from coterie.compress.factored import FactoredLinear
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.experiments import nested
from coterie.experiments.build import build
from coterie.experiments.client_bases import SERVER, specs_of
from coterie.experiments.config import parse
from coterie.experiments.exports import export
from coterie.experiments.observers import Silent
from coterie.experiments.runs import grounded, resume, run
from coterie.models.loading import load_language_base
from coterie.serve import load
from coterie.training.asks import Plan

SMALL = {"samples": 6, "length": 24}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder") / "llama", "llama")


@pytest.fixture
def raw(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    return raw_config(
        decoder,
        "llama",
        {"name": "choices-file", "path": str(write_questions(tmp_path / "q.jsonl")), "test_limit": 16},
        method="fedslm",
        options={"epochs": 1, "student_rank": 2, "student_alpha": 4.0, "beside": [["confidence", 0.5]]},
        model={"base": str(decoder), "targets": "all-linear", "max_length": 64},
        clients={"count": 4, "ranks": 2, "ratios": [0.4, 0.6, "full"]},
        compression=SMALL,
        server_data={"unlabeled": 12},
        train={"batch_size": 8, "steps": 2, "lr": 1e-2},
        evaluate={"objective_examples": 0},
    )


def changed(raw: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {k: {**raw.get(k, {}), **v} if isinstance(v, dict) and v else v for k, v in {**raw, **sections}.items()}


def test_ratios_and_bases_are_dealt_out_and_the_servers_own_keeps_its_name(raw: dict[str, Any], decoder: Path) -> None:
    assert list(specs_of(parse(raw)).values()) == ["ratio-0.4", "ratio-0.6", SERVER, "ratio-0.4"]
    others = {"count": 4, "bases": [str(decoder), "/a/small", "/b/small"], "ratios": None}
    assert list(specs_of(parse(changed(raw, clients=others))).values()) == [SERVER, "small", "small-3", SERVER]
    assert set(specs_of(parse(changed(raw, clients={"ratios": None}))).values()) == {SERVER}


def test_a_folder_called_as_if_it_were_cut_from_the_servers_model_is_foreign_all_the_same(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    names = [str(tmp_path / "ratio-0.4"), str(tmp_path / "emulator")]
    config = parse(changed(raw, clients={"count": 2, "ratios": None, "bases": names}))
    assert list(specs_of(config).values()) == ["own-ratio-0.4", "own-emulator"]
    with pytest.raises(ConfigError, match=r"cut from the server's, but 00 has 'own-ratio-0\.4'"):
        build(config, Plan())


def test_folders_and_texts_of_a_run_are_found_from_anywhere(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "own.txt").write_text("some text", encoding="utf-8")
    others = {"ratios": None, "bases": ["mine", "smollm2"]}
    found = grounded(parse(changed(raw, clients=others, compression={"text": "own.txt"})))
    assert found.clients.bases == [str(tmp_path / "mine"), "smollm2"]
    assert found.compression.text == str(tmp_path / "own.txt")
    assert grounded(parse(changed(raw, compression={"text": "movie"}))).compression.text == "movie"


def test_a_compressed_client_holds_factors_of_its_ratio_and_no_matrix(raw: dict[str, Any]) -> None:
    built = build(parse(raw), Plan())
    bases = built.executor.bases
    assert built.base is bases[SERVER] and built.setting.server_spec == SERVER
    for spec, ratio in (("ratio-0.4", 0.4), ("ratio-0.6", 0.6)):
        for name, layer in bases[spec].layers.items():
            m, n = layer.d_out, layer.d_in
            assert layer.inner == int(ratio * m * n / (m + n))
            linear = bases[spec].slots.layers[name].base
            assert isinstance(linear, FactoredLinear)
            assert sum(value.numel() for value in linear.parameters()) == layer.inner * (m + n)
    small, large = bases["ratio-0.4"], bases["ratio-0.6"]
    for name in small.layers:
        few, many = small.weight(name), large.weight(name)
        k = few[0].shape[1]
        assert torch.equal(few[0], many[0][:, :k]) and torch.equal(few[1], many[1][:k])  # nested
    sizes = {
        spec: sum(layer.inner * (layer.d_out + layer.d_in) * 4 for layer in one.layers.values())  # type: ignore[operator]
        for spec, one in bases.items()
        if spec != SERVER
    }
    assert built.setting.set_up == sizes
    cards = {card.id: card for card in built.setting.federation.cards}
    assert cards["00"].layers == small.layers and cards["02"].layers == built.base.layers
    assert built.partition["bases"] == {"00": "ratio-0.4", "01": "ratio-0.6", "02": SERVER, "03": "ratio-0.4"}


def test_a_second_run_does_not_decompose_again_but_another_text_or_ratio_does(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[float] = []
    true = nested.rank_layers

    def counted(*args: Any, **named: Any) -> Any:
        made.append(args[4])
        return true(*args, **named)

    monkeypatch.setattr(nested, "rank_layers", counted)
    first = build(parse(raw), Plan())
    second = build(parse(changed(raw, clients={"ranks": 1}, options={"epochs": 2})), Plan())
    assert made == [0.6]
    assert {s: b.digest for s, b in first.executor.bases.items()} == {
        s: b.digest for s, b in second.executor.bases.items()
    }
    build(parse(changed(raw, clients={"ratios": [0.4, "full"]})), Plan())
    build(parse(changed(raw, compression={"seed": 1})), Plan())
    assert made == [0.6, 0.4, 0.6]


def test_a_run_measures_groups_teacher_and_students_and_exports_them(raw: dict[str, Any], tmp_path: Path) -> None:
    result = run(raw, tmp_path / "run")
    *rounds, last = result.metrics
    assert [set(one["train"]["bases"]) for one in rounds] == [{SERVER, "ratio-0.4", "ratio-0.6"}] * 2
    assert last["phase"] == "elicitation" and set(last["personal"]["bases"]) == {SERVER, "ratio-0.4", "ratio-0.6"}
    assert set(last["global"]["further"]) == {"weak", "confidence-0.5"} and last["global"]["pooled"]["examples"] == 16
    kinds = {(row["kind"], row["direction"]) for row in result_rows(result.folder)}
    assert ("setup", "down") in kinds
    adapters = result.folder / "adapters"
    assert load_peft(adapters / "global").adapter.keys() == load_peft(adapters / "client-02").adapter.keys()
    held = load_cores(adapters / "client-00")
    assert held.cores and all(name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj") for name in held.cores)
    export(result.folder, tmp_path / "merged", client="00", merged=True)
    base = load_language_base(held.base_name, targets="all-linear")
    merged = load_language_base(tmp_path / "merged", targets="all-linear")
    for name in base.layers:
        U, V = base.weight(name)
        assert torch.allclose(merged.weight(name)[0], U @ held.cores[name] if name in held.cores else U, atol=1e-6)
        assert torch.equal(merged.weight(name)[1], V)
    export(result.folder, tmp_path / "copied", client="00")
    assert load_cores(tmp_path / "copied").cores.keys() == held.cores.keys()
    with pytest.raises(CoterieError, match="is for routed experts"):
        export(result.folder, tmp_path / "static", client="00", static=True)


def test_a_student_of_all_weights_answers_as_it_was_measured(raw: dict[str, Any], tmp_path: Path) -> None:
    config = changed(raw, rounds=1, options={"student": "full", "beside": []}, train={"lr": 0.02})
    result = run(config, tmp_path / "run")
    assert result.metrics[-1]["measures"]["students"].keys() == {"entropy-0.5"}
    adapter = load_peft(result.folder / "adapters" / "global").adapter
    assert all(term.rank == min(term.product().shape) for term in adapter.values())
    export(result.folder, tmp_path / "merged", merged=True)
    asked = ["film good", "film bad"], [["no", "yes very"], ["yes", "no"]]
    deployed, merged = (load(place).choice_scores(*asked) for place in (result.folder, tmp_path / "merged"))
    assert torch.allclose(deployed, merged, atol=1e-4)
    assert not torch.allclose(deployed, load(config["model"]["base"]).choice_scores(*asked), atol=1e-3)


def result_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]


class Breaking(Silent):
    """Ends the run after a round."""

    def __init__(self, after: int) -> None:
        self.left = after

    def round(self, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_run_that_is_broken_off_goes_on_to_the_same_bytes(raw: dict[str, Any], tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(raw, whole)
    with pytest.raises(KeyboardInterrupt):
        run(raw, parts, Breaking(1))
    with pytest.raises(KeyboardInterrupt):
        resume(parts, Breaking(1))
    resume(parts)
    names = ["metrics.jsonl", "ledger.jsonl", "partition.json"]
    names += [str(path.relative_to(whole)) for path in sorted((whole / "adapters").rglob("*")) if path.is_file()]
    assert len(names) > 8
    for name in names:
        assert (parts / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_run_does_not_go_on_with_another_compressed_model(raw: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(raw, tmp_path / "run", Breaking(1))
    place = tmp_path / "run" / "config.yaml"
    place.write_text(place.read_text(encoding="utf-8").replace("    ratio-0.4: ", "    ratio-0.4: x"), encoding="utf-8")
    with pytest.raises(ModelError, match=r"the clients' base model ratio-0\.4 is no longer what it was"):
        resume(tmp_path / "run")


def test_full_models_alone_are_a_federation_of_the_same_partition(raw: dict[str, Any]) -> None:
    mixed = build(parse(raw), Plan())
    alone = build(
        parse(changed(raw, method="fedit", options={}, federation={"only": "full"}, clients={"count": 6})), Plan()
    )
    assert [card.id for card in alone.setting.federation.cards] == ["02", "05"]
    assert list(alone.executor.bases) == [SERVER]
    part = build(parse(changed(raw, method="fedit", federation={"only": "full"}, options={})), Plan())
    assert part.setting.sites["02"].data["train"].rows.equal(mixed.setting.sites["02"].data["train"].rows)  # type: ignore[union-attr]


def test_what_a_compressed_client_leaves_predicts_as_it_was_measured(
    raw: dict[str, Any], tmp_path: Path, toy_assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder's cores and a classifier's, as they are and merged into whole models."""
    monkeypatch.setenv("COTERIE_CACHE", str(toy_assets))
    language = changed(raw, rounds=1)
    labelled = changed(
        language,
        task={"name": "movie", "path": None, "test_limit": 20, "train_limit": 200},
        model={"base": "minilm"},
        compression={"samples": 6, "length": 24},
    )
    for name, config in (("language", language), ("labelled", labelled)):
        result = run(config, tmp_path / name)
        export(result.folder, tmp_path / f"{name}-merged", client="00", merged=True)
        within, merged = load(result.folder, client="00"), load(tmp_path / f"{name}-merged")
        if name == "language":
            asked = ["film good", "film bad"], [["no", "yes very"], ["yes", "no"]]
            found = [one.choice_scores(*asked) for one in (within, merged)]
        else:
            found = [one.logits(["a fine film", "dull"]) for one in (within, merged)]
        assert torch.allclose(found[0], found[1], atol=1e-4)
        assert within.is_language == merged.is_language == (name == "language")


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"method": "fedit", "options": {}},
            "FedIT trains one base model, but 00 has 'ratio-0.4' and 01 has 'ratio-0.6'",
        ),
        ({"clients": {"ratios": [0.4, 1.2]}}, r"clients\.ratios"),
        ({"clients": {"ratios": [0.0, "full"]}}, r"clients\.ratios"),
        ({"clients": {"bases": ["smollm2"]}}, "give ratios or bases, not both"),
        ({"clients": {"ratios": [0.4]}, "federation": {"only": "full"}}, "federation.only=full leaves no client"),
        ({"compression": {"method": "svd-lm"}}, "there is no compressor 'svd-lm'.*svd-llm"),
        ({"compression": {"layers": ["nothing"]}}, "no linear layer is called 'nothing'"),
        ({"compression": {"samples": 4000}}, "the calibration text is too short"),
        (
            {"model": {"targets": ["up_proj", "q_proj"]}},
            "FedSLM fuses all compressed layers, and .* is not among model.targets",
        ),
        ({"options": {"trained": ["nothing"]}}, "has no compressed layer 'nothing'"),
        (
            {"server_data": {"unlabeled": None, "public": 4}},
            r"FedSLM needs unlabeled data .* server_data\.unlabeled=200$",
        ),
        ({"server_data": {"unlabeled": None}}, r"FedSLM needs unlabeled data .* server_data\.unlabeled=200$"),
        ({"clients": {"ratios": [0.01, "full"]}}, "would keep a rank below 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    raw: dict[str, Any], sections: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(CoterieError, match=told) as caught:
        run(changed(raw, **sections), tmp_path / "refused")
    assert "\n" not in str(caught.value)


def test_foreign_models_are_refused_by_a_method_that_fuses_and_held_by_one_that_does_not(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    other = write_decoder(tmp_path / "gpt", "gpt2")
    clients = {"ratios": None, "bases": [raw["model"]["base"], str(other)]}
    with pytest.raises(ConfigError, match="fuses models that were cut from the server's, but 01 has 'gpt'"):
        build(parse(changed(raw, clients=clients)), Plan())
    built = build(parse(changed(raw, method="local-only", clients=clients, options={})), Plan())
    assert set(built.executor.bases) == {SERVER, "gpt"} and set(built.setting.own_tests) == {"gpt"}
    cards = {card.id: card for card in built.setting.federation.cards}
    assert cards["01"].layers == built.executor.bases["gpt"].layers != cards["00"].layers


def test_a_model_that_is_compressed_already_is_not_compressed_again(raw: dict[str, Any]) -> None:
    built = build(parse(raw), Plan())
    again = changed(raw, model={"base": built.places["ratio-0.4"]})
    with pytest.raises(ModelError, match="is compressed already"):
        build(parse(again), Plan())
