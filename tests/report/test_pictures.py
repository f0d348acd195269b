"""Figures hold the numbers of the records, in their tables and in words, and are left out where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.report import drawing
from coterie.report.drawing import Picture
from coterie.report.groups import grouped
from coterie.report.pictures import sections_of
from coterie.report.reading import collect, read_run

pytest.importorskip("matplotlib", reason="matplotlib is not installed: it draws the figures")


def pictures_of(*folders: Path) -> dict[str, Picture]:
    groups, _ = grouped([read_run(folder) for folder in folders])
    return {picture.name: picture for _, _, pictures in sections_of(groups) for picture in pictures}


def test_a_curve_lists_its_rounds_and_says_where_it_ends(records: Any) -> None:
    drawn = pictures_of(records("a"), records("b", seed=1, scores=(0.5, 0.8)))
    pooled = drawn["pooled"]
    assert [list(row) for row in pooled.table.rows] == [["1", "50.0 (50.0 to 50.0)"], ["2", "75.0 (70.0 to 80.0)"]]
    assert "FedIT: 75.0 in round 2, from 50.0 in round 1 (2 seeds, 70.0 to 80.0 at the end)" in pooled.alt
    assert "majority 55.0" in pooled.alt and "400 test examples" in pooled.note
    assert [list(row) for row in drawn["loss"].table.rows][-1] == ["2", "0.500 (0.500 to 0.500)"]


def test_rounds_measured_on_fewer_examples_are_noted(records: Any) -> None:
    folder = records("r")
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    (folder / "metrics.jsonl").write_text(text.replace('"examples": 400', '"examples": 50', 1), encoding="utf-8")
    assert (
        "Rounds before the last are measured on 50 test examples, the last on all 400"
        in pictures_of(folder)["pooled"].note
    )


def test_score_against_bytes_counts_what_a_client_sent(records: Any) -> None:
    (row,) = pictures_of(records("r"))["score-against-bytes"].table.rows
    assert list(row) == ["FedIT", "1.0 kB", "70.0"]


def test_traffic_has_evaluation_apart(records: Any) -> None:
    picture = pictures_of(records("r"))["traffic"]
    assert list(picture.table.heads) == ["", "messages", "sum", "evaluation, apart"]
    assert [list(row) for row in picture.table.rows] == [
        ["FedIT up", "1.0 kB", "1.0 kB", "0 B"],
        ["FedIT down", "1.0 kB", "1.0 kB", "9.0 MB"],
    ]


def test_time_is_by_what_it_was_spent_on(records: Any) -> None:
    (row,) = pictures_of(records("r"))["time"].table.rows
    assert list(row) == ["FedIT", "4.0 s", "1.0 s", "5.0 s"]


def test_clients_are_in_order_with_their_ranks_and_the_common_models_score(records: Any) -> None:
    picture = pictures_of(records("r"))["clients-0"]
    assert [list(row) for row in picture.table.rows] == [["north", "2", "60.0", "70.0"], ["south", "4", "80.0", "70.0"]]
    assert "mean 70.0, worst quarter 60.0" in picture.alt
    assert "clients-over-rounds" not in pictures_of(records("two"))
    assert "clients-over-rounds" in pictures_of(records("three", scores=(0.4, 0.5, 0.6)))


def test_differences_are_seed_by_seed_with_their_interval(records: Any) -> None:
    folders = [records(f"a{seed}", seed=seed, scores=(0.6,)) for seed in (0, 1, 2)]
    folders += [
        records(f"b{seed}", seed=seed, scores=(0.7 + seed / 100,), method="flexlora", title="FlexLoRA")
        for seed in (0, 1, 2)
    ]
    (row,) = pictures_of(*folders)["difference-pooled"].table.rows
    assert list(row) == ["FlexLoRA", "+11.0", "+8.5 to +13.5", "3"]  # t(0.975, 2) = 4.303, s.e. = 1 / sqrt(3)
    assert "difference-pooled" not in pictures_of(folders[0], folders[3])


def test_who_failed_or_was_late_is_drawn_with_the_reason(records: Any) -> None:
    rows = {"answered": [], "failed": {"north": "RunError: out of memory"}, "late": ["south"]}
    picture = pictures_of(records("r", rows=rows))["participation"]
    assert "2 failures, 2 late answers, 2 rounds of 2 clients" in picture.alt
    assert [list(row) for row in picture.table.rows][:2] == [
        ["1", "north", "failed", "RunError: out of memory"],
        ["1", "south", "late", "its answer came after the round"],
    ]
    assert "participation" not in pictures_of(records("all well"))


def test_a_partition_is_drawn_once_for_runs_that_share_it(records: Any) -> None:
    folders = [records("a"), records("b", method="flexlora", title="FlexLoRA")]
    drawn = pictures_of(*folders)
    assert [list(row) for row in drawn["partition"].table.rows] == [
        ["north", "30", "10", "40"],
        ["south", "5", "55", "60"],
    ]
    content = json.loads((folders[1] / "partition.json").read_text(encoding="utf-8"))
    content["statistics"]["histogram"] = [[1, 1], [1, 1]]
    (folders[1] / "partition.json").write_text(json.dumps(content), encoding="utf-8")
    assert {"partition-0", "partition-1"} <= set(pictures_of(*folders))


def test_of_many_classes_the_rarest_are_put_together(records: Any) -> None:
    folder = records("r", summary={"task": {"name": "movie", "classes": [], "test": 1}})
    facts = {"classes": list(range(14)), "histogram": [list(range(1, 15)), [1] * 14]}
    (folder / "partition.json").write_text(json.dumps({"statistics": facts}), encoding="utf-8")
    heads = list(pictures_of(folder)["partition"].table.heads)
    assert heads == ["client", *map(str, range(5, 14)), "5 others", "all"]


def test_of_a_mixture_the_tasks_that_clients_hold_are_drawn(records: Any) -> None:
    folder = records("r")
    content = json.loads((folder / "partition.json").read_text(encoding="utf-8"))
    held = [{"sms": 9, "movie": 31}, {"sms": 60}]
    content["clients"] = [{"client": client, "groups": groups} for client, groups in enumerate(held)]
    content["mixture"] = {"groups": ["movie", "sms"], "mean_total_variation": 0.775}
    (folder / "partition.json").write_text(json.dumps(content), encoding="utf-8")
    picture = pictures_of(folder)["partition"]
    assert list(picture.table.heads) == ["client", "movie", "sms", "all"]
    assert [list(row) for row in picture.table.rows] == [["north", "31", "9", "40"], ["south", "0", "60", "60"]]
    assert "Mean distance of mixtures: 0.78" in picture.alt
    for wrong in ("three", [], [{"groups": {"sms": "many"}}]):
        (folder / "partition.json").write_text(json.dumps({**content, "clients": wrong}), encoding="utf-8")
        assert "partition" not in pictures_of(folder)


@pytest.mark.parametrize("histogram", [None, [], [[1, 2], [3]], [["a", "b"], [1, 2]], [[-1, 2], [1, 2]], 3])
def test_a_partition_record_that_cannot_be_meant_is_left_out(records: Any, histogram: Any) -> None:
    folder = records("r")
    statistics = {"classes": [0, 1], "histogram": histogram}
    (folder / "partition.json").write_text(json.dumps({"statistics": statistics}), encoding="utf-8")
    assert "partition" not in pictures_of(folder)


def test_further_models_tests_and_measures_have_curves_of_their_own(records: Any) -> None:
    rows = {
        "global": {"pooled": {"score": 0.5, "examples": 10}, "more": {"mnli-mm": {"score": 0.45}}},
        "personal": {"clients": {"mean": 0.5}, "further": {"preserved": {"clients": {"mean": 0.6}}}},
        "validation": {"score": 0.52},
        "measures": {"mean_rank": 7.5, "broken": "x"},
        "objective": {"task": 0.4, "local": 0.5, "joint": 0.5},
    }
    drawn = pictures_of(records("r", rows=rows))
    assert {"test-mnli-mm", "further-preserved", "validation", "measure-mean-rank", "objective"} <= set(drawn)
    assert "measure-broken" not in drawn and list(drawn["objective"].table.heads) == [
        "round",
        "task loss",
        "+ penalties",
    ]


def test_records_with_little_in_them_still_give_what_they_have(records: Any) -> None:
    folder = records("r", rows={"global": None, "personal": None, "mismatch": None, "bytes": {}, "train": {}})
    for name in ("timing.jsonl", "partition.json"):
        (folder / name).unlink()
    assert not pictures_of(folder)
    row = {"round": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert set(pictures_of(folder)) <= {"participation"}


def test_every_figure_of_real_runs_is_drawn_in_all_widths_and_as_files(real: Path) -> None:
    groups, _ = grouped(collect([real]).runs)
    drawn = [picture for _, _, pictures in sections_of(groups) for picture in pictures]
    names = {picture.name for picture in drawn}
    assert {"pooled", "own", "loss", "mismatch", "start-mismatch", "clients-0", "clients-1", "traffic"} <= names
    assert {"sent-by-rank", "time", "partition-0", "partition-1", "participation", "difference-own"} <= names
    assert len(names) == len(drawn)
    with drawing.settings(outlines=False):
        for picture in drawn:
            assert picture.alt and picture.table.rows and drawing.inline(picture).count("<svg") == 1 + picture.wide


def test_many_methods_clients_and_rounds_stay_readable_and_small(records: Any) -> None:
    clients = [f"{number:03d}" for number in range(300)]
    scores = {name: (7 * place % 300) / 300 for place, name in enumerate(clients)}
    folders = []
    for place in range(12):
        folders.append(
            records(
                f"m{place}",
                method=f"m{place}",
                title=f"Method {place}",
                scores=[0.5 + place / 50] * 150,
                rows={"personal": {"clients": {"score": scores, "mean": 0.5, "worst_25": 0.1}}},
                summary={"clients": {name: {"rank": 2 + number % 7} for number, name in enumerate(clients)}},
            )
        )
    drawn = pictures_of(*folders)
    assert len(drawn["pooled"].table.rows) == 60 and len(drawn["clients-3"].table.rows) == 100
    assert "240 of 300 are drawn" in drawn["clients-3"].note
    with drawing.settings(outlines=False):
        assert len(drawing.inline(drawn["clients-3"])) < 60_000 and len(drawing.inline(drawn["pooled"])) < 120_000
