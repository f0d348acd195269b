"""FedSEE's geometry beyond the exact model, computed anew on a toy base: what is trained, told, kept and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import reproductions as tool
import torch
from experiments.reproducing import computed
from torch import Tensor

from coterie.errors import ConfigError
from coterie.experiments import reproduce as module
from coterie.experiments.config import Config, resolve
from coterie.experiments.papers import fedsee_geometry as geometry
from coterie.experiments.papers import fedsee_geometry_training as training
from coterie.experiments.papers.claims import judged
from coterie.experiments.papers.definition import Definition, definition
from coterie.experiments.papers.panels import VALUE
from coterie.experiments.papers.reading import cell
from coterie.maths.keys import root_key
from coterie.protocol import Model
from coterie.theory.fedsee.geometry import barycentres
from coterie.training.asks import Ask, Done
from coterie.training.executor import Executor
from coterie.wire.codec import decode

pytest.importorskip("matplotlib")

NAME = "fedsee/geometry"
RECIPE = training.Recipe(init_steps=2, router_steps=2, router_lr=2.0, beta=0.1, compared="*.value", margin=-100.0)
POINTS = definition(NAME).scales["small"].config["run"]["partition"]["weights"]


def run_settings(base: Path, reviews: Path) -> dict[str, Any]:
    parts = [{"name": name, "task": "file", "path": str(reviews), "test_limit": 30} for name in "abc"]
    return {
        "task": {"name": "mixture", "parts": parts},
        "model": {"base": str(base), "targets": ["query", "value"], "max_length": 16},
        "partition": {"validation_size": 8},
        "train": {"steps": 3, "batch_size": 4, "lr": 0.02},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 4, "threads": 1},
    }


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tiny_base: Path, reviews_csv: Path) -> Definition:
    """The definition on toy data, with steps that take a moment; no expert is too weak."""
    whole = definition(NAME)
    small = whole.scales["small"]
    run = module.merged(small.config["run"], run_settings(tiny_base, reviews_csv))
    config = {**small.config, **{name: getattr(RECIPE, name) for name in vars(RECIPE)}, "run": run}
    made = whole.model_copy(update={"scales": {"small": small.model_copy(update={"config": config})}})
    monkeypatch.setattr(module, "definition", lambda name: made)
    return made


@pytest.fixture
def config(tiny: Definition) -> Config:
    return resolve(tiny.scales["small"].config["run"], [])


def blocks(seed: int) -> tuple[list[Tensor], Tensor]:
    """Two layers' experts, and the mixtures of the definition."""
    key = root_key(seed)
    alpha = torch.tensor(POINTS, dtype=torch.float64)
    return [key.fold(layer).normal((3, 6, 2), dtype=torch.float64) for layer in ("one", "two")], alpha


def test_exact_mixtures_of_the_experts_leave_no_residual_and_give_their_shares_back() -> None:
    experts, alpha = blocks(0)
    rows, drawn = geometry.compared(experts, [barycentres(alpha, one) for one in experts], alpha)
    assert rows["residual-true"]["all"] < 1e-12 and rows["residual-affine"]["all"] < 1e-12
    assert rows["residual-uniform"]["all"] > 0.1 and rows["residual-shuffled"]["all"] > 0.1
    assert rows["correlation"]["all"] == pytest.approx(1, abs=1e-6)
    assert rows["coordinate-error"]["all"] < 1e-6 and rows["absent-mass"]["all"] < 1e-6
    assert rows["coordinate-error-uniform"]["all"] == pytest.approx(float((alpha - 1 / 3).abs().mean()))
    assert drawn["kinds"] == ["pure"] * 3 + ["edge"] * 3 + ["interior"] * 3
    assert len(drawn["points"]) == 2 * 9 * 3 and len(drawn["planes"]) == 2
    for triangle, crosses, clients in drawn["planes"]:
        torch.testing.assert_close(torch.tensor(crosses), torch.tensor(clients))
        torch.testing.assert_close(torch.tensor(clients[:3]), torch.tensor(triangle), atol=1e-12, rtol=0)


def test_noise_off_the_plane_is_told_by_the_residual_alone() -> None:
    experts, alpha = blocks(1)
    clients = []
    for layer, one in enumerate(experts):
        noise = root_key(2).fold(layer).normal((9, 6, 2), dtype=torch.float64)
        edges = torch.linalg.qr((one[1:] - one[0]).flatten(1).T).Q
        noise = noise - ((noise.flatten(1) @ edges) @ edges.T).view_as(noise)
        clients.append(barycentres(alpha, one) + noise)
    rows, drawn = geometry.compared(experts, clients, alpha)
    assert rows["residual-affine"]["all"] > 0.1
    assert rows["residual-true"]["all"] == pytest.approx(rows["residual-affine"]["all"])
    assert rows["coordinate-error"]["all"] < 1e-6
    for _, crosses, places in drawn["planes"]:
        torch.testing.assert_close(torch.tensor(crosses), torch.tensor(places))


def test_clients_of_the_wrong_tasks_are_nearer_to_the_shuffled_mixture_than_to_their_own() -> None:
    experts, alpha = blocks(3)
    rows, _ = geometry.compared(experts, [barycentres(alpha.roll(1, dims=1), one) for one in experts], alpha)
    assert rows["residual-shuffled"]["all"] < rows["residual-true"]["all"]
    assert rows["correlation"]["all"] < 0 and rows["absent-mass"]["all"] > 0.3


def test_experts_and_clients_share_a_frozen_a_and_a_base_that_took_the_first_round_in(
    tmp_path: Path, config: Config
) -> None:
    of = training.federation(config)
    before = {name: of.built.base.weight(name) for name in of.built.base.layers}
    trained = training.train(of, RECIPE, training.Shelf(tmp_path, lambda more: None))
    torch.testing.assert_close(of.alpha, torch.tensor(POINTS, dtype=torch.float64), atol=0.02, rtol=0)
    pairs = [decode((tmp_path / f"init-{name}.safetensors").read_bytes())["lora"] for name in of.clients]
    for layer, A in trained.A.items():
        torch.testing.assert_close(A, sum(pair[layer].A for pair in pairs) / 9)
        B = sum(pair[layer].B for pair in pairs) / 9
        torch.testing.assert_close(of.built.base.weight(layer), before[layer] + 2 * B @ A, atol=1e-6, rtol=1e-5)
        assert float(B.norm()) > 0
        for adapter in (*trained.experts, *trained.clients):
            assert torch.equal(adapter[layer].A, A) and float(adapter[layer].B.norm()) > 0
    assert (len(trained.experts), len(trained.clients)) == (3, 9)


def test_of_a_routed_model_the_router_alone_is_trained_and_a_constant_one_is_its_expert(
    tmp_path: Path, config: Config
) -> None:
    of = training.federation(config)
    shelf = training.Shelf(tmp_path, lambda more: None)
    trained = training.train(of, RECIPE, shelf)
    found = training.routers(of, trained, RECIPE, shelf)
    assert set(found) == set(training.TARGETS) and {len(models) for models in found.values()} == {9}
    differ = False
    for uniform, mixture in zip(*found.values(), strict=True):
        for layer, term in mixture["experts"].items():
            assert all(
                torch.equal(term.B[m], expert[layer].B) and torch.equal(term.A[0], expert[layer].A)
                for m, expert in enumerate(trained.experts)
            )
            differ |= not torch.equal(term.router, uniform["experts"][layer].router)
    assert differ
    data = of.data(of.clients[0], "validation")
    vertex = training.static(trained, torch.tensor([0.0, 1.0, 0.0]))
    one, other = of.scores([(vertex, data), (Model(lora=trained.experts[1]), data)])
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    usage = training.usage(of, found["mixture"][0], of.clients[0])
    assert usage.shape == (3,) and float(usage.sum()) == pytest.approx(1)


def test_a_page_has_every_table_a_picture_and_verdicts(tmp_path: Path, tiny: Definition) -> None:
    told: list[tuple[str, int, int]] = []
    done = computed(NAME, tmp_path, [], seeds=[0, 1], advance=lambda *what: told.append(what))
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result == json.loads(json.dumps(done.result))
    for row, entry in result["rows"].items():
        columns = tiny.panels[tiny.rows[row].panel].columns
        assert set(entry["here"]) == set(columns), row
        for found in entry["here"].values():
            assert found[VALUE]["values"].keys() == {"0", "1"} and None not in found[VALUE]["values"].values()
    value = {row: entry["here"].get("all", {}).get(VALUE, {}).get("mean") for row, entry in result["rows"].items()}
    assert value["residual-affine"] <= value["residual-convex"] + 1e-9 <= value["residual-true"] + 2e-9
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "| true mixture: paper | 0.493 ± 0.023 |" in text and "nan" not in text and "oid**" not in text
    assert "| base model | distilroberta-base | tiny | differs |" in text and "| clients | 9 | 9 | same |" in text
    assert "one seed" not in text and {claim["seeds"] for claim in result["claims"]} == {2}
    picture = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "layer 1: the experts&#x27;" in picture or "layer 1: the experts'" in picture
    assert "target: mixture" in picture and str(tmp_path) not in picture
    assert [what for what in told if what[1] == what[2]] == [("seed 0", 48, 48), ("seed 1", 48, 48)]
    (tmp_path / "results").mkdir()
    taken = tool.take(tmp_path, tmp_path / "results")
    assert taken.name == "fedsee-geometry-small.json" and taken.with_suffix(".png").is_file()


def test_an_expert_that_hardly_learnt_makes_all_of_it_void(tmp_path: Path, tiny: Definition) -> None:
    tiny.scales["small"].config["margin"] = 101.0
    done = computed(NAME, tmp_path, [], seeds=[0])
    assert {claim["verdict"] for claim in done.result["claims"]} == {"not tested"}
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "**void: each expert must be at least 101 points above" in text and "a (seed 0)" in text
    assert "- **holds" not in text and "| true mixture: here | 0." in text
    # One weak expert of one seed is enough.
    values = {seed: {"tasks": ["a", "b", "c"], "rows": {"margin": {"expert-1": 12.0}}} for seed in ("0", "1")}
    assert geometry._void(values, 10.0) == ""
    values["1"]["rows"] = {"margin": {"expert-1": 12.0, "expert-3": 9.9}}
    assert "c (seed 1): 9.9" in geometry._void(values, 10.0)


class Killed(BaseException):
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of all that is trained; an entry "kill at N" ends the process after so many."""
    names: list[str] = []
    answer = Executor.answer

    def counting(self: Executor, asks: Sequence[Ask]) -> list[Done | Exception]:
        limit = next((int(name.split()[-1]) for name in names if name.startswith("kill at")), 1000)
        if len(names) - 1 >= limit:
            raise Killed
        names.extend(ask.party for ask in asks if ask.party != "score")
        return answer(self, asks)

    monkeypatch.setattr(Executor, "answer", counting)
    yield names


def test_a_computation_that_was_killed_goes_on_and_ends_with_the_same_values(
    tmp_path: Path, tiny: Definition, asked: list[str]
) -> None:
    computed(NAME, tmp_path / "whole", [], seeds=[0])
    every = list(asked)
    assert len(every) == len(set(every)) == 9 + 12 + 18
    asked[:] = ["kill at 14"]
    with pytest.raises(Killed):
        computed(NAME, tmp_path / "killed", [], seeds=[0])
    before = asked[1:]
    assert 14 <= len(before) < 39
    asked.clear()
    computed(NAME, tmp_path / "killed", [], seeds=[0])
    assert sorted(before + asked) == sorted(every)
    whole, killed = (json.loads((tmp_path / place / "values.json").read_text()) for place in ("whole", "killed"))
    assert whole == killed
    asked.clear()
    computed(NAME, tmp_path / "killed", [], seeds=[0])
    assert not asked


def test_what_was_trained_under_other_settings_is_not_taken(tmp_path: Path, tiny: Definition) -> None:
    computed(NAME, tmp_path, [], seeds=[0])
    with pytest.raises(ConfigError, match="other settings"):
        computed(NAME, tmp_path, ["train.steps=4"], seeds=[0])
    assert json.loads((tmp_path / "result.json").read_text())["command"].endswith("--scale small --seeds 0")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["partition={kind: mixture, alpha: 0.5, weights: null}"], "prescribed mixtures"),
        (["model.targets=[query]"], "no adapted layer fits '\\*.value'"),
    ],
)
def test_settings_that_have_no_geometry_are_refused_in_one_line(
    settings: list[str], complaint: str, tmp_path: Path, tiny: Definition
) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        computed(NAME, tmp_path, settings, seeds=[0])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_both_scales_are_of_nine_clients_and_two_hundred_and_forty_steps(scale: str) -> None:
    given = definition(NAME).scales[scale].config
    recipe = training.Recipe(**{name: value for name, value in given.items() if name != "run"})
    config = geometry._settings(given["run"], [], 1)
    assert (config.clients.count, config.clients.ranks, config.train.steps, recipe.margin) == (9, 4, 240, 10)
    assert (config.seed, config.federation.head, config.partition.weights) == (1, "frozen", POINTS)
    alpha = torch.tensor(POINTS)
    assert geometry.kinds(alpha) == ["pure"] * 3 + ["edge"] * 3 + ["interior"] * 3
    torch.testing.assert_close(alpha.sum(dim=0), torch.full((3,), 3.0))
    assert "auto" not in (config.execution.dtype, config.execution.attention, config.execution.clients_per_step)


def test_rows_and_columns_are_those_of_the_panels() -> None:
    whole = definition(NAME)
    assert {column for panel in whole.panels.values() for column in panel.columns} == set(whole.columns)
    for entry in whole.rows.values():
        assert set(entry.paper) <= set(whole.panels[entry.panel].columns)
    for claim in whole.claims:
        places = {whole.rows[row].panel for row in (*claim.first, *claim.second)}
        assert len(places) == 1 and set(claim.columns) <= set(whole.panels[places.pop()].columns) and claim.columns


def test_the_paper_s_own_figures_bear_out_what_it_says() -> None:
    whole = definition(NAME)
    reported = {
        row: {column: {VALUE: cell({"": mean})} for column, (mean, _) in entry.paper.items()}
        for row, entry in whole.rows.items()
    }
    verdicts = [claim["verdict"] for claim in judged(whole, reported)]
    assert set(verdicts) == {"holds", "cannot be told"} and verdicts.count("cannot be told") == 1
