"""Tables and figures of the papers: sound as data, computed on a toy world, told as it is."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import reproductions as tool
import yaml
from experiments.reproducing import computed

from coterie.algorithms import METHODS
from coterie.algorithms.rank_update import RankUpdate
from coterie.cli.main import main
from coterie.errors import ConfigError
from coterie.experiments import reproduce as module
from coterie.experiments.config import load, resolve
from coterie.experiments.methods import algorithm
from coterie.experiments.papers import curves
from coterie.experiments.papers.claims import _holds, judged
from coterie.experiments.papers.definition import at_scale, definition, names
from coterie.experiments.papers.reading import FIGURES, cell
from coterie.experiments.papers.server_times import random_factors, server_step
from coterie.experiments.papers.setting import LABELS, lines
from coterie.experiments.papers.writing import claims, differences, markdown, tables
from coterie.experiments.reproduce import plan
from coterie.maths.keys import root_key

ROOT = Path(__file__).parents[2]
SIZES = [(3, 4), (10, 4), (20, [2, 4, 16])]
"""Clients and ranks of FedPA-LoRA's tables."""
ALL = [
    *("fedpa/figure1", "fedpa/table1", "fedpa/table11", "fedpa/table2", "fedpa/table4"),
    *("fedsee/geometry", "fedsee/table11", "fedsee/table2", "fedsee/theory"),
    *("fedslm/table2", "fedslm/table5"),
    *("sefora/figure1", "sefora/figure2", "sefora/table2", "sefora/table3"),
]


def test_all_are_found_in_the_package() -> None:
    assert names() == ALL


@pytest.mark.parametrize("name", ALL)
def test_every_name_in_a_definition_is_one_of_its_own(name: str) -> None:
    whole = definition(name)
    assert set(whole.figures) <= set(FIGURES) and set(whole.setting) <= set(LABELS)
    assert set(whole.scales) == {"small", "paper"}
    assert set(whole.drawn) <= set(FIGURES)
    assert not whole.mixtures or (whole.mixtures in whole.rows and "mixture_slope" in whole.figures)
    for row in whole.rows.values():
        assert set(row.paper) <= set(whole.columns)
        assert row.extra == (not row.paper) or whole.kind == "curves"
        assert bool(row.operation) == (whole.kind == "server")
        assert (row.method is None) == (whole.kind in module.WITHOUT_RUNS) == (row.variant not in whole.variants)
    for scale in whole.scales.values():
        assert {*scale.columns, *scale.only} <= set(whole.columns) and set(scale.left_out) <= set(whole.rows)
        assert {tuple(cell.split("/")) for cell in scale.cells} <= set(product(whole.columns, whole.variants))
        judged(at_scale(whole, scale), {})
    for claim in whole.claims:
        if claim.untested:
            assert not (claim.figure or claim.first or claim.second or claim.columns or claim.than)
            continue
        assert claim.figure in whole.figures
        assert {*claim.first, *claim.second} <= set(whole.rows)
        assert {*claim.columns, *claim.than, *claim.than.values()} <= set(whole.columns)
        assert claim.first and bool(claim.second or claim.than) == (claim.sense not in ("zero", "below", "above"))


@pytest.mark.parametrize("name", [name for name in ALL if definition(name).kind != "server"])
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_run_of_every_scale_has_settings_that_can_be_meant(name: str, scale: str) -> None:
    whole = definition(name)
    blocks = plan(whole, whole.scales[scale])
    folders = [block.folder for block in blocks]
    assert len(set(folders)) == len(folders)
    for block in blocks:
        for method in block.methods:
            config = resolve(block.config, [(["method"], method)])
            made = algorithm(config.method, config.options)
            if name.startswith("sefora"):
                assert (config.federation.weights, config.lora.scale, config.train.optimizer) == (
                    "examples",
                    0.1,
                    "adam",
                )
                assert not isinstance(made, RankUpdate) or made.update_every in (None, config.rounds // 5)
                continue
            if name.startswith("fedslm"):
                rank = 8 if method == "fedmkt" else 16
                assert (config.federation.weights, config.clients.count, config.clients.ranks) == ("examples", 10, rank)
                assert config.lora.alpha == 2 * rank
                told = config.clients.ratios and [config.clients.ratios.count(ratio) for ratio in (0.4, 0.6, "full")]
                assert told == (None if method == "fedbiot" else [3, 4, 3])
                of_unequal_models = method in ("fedslm", "fedmkt", "fedproto", "fedbiot")
                assert of_unequal_models == (config.federation.only is None)
                continue
            if name.startswith("fedsee"):
                assert (config.federation.head, config.federation.weights) == ("frozen", "uniform")
                assert (config.clients.ranks, config.lora.alpha) == (4, 8)
                if scale == "paper":
                    assert config.partition.test_size == 200
                    assert (config.rounds, config.train.epochs, config.train.batch_size) == (10, 5, 64)
                continue
            assert config.federation.weights == "uniform" and (config.clients.count, config.clients.ranks) in SIZES
            if scale == "paper":
                assert (config.rounds, config.train.steps, config.train.batch_size) == (250, 20, 128)
                grid = {5e-4, 1e-3, 5e-3, 1e-2, 2e-2}
                assert config.train.lr in grid
                assert not method.startswith("fedpa") or config.options["lam"] in {0.1, 1.0, 2.0, 5.0, 10.0}
    left_out = whole.scales[scale].left_out
    here = {row.method for label, row in whole.rows.items() if row.method in METHODS and label not in left_out}
    assert {method for block in blocks for method in block.methods} == here


def test_the_paper_s_rates_follow_its_table_5() -> None:
    whole = definition("fedpa/table2")
    found = {}
    for block in plan(whole, whole.scales["paper"]):
        for method in block.methods:
            config = resolve(block.config, [(["method"], method)])
            found[method, config.partition.beta] = config.train.lr, config.options.get("lam")
    assert [found["fedit", beta][0] for beta in (100, 1, 0.5, 0.1)] == [1e-2, 5e-3, 1e-2, 1e-2]
    assert [found["flexlora", beta][0] for beta in (100, 1, 0.5, 0.1)] == [5e-3, 2e-2, 1e-2, 1e-2]
    assert [found["ffa-lora", beta][0] for beta in (100, 1, 0.5, 0.1)] == [2e-2] * 4
    assert [found["fedpa-lora", beta] for beta in (100, 1, 0.5, 0.1)] == [(2e-2, lam) for lam in (1, 1, 5, 1)]


def test_the_rates_of_table_1_follow_the_paper_s_tables_5_and_6() -> None:
    whole = definition("fedpa/table1")
    found: dict[tuple[str, int], list[tuple[float, float | None]]] = {}
    for block in plan(whole, whole.scales["paper"]):
        for method in block.methods:
            if method in ("rolora", "hetlora") or (method == "fedpa-lora" and block.folder.endswith("local")):
                config = resolve(block.config, [(["method"], method)])
                pair = config.train.lr, config.options.get("lam")
                found.setdefault((method, config.clients.count), []).append(pair)
    assert found["rolora", 10] == [(lr, None) for lr in (1e-2, 5e-3, 2e-2, 5e-3, 5e-3)]
    assert found["hetlora", 20] == [(lr, None) for lr in (2e-2, 1e-2, 1e-2, 1e-2, 2e-2)]
    assert found["fedpa-lora", 10] == [(2e-2, lam) for lam in (1, 2, 2, 1, 2)]
    assert found["fedpa-lora", 20] == [(1e-2, 2), (1e-2, 2), (2e-2, 1), (1e-2, 1), (2e-2, 1)]


@pytest.mark.parametrize("name", ["fedpa/table1", "fedpa/table2", "fedpa/table4", "fedpa/table11"])
def test_the_paper_s_own_figures_bear_out_what_it_says(name: str) -> None:
    whole = definition(name)
    reported = {
        row: {
            column: {figure: cell({"": mean}) for figure in whole.figures} for column, (mean, _) in entry.paper.items()
        }
        for row, entry in whole.rows.items()
    }
    for claim in judged(whole, reported):
        ours = set(claim["missing"]) & {entry.title for entry in whole.rows.values() if entry.extra}
        assert claim["verdict"] == ("cannot be told" if ours else "holds"), claim


@pytest.mark.parametrize(
    ("flexlora", "verdict", "seeds"),
    [
        ({"0": 3.0, "1": 4.0}, "holds", 2),
        ({"0": 1.0, "1": 9.0}, "holds on average", 2),
        ({"0": 1.0, "1": 1.5}, "does not hold", 2),
        ({"0": 2.9, "1": 0.1}, "does not hold on average", 2),
        ({"0": 3.0}, "holds", 1),
    ],
)
def test_a_statement_holds_only_if_every_seed_says_so(flexlora: dict[str, float], verdict: str, seeds: int) -> None:
    whole = definition("fedpa/figure1")
    fedpa = dict.fromkeys(flexlora, 2.0)
    cells = {
        row: {"mnli": {"aggregation": cell(values)}} for row, values in (("fedpa-lora", fedpa), ("flexlora", flexlora))
    }
    least = next(one for one in judged(whole, cells) if one["says"] == "FedPA-LoRA loses least in aggregation")
    assert (least["verdict"], least["seeds"]) == (verdict, seeds)
    told = claims({"kind": "curves", "claims": [least]})[0]
    assert f"**{verdict}**" in told and ("one seed" in told) == (seeds == 1)


def test_a_statement_holds_in_part_and_names_what_is_missing() -> None:
    whole = definition("fedpa/figure1")
    cells = {
        row: {"mnli": {"aggregation": cell({"0": value, "1": value})}}
        for row, value in (("fedpa-lora", 2.0), ("flexlora", 1.0), ("fedit", 3.0))
    }
    by_says = {claim["says"]: claim for claim in judged(whole, cells)}
    least = by_says["FedPA-LoRA loses least in aggregation"]
    assert (least["verdict"], least["agree"], least["of"]) == ("holds in part", 1, 2)
    assert least["missing"] == ["FedRot-LoRA"]
    assert "no: FedPA-LoRA 2, FlexLoRA 1, 0 of 2 seeds" in least["comparisons"]
    assert by_says["FedRot-LoRA loses less in aggregation than FedIT"]["verdict"] == "cannot be told"


def test_differences_are_taken_seed_by_seed_where_both_rows_have_the_seed() -> None:
    def row(title: str, values: dict[str, float], paper: list[float | None]) -> dict[str, Any]:
        here = {"a": {"own": cell(values)}}
        return {"title": title, "method": title, "heads": "frozen", "paper": {"a": paper}, "here": here} | EMPTY

    rows = {
        "ours": row("ours", {"1": 0.75, "2": 0.5}, [0.8, 0.1]),
        "other": row("other", {"1": 0.5, "2": 0.375, "3": 0.0}, [-0.1, None]),
    }
    result = {"kind": "runs", "columns": {"a": "column"}, "figures": ["own"], "against": "ours", "rows": rows}
    found = differences(result, "own")["rows"]
    assert list(found) == ["other"]
    assert found["other"]["here"]["a"]["own"]["values"] == {"1": -0.25, "2": -0.125}
    page = "\n".join(tables(result))
    assert "| ours | frozen | 80.0 ± 10.0 | 62.5 ± 17.7 |" in page
    assert "| other | frozen | – | 29.2 ± 26.0 |" in page
    assert "| other | frozen | -10.0 | -18.8 ± 8.8 |" in page


EMPTY = {"state": "", "note": ""}


def test_equal_values_have_no_spread() -> None:
    assert cell(dict.fromkeys("abc", 0.1 + 0.2))["std"] == 0.0


def test_a_row_without_method_is_left_out_where_it_has_no_figure() -> None:
    majority = {"title": "majority", "method": "", "heads": "–", "paper": {}, "here": {"a": {}}} | EMPTY
    own = {"a": {"own": cell({"0": 0.5})}}
    ours = {"title": "ours", "method": "x", "heads": "own", "paper": {}, "here": own} | EMPTY
    result = {"kind": "runs", "columns": {"a": "column"}, "figures": ["own"], "rows": {"o": ours, "m": majority}}
    assert "majority" not in "\n".join(tables(result))


def test_a_gain_that_turns_into_a_loss_does_not_grow() -> None:
    values = [0.0, 0.03, 0.01, 0.0]  # 3 points below, where it was 1 above
    claim = next(one for one in definition("fedsee/table2").claims if one.sense == "gains")
    assert not _holds(claim, values)
    assert _holds(claim, [0.03, 0.0, 0.01, 0.0])


def test_the_setting_says_line_by_line_what_differs() -> None:
    told = {
        line["aspect"]: line
        for line in lines({"rounds": "250", "rank": "4", "tests": None}, {"rounds": "10", "rank": "4", "tests": "30"})
    }
    assert [told[name]["verdict"] for name in ("rounds", "rank", "test data")] == ["differs", "same", "not said"]


def test_table4_is_computed_row_by_row_and_resumed(
    tmp_path: Path, small: list[str], in_this_process: list[str]
) -> None:
    done = computed("fedpa/table4", tmp_path, small, seeds=[0])
    assert len(in_this_process) == 12
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result == json.loads(json.dumps(done.result)) and (tmp_path / "result.json").stat().st_size < 50_000
    assert str(tmp_path) not in json.dumps({**result, "command": ""})
    for row, entry in definition("fedpa/table4").rows.items():
        for figure in ("own", "pooled"):
            assert 0 <= result["rows"][row]["here"]["mnli"][figure]["mean"] <= 1
        assert result["rows"][row]["heads"] == ("averaged" if entry.variant == "averaged" else "own")
    told = {line["aspect"]: line for line in result["setting"]}
    assert told["rounds"] == {"aspect": "rounds", "paper": "250", "here": "3", "verdict": "differs"}
    assert told["rank"]["verdict"] == told["clients"]["verdict"] == told["weights of clients"]["verdict"] == "same"
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "| FedPA-LoRA, R = 2 | own | 90.3 |" in text and "always the most frequent class" in text
    used = yaml.safe_load((tmp_path / "runs" / "mnli_factor-A" / "fedpa-factors-seed0" / "config.yaml").read_text())
    assert used["options"] == {"lam": 1.0, "regularised": "A"} and used["federation"]["head"] == "local"
    again = computed("fedpa/table4", tmp_path, small, seeds=[0])
    assert len(in_this_process) == 12 and again.result["rows"] == result["rows"]


def test_a_method_that_is_not_here_is_told_so(
    tmp_path: Path, small: list[str], in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "METHODS", {"fedit": METHODS["fedit"], "fedpa-lora": METHODS["fedpa-lora"]})
    done = computed("fedpa/table2", tmp_path, ["partition.kind=iid", *small], seeds=[3])
    assert len(in_this_process) == 4 * 3
    rows = done.result["rows"]
    assert rows["rolora"]["state"] == "not here yet" and rows["rolora"]["here"] == {}
    assert rows["fedit"]["here"]["beta-1"]["own"]["values"].keys() == {"3"}
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "| RoLoRA | averaged ‡ | 86.7 ± 0.8 | not here yet |" in text


def test_figure1_has_the_layers_that_it_shows_and_a_picture(
    tmp_path: Path, small: list[str], in_this_process: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    settings = [*small, "evaluate.mismatch_layers=true"]
    done = computed("fedpa/figure1", tmp_path, settings, seeds=[0, 1], methods=["fedit", "fedpa-lora", "ffa-lora"])
    rows = done.result["rows"]
    assert list(rows) == ["fedit", "fedpa-lora", "ffa-lora"]
    own = rows["fedpa-lora"]["here"]["mnli"]
    assert own["start_B"]["mean"] == own["start_A"]["mean"] == own["mean_start_B"]["mean"] == 0
    assert rows["fedit"]["here"]["mnli"]["start_B"]["mean"] > 0
    assert rows["fedit"]["series"]["mnli"]["aggregation"]["rounds"] == [1, 2, 3]
    assert rows["fedit"]["series"]["mnli"]["start_B"]["rounds"] == [2, 3]
    assert rows["ffa-lora"]["here"]["mnli"]["aggregation"]["mean"] < 1e-5  # exact: only B moves
    for claim in done.result["claims"]:
        if "zero" in claim["says"]:
            assert claim["verdict"] == "holds"
    picture = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "aggregation error (Eq. 1), one layer" in picture and (tmp_path / "figure.png").stat().st_size > 1000
    assert str(tmp_path) not in picture and (tmp_path / "result.json").stat().st_size < 50_000


def test_the_aggregation_error_of_eq_1_is_that_of_unscaled_products(
    tmp_path: Path, small: list[str], in_this_process: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    computed("fedpa/figure1", tmp_path, small, seeds=[0], methods=["fedit"])
    finished = module.finished_runs(tmp_path / "runs" / "mnli_averaged", "fedit", [0])[0]
    first = finished.metrics[0]["mismatch"]["layers"]
    (layer,) = [name for name in first if name.endswith("layer.0.attention.self.query")]
    assert curves.curve(finished, "aggregation", f"*{layer}")[1] == pytest.approx(first[layer]["absolute"] / 2)
    whole = sum(values["absolute"] ** 2 for values in first.values()) ** 0.5
    assert finished.metrics[0]["mismatch"]["absolute"] == pytest.approx(whole)
    entering = curves.curve(finished, "mean_start_B", "")
    assert list(entering) == [2, 3] and entering[2] == pytest.approx(finished.metrics[1]["init_mismatch"]["B"])
    every = [values["relative"] for values in first.values()]
    assert curves.curve(finished, "mean_aggregation_relative", "")[1] == pytest.approx(sum(every) / len(every))


def test_the_command_compares_in_processes_of_their_own(
    tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    arguments = ["--methods", "fedpa-lora", "--seeds", "0", "--workers", "2"]
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "fedpa/figure1", *small, *arguments])
    assert stop.value.code in (0, None)
    told = capsys.readouterr().out
    assert "start mismatch of B (Eq. 2), one layer | 0" in told
    assert "**holds**, one seed: FedPA-LoRA's start mismatch of B is zero" in told
    assert (tmp_path / "reproductions" / "fedpa" / "figure1-small" / "figure.png").is_file()


def test_the_command_alone_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reproduce"])
    told = capsys.readouterr().out
    assert all(name in told for name in ALL)


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("fedpa/table3", {}, "no reproduction 'fedpa/table3'"),
        ("fedpa/table4", {"scale": "large"}, "no scale 'large'"),
        ("sefora/table3", {"methods": ["sefora"]}, "not single methods"),
        ("fedpa/table4", {"methods": ["fedit"]}, "not single methods"),
        ("fedpa/table11", {"settings": ["rounds=1"]}, "takes no settings"),
        ("fedpa/figure1", {"methods": ["fedlt"]}, "no method 'fedlt'"),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(
    name: str, options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    given = {"settings": [], **options}
    with pytest.raises(ConfigError, match=complaint) as error:
        computed(name, tmp_path / "out", **given)
    assert "\n" not in str(error.value)


@pytest.fixture
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 11 on layers of a few dozen rows."""
    whole = definition("fedpa/table11")
    models = {
        "roberta-large": {"clients": 3, "rank": 2, "layers": [[[24, 32], 5]]},
        "llama3-8b": {"clients": 2, "rank": 2, "layers": [[[32, 32], 2], [[16, 32], 3]]},
    }
    monkeypatch.setattr(module, "definition", lambda name: whole.model_copy(update={"models": models}))


def test_table11_times_every_operation_and_keeps_what_it_has(tmp_path: Path, tiny_models: None) -> None:
    done = computed("fedpa/table11", tmp_path, [])
    for entry in done.result["rows"].values():
        assert all(figures["seconds"]["mean"] > 0 for figures in entry["here"].values())
    kept = (tmp_path / "seconds.json").read_bytes()
    again = computed("fedpa/table11", tmp_path, [])
    assert (tmp_path / "seconds.json").read_bytes() == kept and again.result["rows"] == done.result["rows"]
    assert "| dense product aggregation and SVD | 4.73 |" in (tmp_path / "result.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="other settings"):
        computed("fedpa/table11", tmp_path, [], seeds=[1])


def test_server_operations_agree_with_the_dense_one() -> None:
    import torch

    section = {"clients": 4, "rank": 3, "layers": [[[20, 30], 7]]}
    ((count, pairs),) = random_factors(section, root_key(0), whole=False)
    assert count == 7 and len(random_factors(section, root_key(0), whole=True)) == 7
    key = root_key(1)
    step = lambda **operation: server_step(operation, pairs, 3, torch.float64, key)  # noqa: E731
    B, A = step(kind="dense")
    mean = sum(b.double() @ a.double() for b, a in pairs) / 4
    U, S, Vh = torch.linalg.svd(mean)
    torch.testing.assert_close((B @ A).double(), (U[:, :3] * S[:3]) @ Vh[:3], atol=1e-5, rtol=1e-5)
    exact = step(kind="exact")
    torch.testing.assert_close(exact[0] @ exact[1], B @ A, atol=1e-5, rtol=1e-5)
    whole = step(kind="randomised", oversample=9)  # as many directions as the stacked rank
    torch.testing.assert_close(whole[0] @ whole[1], B @ A, atol=1e-5, rtol=1e-5)
    both = step(kind="average", factors=2)
    torch.testing.assert_close(both[1], sum(a for _, a in pairs) / 4, atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match="no server operation 'mean'"):
        step(kind="mean")


@pytest.mark.parametrize(
    ("paper", "name", "methods"),
    [
        ("fedpa", "fedpa/table2", ["fedit", "fedpa-lora", "fedpa-factors"]),
        ("sefora", "sefora/figure1", ["sefora", "flexlora-adaptive"]),
    ],
)
def test_the_small_runs_stand_in_a_configuration_to_tune_with(paper: str, name: str, methods: list[str]) -> None:
    whole = definition(name)
    blocks = {block.folder: block for block in plan(whole, whole.scales["small"])}
    block = blocks["beta-0.5_averaged" if paper == "fedpa" else "n10-e5_averaged"]
    for method in methods:
        there = load(ROOT / "configs" / "papers" / paper / "small.yaml", [f"method={method}"])
        ours = resolve({**block.config, "name": "small"}, [(["method"], method)])
        assert there.model_copy(update={"evaluate": ours.evaluate}) == ours


def test_results_and_pages_are_those_that_the_tool_makes(tmp_path: Path, tiny_models: None) -> None:
    for page in tool.PAGES:
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(ROOT).parts) - 1)
        assert "<!-- reproduction" in text and tool.filled(text, depth=up) == text
    for place in tool.RESULTS.glob("*.json"):
        result = json.loads(place.read_text(encoding="utf-8"))
        assert place.stat().st_size < tool.LARGEST and {"command", "machine", "seeds", "date", "versions"} <= set(
            result
        )
        assert place.with_suffix(".md").read_text(encoding="utf-8") == markdown(result)
    computed("fedpa/table11", tmp_path / "computed", [])
    (tmp_path / "results").mkdir()
    taken = tool.take(tmp_path / "computed", tmp_path / "results")
    assert taken.name == "fedpa-table11-small.json" and taken.with_suffix(".md").is_file()
    marked = "before\n<!-- reproduction: fedpa/table11 -->\nold\n<!-- /reproduction -->\nafter\n"
    page = tool.filled(marked, tmp_path / "results")
    assert "| reduced QR and core SVD | 0.084 |" in page and "\nold\n" not in page and page.endswith("after\n")
    assert tool.filled(page, tmp_path / "results") == page


def test_a_result_that_names_a_place_of_the_machine_is_not_taken(tmp_path: Path, tiny_models: None) -> None:
    computed("fedpa/table11", tmp_path, [])
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    (tmp_path / "result.json").write_text(json.dumps({**result, "command": "coterie task.path=/some/where"}))
    with pytest.raises(SystemExit, match="looks like a place on this machine"):
        tool.take(tmp_path, tmp_path)
