"""Models with routed experts: what a run writes, what loading and exporting make of it, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.world import key, text, world
from engines.world import play as play_run
from protocol.test_routed import KINDS, term
from serve.conftest import settings

import coterie
from coterie.adapters.peft_folder import load_peft, save_peft
from coterie.adapters.routed_folder import RULE, is_routed, load_routed, routed_terms, save_routed
from coterie.algorithms import Algorithm, FedLEASE, FedSEE
from coterie.engines.evaluation import site_models
from coterie.engines.scoring import Evaluation
from coterie.engines.traffic import Traffic
from coterie.errors import CoterieError, ModelError
from coterie.experiments.adapters import write_adapters
from coterie.experiments.exports import _mixed, export
from coterie.experiments.observers import Silent
from coterie.protocol import Adapter, LowRank, Model, Predict
from coterie.training.asks import Ask, Done
from coterie.wire.codec import encode
from coterie.wire.ledger import Ledger

TEXTS = ["a fine film", "dull and weak", "the plot was lovely and the cast superb"]


class Listening(Silent):
    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture(scope="module")
def clustered(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path) -> tuple[Path, list[str]]:
    """A finished run with two experts, and what it told. Read only."""
    listening = Listening()
    content = settings(tiny_base, reviews_csv, method="fedlease", clients={"count": 3, "ranks": 2})
    folder = coterie.run(content, tmp_path_factory.mktemp("runs") / "clustered", listening).folder
    return folder, listening.told


def saver(folder: Path, base_name: str = "toy") -> Any:
    """Writes a PEFT folder of a language model, which needs no head."""

    def save(name: str, adapter: Adapter) -> None:
        save_peft(folder / name, adapter, base_name=base_name, head=None, task_type="CAUSAL_LM")

    return save


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_back_the_model_that_was_saved(kind: dict[str, Any], tmp_path: Path) -> None:
    terms = {name: term(seed, dtype=torch.float32, **kind) for seed, name in enumerate(("a.w", "b.w"))}
    shared = {"a.w": LowRank(key("B").normal((5, 1)), key("A").normal((1, 4)), 0.7)}
    model = Model(experts=terms, shared=shared)
    save_routed(tmp_path / "m", routed_terms(model), {"shared": shared}, saver(tmp_path / "m"))
    assert is_routed(tmp_path / "m")
    assert encode(load_routed(tmp_path / "m").model) == encode(model)


def test_damaged_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    terms = {"a.w": term(dtype=torch.float32, outputs=[0, 1, 2, 1, 1], top=3)}
    save_routed(tmp_path / "m", {"experts": terms}, {}, saver(tmp_path / "m"))
    rule = json.loads((tmp_path / "m" / RULE).read_text(encoding="utf-8"))
    for changed in (
        {"format": 2},
        {"routed": {}},
        {"terms": ["none"]},
        {"routed": {"other": rule["routed"]["experts"]}},
    ):
        (tmp_path / "m" / RULE).write_text(json.dumps(rule | changed), encoding="utf-8")
        with pytest.raises(ModelError) as caught:
            load_routed(tmp_path / "m")
        assert "\n" not in str(caught.value)


def test_only_terms_routed_in_all_their_layers_are_taken_for_such() -> None:
    plain = LowRank(torch.zeros(5, 1), torch.zeros(1, 4))
    assert routed_terms(Model(lora={"a": plain})) == {}
    assert routed_terms(Model(experts={"a": plain, "b": term()})) == {}
    assert set(routed_terms(Model(lora={"a": plain}, experts={"a": term()}))) == {"experts"}


def test_a_run_says_in_one_line_what_it_exported(clustered: tuple[Path, list[str]]) -> None:
    folder, told = clustered
    (line,) = told
    assert "\n" not in line and "several PEFT folders each for client-00, client-01, client-02, which" in line
    assert not (folder / "adapters/global").exists()
    parts = sorted(path.name for path in (folder / "adapters/client-01").iterdir() if path.is_dir())
    assert parts == ["experts-0", "experts-1"]
    assert load_peft(folder / "adapters/client-01/experts-0").head


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(FedLEASE(experts=2), id="fedlease"),
        pytest.param(FedSEE(steps=2, examples=8), id="fedsee"),
        pytest.param(FedSEE(steps=2, examples=8, inference=1), id="fedsee-one"),
    ],
)
def test_a_loaded_site_gives_the_logits_of_the_engines_model(algorithm: Algorithm, tmp_path: Path) -> None:
    public = {f"public/{name}": text(16, seed=50 + i) for i, name in enumerate("xy")}
    run = world(algorithm, ranks=(2, 2, 2), rounds=2, server_data=public if algorithm.traits.server_data else {})
    progress = play_run(run)[-1].progress
    write_adapters(run, progress, {"base": "toy"}, ["no", "yes"], tmp_path)
    view = Evaluation(run.setting, run.executor, run.store, 3, "export", Traffic(Ledger(), 3, "export", False))
    data = text(12, seed=5)
    for name, model, head in site_models(view, progress.state, progress.heads, {}):
        found = load_routed(tmp_path / f"client-{name}")
        logits = []
        for one, own in ((model, head), (found.model, next(iter(found.parts.values())).head)):
            (done,) = run.executor.answer([Ask(name, Predict(one, "test"), "base", own, data, key("p"))])
            assert isinstance(done, Done)
            logits.append(done.answer.logits)  # type: ignore[union-attr]
        assert torch.equal(logits[0], logits[1])


def test_a_run_s_site_an_export_and_a_copy_predict_alike(clustered: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = clustered
    export(folder, tmp_path / "out", client="02")
    shutil.copytree(folder / "adapters/client-02", tmp_path / "copy")
    first = coterie.load(folder, client="02").logits(TEXTS)
    for place in (tmp_path / "out", tmp_path / "copy", folder / "adapters/client-02"):
        assert torch.equal(coterie.load(place).logits(TEXTS), first)
    one_expert = coterie.load(folder / "adapters/client-02/experts-0").logits(TEXTS)
    assert not torch.allclose(one_expert, first, atol=1e-6)


def test_no_single_model_holds_them(clustered: tuple[Path, list[str]], tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="which no single model holds"):
        export(clustered[0], tmp_path / "merged", client="01", merged=True)


@pytest.fixture(scope="module")
def mixed_tasks(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path, reviews_csv: Path) -> Path:
    """A finished FedSEE run of two tasks. Read only."""
    content = settings(tiny_base, reviews_csv, method="fedsee", clients={"count": 2, "ranks": 2})
    parts = [{"name": name, "task": "file", "path": str(reviews_csv), "test_fraction": 0.3} for name in ("one", "two")]
    content["task"] = {"name": "mixture", "parts": parts}
    content["partition"] = {"kind": "mixture", "weights": [[0.75, 0.25], [0.25, 0.75]], "minimum": 1, "test_size": 4}
    content["server_data"] = {"public": 8}
    content["options"] = {"steps": 5, "examples": 4, "inference": 2}
    return coterie.run(content, tmp_path_factory.mktemp("runs") / "mixed", Silent()).folder


def test_the_static_fallback_is_the_experts_in_the_shares_that_the_client_contributed(
    mixed_tasks: Path, tmp_path: Path
) -> None:
    export(mixed_tasks, tmp_path / "static", client="00", static=True)
    routed = load_routed(mixed_tasks / "adapters" / "client-00").model
    last = json.loads((mixed_tasks / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    shares = last["measures"]["contributions"]["00"]
    assert set(shares) == {"one", "two"} and sum(shares.values()) == pytest.approx(1)
    found = load_peft(tmp_path / "static").adapter
    for layer, experts in routed["experts"].items():
        products = [share * experts.expert(m).dense() for m, share in enumerate(shares.values())]
        wanted = sum(products) + routed["shared"][layer].dense()
        torch.testing.assert_close(found[layer].dense(), wanted, atol=1e-6, rtol=1e-5)


def test_experts_that_a_client_may_not_use_have_no_share_in_the_static_fallback() -> None:
    one = term()
    allowed = torch.ones(one.experts, dtype=torch.bool)
    allowed[0] = False
    shares = [0.5] + [0.5 / (one.experts - 1)] * (one.experts - 1)
    found = _mixed(replace(one, allowed=allowed, outputs=None), shares)
    wanted = sum(one.expert(m).dense() for m in range(1, one.experts)) / (one.experts - 1)
    torch.testing.assert_close(found.dense(), wanted)
    even = _mixed(replace(one, allowed=allowed, outputs=None), [1.0] + [0.0] * (one.experts - 1))
    torch.testing.assert_close(even.dense(), wanted)  # its only contribution was to an expert that it may not use


def test_a_static_fallback_without_shares_or_experts_is_refused(
    clustered: tuple[Path, list[str]], mixed_tasks: Path, tmp_path: Path
) -> None:
    with pytest.raises(CoterieError, match="does not tell in which shares client 00"):
        export(clustered[0], tmp_path / "x", client="00", static=True)
    with pytest.raises(CoterieError, match="--static excludes --merged"):
        export(mixed_tasks, tmp_path / "x", client="00", static=True, merged=True)
    assert not (tmp_path / "x").exists()
