"""SeFoRA's tables and figures: conditions of each scale, statements across them, and what is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from experiments.reproducing import computed

from coterie.experiments import reproduce as module
from coterie.experiments.papers import curves
from coterie.experiments.papers.claims import judged
from coterie.experiments.papers.definition import Claim, Definition, at_scale, definition
from coterie.experiments.papers.reading import Cell, cell
from coterie.experiments.reproduce import plan


@pytest.fixture
def small(tiny_base: Path, reviews_csv: Path) -> list[str]:
    """Settings in place of every run's, so that a run takes a moment; conditions keep their own clients."""
    return [
        f"task={{name: file, path: {reviews_csv}, test_limit: 30}}",
        f"model.base={tiny_base}",
        "rounds=3",
        "train={steps: 1, batch_size: 4}",
        "partition={minimum: 4, beta: 100}",
        "evaluate={every: 1, pooled_limit: 10}",
        "execution={dtype: float32, attention: eager}",
    ]


def two_columns(*claims: Claim) -> Definition:
    """Table 2 with these claims and the two conditions of ten clients."""
    whole = definition("sefora/table2")
    columns = {name: whole.columns[name] for name in ("n10-e1", "n10-e5")}
    return whole.model_copy(update={"columns": columns, "claims": list(claims)})


def figures(**values: tuple[float, float]) -> dict[str, dict[str, dict[str, Cell]]]:
    """Rows' pooled figures of one step and of five, each of one seed."""
    return {
        row.replace("_", "-"): {
            column: {"pooled": cell({"0": value})} for column, value in zip(("n10-e1", "n10-e5"), pair, strict=True)
        }
        for row, pair in values.items()
    }


def test_a_scale_has_its_columns_and_claims_without_any_are_not_tested() -> None:
    whole = definition("sefora/table3")
    reduced = at_scale(whole, whole.scales["small"])
    assert list(reduced.columns) == ["n10-e5"]
    untested = {claim.says: claim.untested for claim in reduced.claims if claim.untested}
    assert untested["QQP and MNLI benefit from larger ranks"] == "it is about QQP, MNLI, which this scale has not"
    assert len(untested) == 2
    (last,) = (line for line in judged(reduced, {}) if line["says"].startswith("QQP"))
    assert (last["verdict"], last["missing"], last["of"]) == ("not tested", [], 0)
    assert [len(plan(whole, whole.scales[scale])) for scale in ("small", "paper")] == [4, 28]


@pytest.mark.parametrize(
    ("sense", "within", "verdict"),
    [
        ("greater", 0.0, "does not hold"),
        ("at-least", 0.05, "holds"),
        ("at-least", -0.05, "does not hold"),
        ("near", 0.01, "does not hold"),
        ("less", 0.0, "holds"),
    ],
)
def test_senses_of_a_statement_about_one_condition(sense: str, within: float, verdict: str) -> None:
    claim = Claim.model_validate(
        {"says": "", "where": "", "figure": "pooled", "first": ["sefora-ho"], "second": ["fedit"], "sense": sense}
        | {"columns": ["n10-e1"], "within": within}
    )
    (found,) = judged(two_columns(claim), figures(sefora_ho=(0.70, 0.9), fedit=(0.72, 0.8)))
    assert found["verdict"] == verdict


def test_a_statement_across_conditions_compares_each_row_with_itself() -> None:
    claim = Claim(says="", where="", figure="pooled", first=["sefora-ho", "fedit"], than={"n10-e5": "n10-e1"})
    reduced = at_scale(two_columns(claim), two_columns(claim).scales["small"].model_copy(update={"only": []}))
    (found,) = judged(reduced, figures(sefora_ho=(0.70, 0.9), fedit=(0.82, 0.8)))
    assert (found["verdict"], found["agree"], found["of"]) == ("holds in part", 1, 2)
    assert found["comparisons"][1].startswith("no: FedIT 0.8 (E = 5, N = 10, 30 rounds), FedIT 0.82 (E = 1")


def test_a_gap_may_be_wider_in_one_condition() -> None:
    claim = Claim(
        says="",
        where="",
        figure="pooled",
        first=["ffa-lora"],
        second=["fedit"],
        than={"n10-e1": "n10-e5"},
        sense="wider",
    )
    whole = at_scale(two_columns(claim), two_columns(claim).scales["small"].model_copy(update={"only": []}))
    (found,) = judged(whole, figures(ffa_lora=(0.5, 0.8), fedit=(0.7, 0.85)))
    assert found["verdict"] == "holds" and found["of"] == 1
    (found,) = judged(whole, figures(ffa_lora=(0.7, 0.6), fedit=(0.75, 0.85)))
    assert found["verdict"] == "does not hold"


@pytest.mark.parametrize(
    ("name", "holding", "in_part"),
    [("sefora/table2", 5, ["SeFoRA-Ho outperforms existing methods"]), ("sefora/table3", 5, [])],
)
def test_the_paper_s_own_tables_bear_out_what_it_says_but_one(name: str, holding: int, in_part: list[str]) -> None:
    whole = at_scale(definition(name), definition(name).scales["paper"])
    reported = {
        row: {column: {"pooled": cell({"": mean})} for column, (mean, _) in entry.paper.items()}
        for row, entry in whole.rows.items()
    }
    found = judged(whole, reported)
    assert [claim["says"] for claim in found if claim["verdict"] == "holds in part"] == in_part
    assert sum(claim["verdict"] == "holds" for claim in found) == holding
    assert not any(claim["verdict"] == "does not hold" for claim in found)


def test_table2_shows_the_paper_s_conditions_apart_from_ours(
    tmp_path: Path, small: list[str], in_this_process: list[str]
) -> None:
    done = computed("sefora/table2", tmp_path, [*small, "clients.count=4"], seeds=[0])
    assert len(in_this_process) == 3 * 3
    result = done.result
    assert list(result["columns"]) == ["n10-e1", "n10-e5", "n40-e5"] and len(result["reported"]) == 8
    for row in ("fedit", "ffa-lora", "sefora-ho"):
        found = result["rows"][row]["here"]["n10-e5"]
        assert 0 <= found["pooled"]["mean"] <= 1 and found["megabytes_up"]["mean"] > 0
    assert result["rows"]["ffa-lora"]["here"]["n10-e1"]["mismatch"]["mean"] < 1e-5
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "| SeFoRA-Ho | 95.0 ± 0.2 | 88.8 ± 0.9 |" in text and "own heads" not in text
    assert "- **not tested**: SeFoRA-Ho converges at rate 1/T" in text
    told = {line["aspect"]: line for line in result["setting"]}
    assert told["rows of the sketch, k"]["verdict"] == told["adapted layers"]["verdict"] == "same"
    used = yaml.safe_load((tmp_path / "runs/n10-e5_averaged/sefora-ho-seed0/config.yaml").read_text())
    assert used["options"] == {"k": 18} and used["lora"]["scale"] == 0.1


def test_figure1_draws_a_panel_for_each_condition(tmp_path: Path, small: list[str], in_this_process: list[str]) -> None:
    pytest.importorskip("matplotlib")
    settings = [*small, "clients.count=4"]
    done = computed("sefora/figure1", tmp_path, settings, seeds=[0, 1], methods=["sefora", "flora-adaptive", "fslora"])
    assert len(in_this_process) == 3 * 3 * 2
    rows = done.result["rows"]
    series = rows["sefora"]["series"]["n10-e1"]
    assert list(series) == ["accuracy"] and series["accuracy"]["rounds"] == [1, 2, 3]
    assert all(0 <= value <= 1 for name in ("least", "mean", "greatest") for value in series["accuracy"][name])
    last = rows["sefora"]["here"]["n40-e5"]
    assert last["pooled"]["values"].keys() == {"0", "1"} and 0 < last["last_rank"]["mean"] <= 16
    assert rows["flora"]["here"]["n40-e5"]["megabytes_down"]["mean"] > last["megabytes_down"]["mean"]
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "|  | E = 1, N = 10 | E = 5, N = 10 | E = 5, N = 40 |" in text
    picture = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "E = 5, N = 40" in picture and (tmp_path / "result.json").stat().st_size < 50_000
    told = {line["aspect"]: line["here"] for line in done.result["setting"]}
    assert "every 12 rounds" in told["rank updates"] and "2, 4, 6, 8, 10, 12, 14" in told["rank"]


def test_figure2_follows_the_average_rank(tmp_path: Path, small: list[str], in_this_process: list[str]) -> None:
    pytest.importorskip("matplotlib")
    settings = [*small, "clients.count=3", "options.update_every=2"]
    done = computed("sefora/figure2", tmp_path, settings, seeds=[0])
    assert len(in_this_process) == 4
    for row, entry in done.result["rows"].items():
        shown = entry["series"]["n10-e5"]["average_rank"]
        initial = int(row[1:])
        assert shown["rounds"] == [1, 2, 3] and shown["mean"][:2] == [initial, initial]
        assert shown["mean"][2] <= initial
        here = entry["here"]["n10-e5"]
        assert here["rank_left"]["mean"] == pytest.approx(shown["mean"][2] / initial, rel=1e-3)
    verdicts = {claim["says"]: claim["verdict"] for claim in done.result["claims"]}
    assert verdicts["more complex tasks keep a higher rank"] == "not tested"
    assert curves.drawn(done.result["figures"]) == ["average_rank"]


def test_table3_leaves_rows_out_at_small_scale(tmp_path: Path, small: list[str], in_this_process: list[str]) -> None:
    done = computed("sefora/table3", tmp_path, [*small, "clients.count=3"], seeds=[0])
    assert len(in_this_process) == 4
    rows = done.result["rows"]
    assert {row for row, entry in rows.items() if entry["state"]} == {"r8-k16", "r8-k10", "r2-k4"}
    sizes = {
        row: entry["here"]["n10-e5"]["megabytes_up"]["mean"] or 0.0
        for row, entry in rows.items()
        if row.startswith("r")
    }
    assert sizes["r4-k6"] < sizes["r4-k8"] < sizes["r16-k18"] < sizes["r16-k32"]
    verdicts = {claim["says"]: claim["verdict"] for claim in done.result["claims"]}
    assert verdicts["the same at r = 8"] == "cannot be told"
    assert "| r = 8, k = 16 | averaged | not at this scale |" in (tmp_path / "result.md").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["reported"]["mnli"] == "MNLI"
    assert module.reproduction_folder("sefora/table3", "small") == Path("reproductions/sefora/table3-small")


def test_table1_has_equal_and_unequal_ranks(tmp_path: Path, small: list[str], in_this_process: list[str]) -> None:
    done = computed("fedpa/table1", tmp_path, [*small, "clients.count=3", "partition={test_fraction: 0.2}"], seeds=[0])
    assert len(in_this_process) == 17 * 2
    rows = done.result["rows"]
    assert all(rows[row]["here"]["trec"]["own"]["mean"] is not None for row in definition("fedpa/table1").rows)
    assert rows["unequal-fedpa-lora"]["heads"] == "own" and rows["unequal-ravan"]["heads"] == "averaged"
    assert done.result["reported"]["average"] == "average"
    used = yaml.safe_load((tmp_path / "runs/trec_unequal-averaged/ravan-seed0/config.yaml").read_text())
    assert used["options"]["heads"] == 8 and used["clients"]["ranks"] == [2, 4, 16] and used["lora"]["scale"] == 2
