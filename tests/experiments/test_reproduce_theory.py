"""FedSEE's theory, computed anew: small federations, kept values, tables and a figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import reproductions as tool
import torch
from experiments.reproducing import computed

from coterie.errors import ConfigError
from coterie.experiments import reproduce as module
from coterie.experiments.papers import fedsee_theory, panels
from coterie.experiments.papers.claims import judged
from coterie.experiments.papers.definition import Definition, at_scale, definition
from coterie.experiments.papers.reading import cell
from coterie.maths.keys import Key, root_key
from coterie.theory.fedsee.geometry import diameter

pytest.importorskip("matplotlib")

SMALL = {
    "M": 3,
    "l": 2,
    "r": 4,
    "d": 10,
    "N": 6,
    "n_floor": 6,
    "n_i": 200,
    "n_m": 100,
    "plenty_i": 400,
    "plenty_m": 400,
    "few": 50,
    "many": 400,
}
"""Sizes in place of the paper's; places on the axes that count examples are a hundredth."""
EXAMPLES = ("barycentres", "public", "local", "floor")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Definition:
    whole = definition("fedsee/theory")
    counted = {column for panel in EXAMPLES for column in whole.panels[panel].columns}
    columns = {
        name: column.model_copy(update={"config": {"x": max(20.0, column.config["x"] / 100)}})
        if name in counted
        else column
        for name, column in whole.columns.items()
    }
    columns["clients-60"] = columns["clients-60"].model_copy(update={"config": {"x": 15}})
    scales = {
        name: scale.model_copy(update={"config": {**scale.config, **SMALL}}) for name, scale in whole.scales.items()
    }
    made = whole.model_copy(update={"columns": columns, "scales": scales})
    monkeypatch.setattr(module, "definition", lambda name: made)
    return made


def test_rows_and_columns_are_those_of_the_panels_and_of_what_is_computed(tiny: Definition) -> None:
    whole = definition("fedsee/theory")
    columns = [column for panel in whole.panels.values() for column in panel.columns]
    assert sorted(columns) == sorted(whole.columns)
    for name, panel in whole.panels.items():
        rows = {row for row, entry in whole.rows.items() if entry.panel == name}
        assert rows and (panel.axis is None or set(panel.axis.rows) <= rows)
        for row in rows:
            assert set(whole.rows[row].paper) <= set(panel.columns)
    assert {entry.panel for entry in whole.rows.values()} <= set(whole.panels)
    for claim in whole.claims:
        places = {whole.rows[row].panel for row in (*claim.first, *claim.second)}
        named = {*claim.columns, *claim.than, *claim.than.values()}
        assert len(places) == 1 and named <= set(whole.panels[places.pop()].columns)
    sizes = fedsee_theory.sizes_of(tiny.scales["small"].config)
    found = [
        row
        for compute in fedsee_theory.COMPUTED.values()
        for row in compute(root_key(0), sizes, panels.places_on_x(tiny))
    ]
    assert sorted(found) == sorted(whole.rows)


def test_the_paper_s_own_figures_bear_out_what_it_says() -> None:
    whole = at_scale(definition("fedsee/theory"), definition("fedsee/theory").scales["paper"])
    reported = {
        row: {column: {panels.VALUE: cell({"": mean})} for column, (mean, _) in entry.paper.items()}
        for row, entry in whole.rows.items()
    }
    verdicts = [claim["verdict"] for claim in judged(whole, reported)]
    assert set(verdicts) == {"holds", "cannot be told"} and verdicts.count("holds") >= 15


def test_a_page_has_every_panel_with_the_paper_s_figures_and_a_picture(tmp_path: Path, tiny: Definition) -> None:
    done = computed("fedsee/theory", tmp_path, [], seeds=[0, 1])
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result == json.loads(json.dumps(done.result))
    for row, entry in result["rows"].items():
        cells = [found[panels.VALUE] for found in entry["here"].values()]
        assert cells and all(found["values"].keys() == {"0", "1"} for found in cells), row
    values = {row: entry["here"] for row, entry in result["rows"].items()}
    for column in definition("fedsee/theory").panels["impurity"].columns[1:]:
        mean = {row: values[row][column][panels.VALUE]["mean"] for row in ("exact", "bound")}
        assert mean["exact"] <= mean["bound"] + 1e-9
    assert values["quadratic"]["all"][panels.VALUE]["mean"] < 1e-6
    assert values["half-diameter"]["anchors-id"][panels.VALUE]["mean"] == pytest.approx(3)
    text = (tmp_path / "result.md").read_text(encoding="utf-8")
    assert "| exact uploads: paper | 0 | 0.228 | 0.455 | 0.911 | 1.366 | 1.821 |" in text
    assert "| exact uploads: here | < 1e-12 |" in text and "nan" not in text
    assert "| clients | 12 | 6 | differs |" in text and "| noise | σ = 0.5 | σ = 0.5 | same |" in text
    assert "- **holds**: the excess risk of a balanced router is exactly quadratic" in text
    picture = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    for panel in definition("fedsee/theory").panels.values():
        if panel.axis is not None:
            assert panel.axis.title in picture
    assert "the paper" in picture and str(tmp_path) not in picture
    assert done.result["command"].endswith("--seeds 0,1") and (tmp_path / "figure.png").stat().st_size > 1000
    (tmp_path / "results").mkdir()
    taken = tool.take(tmp_path, tmp_path / "results")
    assert taken.name == "fedsee-theory-small.json" and taken.with_suffix(".png").is_file()
    committed = taken.read_text(encoding="utf-8")
    assert '"values": { "0": ' in committed and json.loads(committed)["picture"] == "fedsee-theory-small.svg"
    page = tool.filled("<!-- reproduction: fedsee/theory -->\n<!-- /reproduction -->\n", tmp_path / "results")
    assert "Table 4, vertex set and task identity:" in page


def test_values_are_kept_seed_by_seed_and_not_mixed_with_others(
    tmp_path: Path, tiny: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sizes = fedsee_theory.sizes_of(tiny.scales["small"].config)

    def standing_in(name: str, values: fedsee_theory.Values) -> Callable[..., fedsee_theory.Values]:
        def compute(key: Key, sizes: object, places: object) -> fedsee_theory.Values:
            calls.append(name)
            factor = 1 + float(key.unit(1)[0])
            return {row: {c: factor * (v or 0.0) for c, v in found.items()} for row, found in values.items()}

        return compute

    for name, compute in list(fedsee_theory.COMPUTED.items()):
        values = compute(root_key(9), sizes, panels.places_on_x(tiny))
        monkeypatch.setitem(fedsee_theory.COMPUTED, name, standing_in(name, values))
    monkeypatch.setattr(panels, "draw", lambda result, stem: [])
    first = computed("fedsee/theory", tmp_path, [], seeds=[0])
    assert len(calls) == len(fedsee_theory.COMPUTED)
    more = computed("fedsee/theory", tmp_path, [], seeds=[0, 1])
    assert len(calls) == 2 * len(fedsee_theory.COMPUTED)
    one, both = (made.result["rows"]["exact"]["here"]["eps-0.1"][panels.VALUE]["values"] for made in (first, more))
    assert both["0"] == one["0"] != both["1"]
    kept = json.loads((tmp_path / "values.json").read_text(encoding="utf-8"))
    (tmp_path / "values.json").write_text(json.dumps({**kept, "config": {**kept["config"], "N": 7}}))
    with pytest.raises(ConfigError, match="other settings"):
        computed("fedsee/theory", tmp_path, [], seeds=[0])


def test_it_takes_neither_settings_nor_methods(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fedsee/theory has no runs: it takes no settings such as rounds=3"):
        computed("fedsee/theory", tmp_path, ["rounds=3"])
    with pytest.raises(ConfigError, match="not single methods"):
        computed("fedsee/theory", tmp_path, [], methods=["fedit"])


def test_without_scipy_the_cross_check_is_not_told(monkeypatch: pytest.MonkeyPatch, tiny: Definition) -> None:
    monkeypatch.setattr(fedsee_theory, "_slsqp", lambda objective, size: None)
    sizes = fedsee_theory.sizes_of(tiny.scales["small"].config)
    found = fedsee_theory.solver(root_key(0), sizes, panels.places_on_x(tiny))
    assert found["weights-apart"] == {"one": None} and found["fista"]["one"] is not None


def test_a_seed_s_panels_share_one_world(tiny: Definition) -> None:
    sizes = fedsee_theory.sizes_of(tiny.scales["small"].config)
    key = root_key(3).fold("fedsee-theory")
    one, other = sizes.world(key), sizes.world(key)
    assert torch.equal(one.Theta, other.Theta) and diameter(one.Theta) == pytest.approx(6)
    assert not torch.equal(one.Theta, sizes.world(root_key(4)).Theta)
