"""Models with routed experts: what a run writes, what loading and exporting make of it, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.world import base, key, text, world
from engines.world import play as play_run
from protocol.test_routed import KINDS, term
from serve.conftest import settings

import coterie
from coterie.adapters.peft_folder import load_peft, save_peft
from coterie.adapters.routed_folder import RULE, is_routed, load_routed, routed_terms, save_routed
from coterie.algorithms import Algorithm, FedLEASE, FedSEE
from coterie.engines.evaluation import Evaluation, site_models
from coterie.engines.traffic import Traffic
from coterie.errors import CoterieError, ModelError
from coterie.experiments.adapters import write_adapters
from coterie.experiments.exports import export
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
    write_adapters(run, progress, base(), "toy", ["no", "yes"], tmp_path)
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
