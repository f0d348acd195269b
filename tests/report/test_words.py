"""Sentences claim what the figures support, with the baseline beside them."""

from __future__ import annotations

from typing import Any

from coterie.report.groups import Group, grouped
from coterie.report.reading import read_run
from coterie.report.words import differing, facts_of, lead, metric_name, notes_on, title_of


def groups_of(*folders: Any) -> list[Group]:
    return grouped([read_run(folder) for folder in folders])[0]


def test_a_run_is_told_with_its_rounds_score_and_baselines(records: Any) -> None:
    pooled, own = lead(groups_of(records("r")))
    assert pooled.startswith("After 2 rounds, the global model scores 70.0\u00a0% on the pooled test; always")
    assert "would score 55.0\u00a0%" in pooled and "15.0 points above the baseline" in pooled
    assert "70.0\u00a0% on their own tests on average, 60.0\u00a0% in the worst quarter" in own
    assert "10.0 points below always answering one’s own most frequent class (80.0\u00a0%)" in own


def test_a_score_within_the_sampling_error_is_not_called_better(records: Any) -> None:
    pooled, _ = lead(groups_of(records("r", scores=(0.5, 0.58))))
    assert "not told apart from the baseline" in pooled and "above" not in pooled


def test_a_leader_is_told_with_its_lead_and_in_how_many_seeds(records: Any) -> None:
    folders = [records(f"a{seed}", seed=seed, scores=(0.6 + seed / 10,)) for seed in (0, 1)]
    folders += [
        records(f"b{seed}", seed=seed, scores=(score,), method="flexlora", title="FlexLoRA")
        for seed, score in ((0, 0.62), (1, 0.9))
    ]
    pooled, own, caution = lead(groups_of(*folders))
    assert "FlexLoRA scores highest: 76.0\u00a0% on average over 2 seeds" in pooled
    assert "11.0 points above FedIT and ahead of it in 2 of 2 seeds" in pooled
    assert own.startswith("On clients’ own tests, FlexLoRA") and "2 seeds are few" in caution


def test_a_baseline_above_all_is_called_so(records: Any) -> None:
    groups = groups_of(records("a", scores=(0.6,)), records("b", scores=(0.5,), method="flexlora", title="FlexLoRA"))
    assert "80.0\u00a0%, more than any of them" in lead(groups)[1]
    assert "One seed shows no spread" in lead(groups)[-1]


def test_another_metric_has_no_percent_sign(records: Any) -> None:
    groups = groups_of(records("r", summary={"metric": "matthews"}))
    assert metric_name(groups[0].runs[0]) == "Matthews correlation × 100"
    assert "scores 70.0 on the pooled test." in lead(groups)[0]


def test_nothing_measured_is_said(records: Any) -> None:
    rows = {"global": None, "personal": None}
    assert lead(groups_of(records("r", rows=rows))) == ["After 2 rounds, no score had been measured."]
    more = records("s", rows=rows, method="flexlora", title="FlexLoRA")
    assert lead(groups_of(records("q", rows=rows), more)) == ["No score had been measured."]


def test_titles_name_few_methods_and_count_many(records: Any) -> None:
    folders = [records(f"m{n}", method=f"m{n}", title=f"Method {n}") for n in range(5)]
    assert title_of(groups_of(*folders[:2])) == "Method 0 and Method 1 on movie"
    assert title_of(groups_of(*folders)) == "5 methods on movie"
    rates = [records(f"lr{n}", settings={"train": {"lr": n}}) for n in range(5)]
    assert title_of(groups_of(*rates)) == "5 settings on movie"
    assert "2 clients of ranks 2 and 4" in facts_of(groups_of(folders[0]))


def test_runs_that_do_not_compare_are_noted(records: Any) -> None:
    other = records(
        "other", method="flexlora", title="FlexLoRA", scores=(0.5,), settings={"task": {"name": "sst2"}, "rounds": 1}
    )
    told = " ".join(notes_on(groups_of(records("one"), other)))
    assert "different tasks" in told and "different numbers of rounds" in told
    assert not notes_on(groups_of(records("a"), records("b", seed=1)))


def test_an_unfinished_run_is_noted_with_its_rounds(records: Any) -> None:
    (note,) = notes_on(groups_of(records("half", summary=None, settings={"rounds": 9})))
    assert note.startswith("half is not finished: 2 of 9 rounds")


def test_what_differs_is_by_dotted_key(records: Any) -> None:
    groups = groups_of(records("a", settings={"train": {"lr": 1}}), records("b", settings={"train": {"lr": 2, "x": 3}}))
    assert differing(groups) == {"train.lr": ["1", "2"], "train.x": ["–", "3"]}
