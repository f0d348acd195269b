"""GLUE from generated files in its public layouts: classes, second texts, parts of test sets, broken lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.data.metrics import METRICS
from coterie.data.tasks import Task, load_task
from coterie.errors import DataError
from coterie.maths.keys import root_key

KEY = root_key(0)
NLI = "index\tsentence1\tsentence2\tlabel"


def write(folder: Path, **files: list[str]) -> Path:
    """Files of the given lines; `a__tsv` is a.tsv."""
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        (folder / name.replace("__", ".")).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def load(name: str, folder: Path, **options: Any) -> Task:
    return load_task(name, seed_key=KEY, path=str(folder), **options)


def classes(task: Task) -> list[str]:
    return [task.label_names[label] for label in task.train.labels]


def test_cola_has_no_header_and_a_dev_set_in_two_parts(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "CoLA",
        in_domain_train__tsv=["s1\t1\t\tHe ran.", 's2\t0\t*\tRan "he.', "s1\t1\t\tShe ran."],
        in_domain_dev__tsv=["s2\t1\t\tWe ran."],
        out_of_domain_dev__tsv=["z9\t0\t*\tRan us.", "z8\t1\t\tThey ran."],
    )
    task = load("cola", folder)
    assert task.train.texts == ("He ran.", 'Ran "he.', "She ran.")
    assert classes(task) == ["acceptable", "unacceptable", "acceptable"]
    assert task.train.groups == ("s1", "s2", "s1") and task.metrics == ("matthews", "accuracy")
    assert task.test.texts == ("We ran.", "Ran us.", "They ran.")
    assert {name: part.texts for name, part in task.more_tests.items()} == {
        "in-domain": ("We ran.",),
        "out-of-domain": ("Ran us.", "They ran."),
    }


def test_cola_of_the_glue_archive_tells_the_parts_by_their_sources(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "CoLA",
        train__tsv=["s1\t1\t\tHe ran.", "s2\t0\t*\tRan he."],
        dev__tsv=["s2\t1\t\tWe ran.", "z9\t0\t*\tRan us.", "s1\t1\t\tI ran."],
    )
    task = load("cola", folder)
    assert task.more_tests["in-domain"].texts == ("We ran.", "I ran.")
    assert task.more_tests["out-of-domain"].texts == ("Ran us.",)
    limited = load("cola", folder, limit_test=1)
    assert [len(part) for part in (limited.test, *limited.more_tests.values())] == [1, 1, 1]


def test_training_texts_that_stand_in_any_test_set_are_dropped(tmp_path: Path) -> None:
    rows = ["entailment\tp\tq\tx", "neutral\tr\ts\tx", "contradiction\tt\tu\ty"]
    folder = write(
        tmp_path / "MNLI",
        train__tsv=["gold_label\tsentence1\tsentence2\tgenre", *rows, "neutral\tv\tw\ty"],
        dev_matched__tsv=["gold_label\tsentence1\tsentence2\tgenre", rows[0]],
        dev_mismatched__tsv=["gold_label\tsentence1\tsentence2\tgenre", rows[1]],
    )
    task = load("mnli", folder)
    assert task.train.texts == ("t", "v")
    assert "2 training examples were dropped because their text stands in the test set" in task.notes


@pytest.mark.parametrize(
    ("name", "header", "columns"),
    [
        ("rte", NLI, ("sentence1", "sentence2")),
        ("qnli", "index\tquestion\tsentence\tlabel", ("question", "sentence")),
    ],
)
def test_entailment_is_class_0_as_the_benchmark_numbers_it(
    tmp_path: Path, name: str, header: str, columns: tuple[str, str]
) -> None:
    folder = write(
        tmp_path / name,
        train__tsv=[header, "0\ta\tb\tnot_entailment", '1\t"c\td\tentailment'],
        dev__tsv=[header, "0\te\tf\tentailment"],
    )
    task = load(name, folder)
    assert task.label_names == ("entailment", "not_entailment") and task.train.labels.tolist() == [1, 0]
    assert task.train.texts == ("a", '"c') and task.train.pairs == ("b", "d") and task.test.pairs == ("f",)
    (folder / "dev.tsv").write_text(header + "\n0\te\tf\tentailed\n")
    with pytest.raises(DataError, match=r"dev\.tsv, line 2: the label 'entailed' .* did you mean 'entailment'"):
        load(name, folder)


def test_mrpc_reads_the_corpus_and_the_archive_layout(tmp_path: Path) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    corpus = write(
        tmp_path / "corpus",
        msr_paraphrase_train__txt=[header, '1\t7\t8\tHe said "no.\tNo, he said.', "0\t9\t10\tp\tq"],
        msr_paraphrase_test__txt=[header, "1\t1\t2\tr\ts"],
    )
    archive = write(
        tmp_path / "MRPC",
        train__tsv=[header, '1\t7\t8\tHe said "no.\tNo, he said.', "0\t9\t10\tp\tq"],
        dev__tsv=[header, "1\t1\t2\tr\ts"],
    )
    for folder in (corpus, archive):
        task = load("mrpc", folder)
        assert task.train.texts == ('He said "no.', "p") and task.train.pairs == ("No, he said.", "q")
        assert classes(task) == ["equivalent", "different"] and task.metrics == ("accuracy", "f1")
        assert task.test.texts == ("r",)


def test_qqp_leaves_broken_lines_out_and_counts_them(tmp_path: Path) -> None:
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    folder = write(
        tmp_path / "QQP",
        train__tsv=[
            header,
            "1\t1\t2\thow so\twhy so\t1",
            "2\t3\t4\tbroken in",
            "two\tparts\t0",
            "3\t5\t6\twhat\t\t0",
            "4\t7\t8\twhat\twhere\t0",
        ],
        dev__tsv=[header, "9\t1\t2\twho\twhom\t1"],
    )
    task = load("qqp", folder)
    assert task.train.texts == ("how so", "what") and task.train.pairs == ("why so", "where")
    assert classes(task) == ["duplicate", "different"] and task.metrics == ("accuracy", "f1")
    assert task.notes == ("3 broken or unlabelled lines of train.tsv were left out",)
    (folder / "train.tsv").write_text(header + "\n1\t2\n")
    with pytest.raises(DataError, match=r"train\.tsv: no line has all of the columns question1, question2"):
        load("qqp", folder)
    (folder / "train.tsv").write_text(header.replace("question1", "question_1") + "\n1\t1\t2\ta\tb\t0\n")
    with pytest.raises(DataError, match="no column 'question1'; did you mean 'question_1'"):
        load("qqp", folder)


def test_mnli_reports_mismatched_beside_matched_and_keeps_genres(tmp_path: Path) -> None:
    header = "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label"
    folder = write(
        tmp_path / "MNLI",
        train__tsv=[
            header,
            "0\tfiction\ta\tb\tneutral\tneutral",
            "1\ttravel\tc\td\tentailment\tcontradiction",
            "2\ttravel\te\tf\tentailment\t-",
        ],
        dev_matched__tsv=[header, "0\tfiction\tg\th\tneutral\tentailment"],
        dev_mismatched__tsv=[header, "0\tletters\ti\tj\tneutral\tneutral", "1\tletters\tk\tl\tneutral\t-"],
    )
    task = load("mnli", folder)
    assert task.label_names == ("entailment", "neutral", "contradiction") and task.train.labels.tolist() == [1, 2]
    assert task.train.groups == ("fiction", "travel") and task.test.texts == ("g",)
    assert task.more_tests["mismatched"].texts == ("i",) and task.more_tests["mismatched"].groups == ("letters",)
    assert task.notes == (
        "1 broken or unlabelled lines of train.tsv were left out",
        "1 broken or unlabelled lines of dev_mismatched.tsv were left out",
    )


@pytest.mark.parametrize("with_header", [True, False])
def test_wnli_joins_a_training_set_that_was_cut_in_two(tmp_path: Path, with_header: bool) -> None:
    rest = ["2\tp\tq\t0", "5\tr\ts\t1"]
    folder = write(
        tmp_path / "WNLI",
        train__tsv=[NLI, "0\ta\tb\t1", "1\tc\td\t0"],
        val__tsv=[NLI, *rest] if with_header else rest,
        dev__tsv=[NLI, "0\te\tf\t0"],
    )
    task = load("wnli", folder)
    assert task.train.texts == ("a", "c", "p", "r") and task.train.pairs == ("b", "d", "q", "s")
    assert task.label_names == ("not_entailment", "entailment") and task.train.labels.tolist() == [1, 0, 0, 1]
    assert task.notes == ("val.tsv is the second part of the training set",)


def test_benchmarks_are_judged_by_metrics_that_exist(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", train__tsv=[NLI, "0\ta\tb\t1", "1\tc\td\t0"], dev__tsv=[NLI, "0\te\tf\t0"])
    task = load("wnli", folder)
    assert task.metrics == ("accuracy",) and set(task.metrics) <= set(METRICS)
    assert {METRICS[name](task.test.labels, task.test.labels) for name in task.metrics} == {1.0}


#: Training set, test set, share of the most frequent class in the test set.
KNOWN = {
    "sst2": (67_349, 872, 0.509),
    "cola": (8_534, 1_043, 0.691),
    "rte": (2_490, 277, 0.527),
    "mrpc": (4_076, 1_725, 0.665),
    "wnli": (635, 71, 0.563),
}


@pytest.mark.data
@pytest.mark.parametrize("name", KNOWN)
def test_the_real_sets_have_their_known_sizes_and_majority(data_dir: Path, name: str) -> None:
    if not (data_dir / name).is_dir():
        pytest.skip(f"COTERIE_DATA holds no {name!r}")
    task = load_task(name, seed_key=KEY)
    train, test, majority = KNOWN[name]
    assert (len(task.train), len(task.test)) == (train, test)
    assert np.bincount(task.test.labels).max() / test == pytest.approx(majority, abs=5e-4)


@pytest.mark.data
def test_the_real_qnli_is_split_where_only_its_dev_set_is_there(data_dir: Path) -> None:
    if not (data_dir / "qnli").is_dir() or (data_dir / "qnli" / "train.tsv").is_file():
        pytest.skip("COTERIE_DATA holds no QNLI of which only dev.tsv is there")
    task = load_task("qnli", seed_key=KEY)
    assert len(task.train) + len(task.test) == 5_463 and len(task.test) == 1_093
    assert task.notes[0] == "train.tsv is missing from the folder: dev.tsv stands for both"


@pytest.mark.data
def test_the_real_colas_dev_parts_are_527_and_516(data_dir: Path) -> None:
    if not (data_dir / "cola").is_dir():
        pytest.skip("COTERIE_DATA holds no 'cola'")
    parts = load_task("cola", seed_key=KEY).more_tests
    assert {name: len(part) for name, part in parts.items()} == {"in-domain": 527, "out-of-domain": 516}
