"""Questions of several benchmarks as one training set, and tests of other tasks beside it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.data.tasks import Part, Questions, Task, load_mixture, load_task, with_zero_shot
from coterie.errors import ConfigError, CoterieError, DataError
from coterie.experiments.config import parse
from coterie.experiments.shares import chosen_task, share_out, skewed_by
from coterie.maths.keys import root_key

KEY = root_key(0)


def write(place: Path, name: str, count: int = 60, options: int = 3) -> Path:
    """Questions "<name> <i>?" whose right option is i modulo the number of options, as JSON lines."""
    rows = [
        {"question": f"{name} {i}?", "choices": [f"{name} {i} {o}" for o in range(options)], "answer": i % options}
        for i in range(count)
    ]
    path = place / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def part(place: Path, name: str, count: int = 60, options: int = 3, **given: Any) -> Part:
    return Part(name, "choices-file", options={"path": str(write(place, name, count, options))}, **given)


def pooled(place: Path) -> Task:
    return load_mixture([part(place, "b", 60, 2), part(place, "a", 40, 4)], seed_key=KEY)


def test_questions_of_several_benchmarks_are_pooled_and_each_keeps_its_own_test(tmp_path: Path) -> None:
    task = pooled(tmp_path)
    assert task.kind == "choices" and isinstance(task.train, Questions) and isinstance(task.test, Questions)
    assert task.train.groups == ("b",) * 48 + ("a",) * 32 and task.test.groups == ("b",) * 12 + ("a",) * 8
    assert task.label_names == ("answer 1", "answer 2", "answer 3", "answer 4")
    assert {len(options) for options in task.train.choices} == {2, 4} and task.metrics == ("accuracy",)
    for name, whole in (("a", task.test.select(range(12, 20))), ("b", task.test.select(range(12)))):
        alone = load_task("choices-file", seed_key=KEY, path=str(tmp_path / f"{name}.jsonl"))
        own = task.more_tests[name]
        assert sorted(own.contents()) == sorted(alone.test.contents()) == sorted(whole.contents())
    for prompt, options, right in zip(task.train.prompts, task.train.choices, task.train.labels, strict=True):
        assert options[right] == f"{prompt.split('?')[0]} {int(prompt.split()[1][:-1]) % len(options)}"


def test_limits_are_of_each_benchmark(tmp_path: Path) -> None:
    parts = [part(tmp_path, "b", limit_train=10), part(tmp_path, "a", limit_train=None, limit_test=5)]
    task = load_mixture(parts, seed_key=KEY)
    assert [task.train.groups.count(name) for name in "ba"] == [10, 48]  # type: ignore[union-attr]
    assert [len(task.more_tests[name]) for name in "ba"] == [12, 5] and len(task.test) == 17


def test_a_question_in_the_test_of_one_benchmark_is_not_trained_on_in_another(tmp_path: Path) -> None:
    again = replace(part(tmp_path, "a", 60), name="again")
    more = {"path": str(write(tmp_path, "b", 20)), "test_path": str(tmp_path / "a.jsonl")}
    task = load_mixture([Part("b", "choices-file", limit_test=10, options=more), again], seed_key=KEY)
    tested = set(task.test.contents())
    assert len(task.train) and not tested & set(task.train.contents())
    assert any("dropped because they stand in the test of another part" in note for note in task.notes)
    whole = {"path": str(tmp_path / "a.jsonl"), "test_path": str(tmp_path / "b.jsonl")}
    parts = [Part("a", "choices-file", options=whole), Part("b", "choices-file", options=more)]
    with pytest.raises(DataError, match="every training question of 'a' stands in the test of another part"):
        load_mixture(parts, seed_key=KEY)


def test_parts_of_two_kinds_and_two_scores_and_chosen_classes_are_refused(tmp_path: Path) -> None:
    texts = tmp_path / "texts.csv"
    texts.write_text("text,label\n" + "".join(f"text {i},{('no', 'yes')[i % 2]}\n" for i in range(20)))
    mean = Part("b", "choices-file", options={"path": str(write(tmp_path, "b")), "score": "mean"})
    cases: list[tuple[list[Part], type[CoterieError], str]] = [
        ([part(tmp_path, "a"), Part("t", "file", options={"path": str(texts)})], DataError, "several kinds"),
        ([part(tmp_path, "a"), mean], DataError, "in two ways"),
        ([part(tmp_path, "a", classes=("answer 1", "answer 2"))], ConfigError, "classes are of classification"),
    ]
    for parts, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            load_mixture(parts, seed_key=KEY)
        assert "\n" not in str(caught.value)


def config(place: Path, partition: dict[str, Any], **sections: Any):
    """Two benchmarks of 120 and 80 questions among four clients."""
    files = {name: str(write(place, name, count)) for name, count in (("one", 150), ("two", 100))}
    parts = [{"name": name, "task": "choices-file", "path": path} for name, path in files.items()]
    raw = {
        "method": "fedit",
        "task": {"name": "mixture", "parts": parts},
        "clients": {"count": 4},
        "partition": {"minimum": 1, "test_fraction": 0.0} | partition,
    }
    return parse(raw | sections)


def test_dirichlet_skews_which_benchmark_a_client_has_and_not_the_answers_place(tmp_path: Path) -> None:
    settings = config(tmp_path, {"kind": "dirichlet", "beta": 0.1}, seed=3)
    task = chosen_task(settings)
    groups, places = np.asarray(task.train.groups), task.train.labels
    assert skewed_by(task).tolist() == [("one", "two").index(group) for group in groups]
    shares = share_out(settings, task)
    held = [share["train"] for share in shares.clients.values()]
    assert sorted(np.concatenate(held).tolist()) == list(range(len(task.train)))
    # Each benchmark is dealt in proportions of its own; places of answers follow by chance.
    of_one = np.array([(groups[own] == "one").mean() for own in held if len(own) > 20])
    first = np.array([(places[own] == 0).mean() for own in held if len(own) > 20])
    assert of_one.max() - of_one.min() > 0.4 > first.max() - first.min()
    told = [client["groups"] for client in shares.record["clients"]]
    assert [sum(counts.values()) for counts in told] == [len(own) for own in held]


def test_an_even_deal_leaves_every_client_a_like_part_of_each_benchmark(tmp_path: Path) -> None:
    settings = config(tmp_path, {"kind": "iid"})
    task = chosen_task(settings)
    groups = np.asarray(task.train.groups)
    for share in share_out(settings, task).clients.values():
        assert 0.45 < (groups[share["train"]] == "one").mean() < 0.75


def test_one_set_of_questions_is_skewed_by_the_place_of_the_answer(tmp_path: Path) -> None:
    task = load_task("choices-file", seed_key=KEY, path=str(write(tmp_path, "a")))
    assert skewed_by(task) is task.train.labels


def test_tests_of_other_tasks_stand_beside_the_own_and_are_not_trained_on(tmp_path: Path) -> None:
    cards = tmp_path / "cards.jsonl"
    rows = [{"prompt": f"What is {i}?", "answer": f"It is {i}."} for i in range(30)]
    cards.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = parse(
        {
            "method": "fedit",
            "task": {
                "name": "instructions-file",
                "path": str(cards),
                "zero_shot": [
                    {"name": "exam", "task": "choices-file", "path": str(write(tmp_path, "exam")), "test_limit": 7},
                    {"name": "split", "task": "choices-file", "path": str(write(tmp_path, "split"))},
                ],
            },
        }
    )
    task = chosen_task(settings)
    assert task.kind == "instructions" and len(task.train) + len(task.test) == 30
    exam, whole = task.more_tests["exam"], task.more_tests["split"]
    # Without a test of its own, all of it is one: nothing of it is trained on.
    assert isinstance(exam, Questions) and len(exam) == 7 and len(whole) == 60
    again = chosen_task(settings.model_copy(update={"seed": 5}))
    assert again.more_tests["exam"].contents() == exam.contents()
    assert any(note.startswith("exam, for scores only") for note in task.notes)


def test_of_a_task_that_has_a_test_that_alone_is_scored(tmp_path: Path) -> None:
    task = load_task("choices-file", seed_key=KEY, path=str(write(tmp_path, "a")))
    apart = {"path": str(write(tmp_path, "learnt")), "test_path": str(write(tmp_path, "asked", 20))}
    found = with_zero_shot(task, [Part("exam", "choices-file", options=apart)]).more_tests["exam"]
    assert len(found) == 20 and all(question.startswith("asked") for question, _ in found.contents())


def test_training_examples_that_stand_in_such_a_test_are_dropped(tmp_path: Path) -> None:
    task = load_task("choices-file", seed_key=KEY, path=str(write(tmp_path, "a", 60)))
    more = with_zero_shot(task, [Part("same", "choices-file", options={"path": str(write(tmp_path, "a", 40))})])
    kept = {int(prompt.split()[1][:-1]) for prompt in more.train.prompts}  # type: ignore[union-attr]
    assert kept and min(kept) >= 40 and any("were dropped" in note for note in more.notes)


def test_what_cannot_be_scored_beside_a_task_is_refused(tmp_path: Path) -> None:
    task = load_task("choices-file", seed_key=KEY, path=str(write(tmp_path, "a")))
    texts = tmp_path / "texts.csv"
    texts.write_text("text,label\n" + "".join(f"text {i},{i % 2}\n" for i in range(20)))
    other = part(tmp_path, "b")
    cases = [
        ([Part("t", "file", options={"path": str(texts)})], "only language models"),
        ([other, other], "two tests called 'b'"),
        ([part(tmp_path, "b", classes=("x", "y"))], "without a choice of classes"),
    ]
    for parts, words in cases:
        with pytest.raises(ConfigError, match=words):
            with_zero_shot(task, parts)
    with pytest.raises(DataError, match="every training example"):
        with_zero_shot(task, [part(tmp_path, "a")])


@pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA, the folder of benchmark data, is not set")
def test_pubmedqa_is_scored_beside_medmcqa_and_two_benchmarks_are_pooled() -> None:
    zero_shot = [{"name": "pubmedqa", "test_limit": 30}]
    task = {"name": "medmcqa", "train_limit": 200, "test_limit": 20, "zero_shot": zero_shot}
    medical = chosen_task(parse({"method": "fedit", "task": task}))
    asked = medical.more_tests["pubmedqa"]
    assert len(asked) == 30 and isinstance(asked, Questions) and set(asked.choices) == {("yes", "no", "maybe")}
    parts = [{"name": "arc-easy", "test_limit": 10}, {"name": "openbookqa", "train_limit": 50, "test_limit": 10}]
    both = chosen_task(parse({"method": "fedit", "task": {"name": "mixture", "parts": parts}}))
    assert {name: len(test) for name, test in both.more_tests.items()} == {"arc-easy": 10, "openbookqa": 10}
    assert both.train.groups is not None and both.train.groups.count("openbookqa") == 50
