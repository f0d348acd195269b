"""GLUE (Wang et al. 2018, arXiv 1804.07461): eight tasks, read from the files that the benchmark hands out.

The benchmark's own test labels are hidden, so its dev set is the test set here, as is usual. A folder may hold the
files of the GLUE archive, or those of the data set that a task was made from; where one of the two sets is missing,
the other is split, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.data.files import read_rows, read_text
from coterie.data.tasks.base import Examples, Pool, benchmark_folder, first_file, joined, numbered, train_and_test
from coterie.errors import DataError

_TRAIN, _DEV = ("train.tsv",), ("dev.tsv",)
_ENTAILMENT = ("entailment", "not_entailment")


def sst2(path: str | None = None) -> Pool:
    """Film-review phrases, negative or positive: SST-2 (Socher et al. 2013)."""
    folder = benchmark_folder("sst2", path, "sst2", "SST-2")

    def read(place: Path) -> Examples:
        return numbered(place, read_rows(place, text="sentence", pair=None, label="label"), ("0", "1"), "SST-2")

    train, test, notes = train_and_test(folder, read, ("train_full.tsv", *_TRAIN), _DEV)
    return Pool(train, test, ("negative", "positive"), _source("SST-2 (Socher et al. 2013)", folder, path), notes)


def cola(path: str | None = None) -> Pool:
    """Sentences out of linguistics, acceptable or not: CoLA (Warstadt et al. 2018), judged by Matthews correlation.

    The test set is GLUE's dev set; it is also given in two parts, sentences from the sources of the training set
    (in-domain) and from others (out-of-domain). Sources are the groups.
    """
    folder = benchmark_folder("cola", path, "cola", "CoLA")

    def read(place: Path) -> Examples:
        columns = ("source", "label", "star", "sentence")
        rows = read_rows(place, text="sentence", pair=None, label="label", group="source", kind="tsv", header=columns)
        examples = numbered(place, rows, ("0", "1"), "CoLA")
        beside = folder / "out_of_domain_dev.tsv"
        in_two = place.name == "in_domain_dev.tsv" and beside.is_file()
        return joined(examples, read(beside)) if in_two else examples

    train, test, notes = train_and_test(folder, read, ("in_domain_train.tsv", *_TRAIN), ("in_domain_dev.tsv", *_DEV))
    parts = {}
    if test is not None:
        known = np.isin(np.array(test.groups), np.array(train.groups))
        places = {"in-domain": np.flatnonzero(known), "out-of-domain": np.flatnonzero(~known)}
        parts = {name: test.select(indices) for name, indices in places.items() if len(indices)}
    return Pool(
        train,
        test,
        ("unacceptable", "acceptable"),
        _source("CoLA (Warstadt et al. 2018)", folder, path),
        notes,
        metrics=("matthews", "accuracy"),
        more_tests=parts,
    )


def rte(path: str | None = None) -> Pool:
    """Whether the second sentence follows from the first: RTE (Dagan et al. 2005 to Bentivogli et al. 2009)."""
    return _pairs("rte", path, ("sentence1", "sentence2", "label"), _ENTAILMENT, "RTE (Bentivogli et al. 2009)")


def qnli(path: str | None = None) -> Pool:
    """Whether the sentence answers the question: QNLI, made from SQuAD (Rajpurkar et al. 2016)."""
    return _pairs("qnli", path, ("question", "sentence", "label"), _ENTAILMENT, "QNLI (Rajpurkar et al. 2016)")


def mrpc(path: str | None = None) -> Pool:
    """Whether two sentences of the news say the same: MRPC (Dolan & Brockett 2005), judged by accuracy and F1."""
    folder = benchmark_folder("mrpc", path, "mrpc", "MRPC")

    def read(place: Path) -> Examples:
        rows = read_rows(place, text="#1 String", pair="#2 String", label="Quality", kind="tsv")
        return numbered(place, rows, ("0", "1"), "MRPC")

    train, test, notes = train_and_test(
        folder, read, ("msr_paraphrase_train.txt", *_TRAIN), ("msr_paraphrase_test.txt", *_DEV)
    )
    source = _source("MRPC (Dolan & Brockett 2005)", folder, path)
    return Pool(train, test, ("different", "equivalent"), source, notes, metrics=("accuracy", "f1"))


def qqp(path: str | None = None) -> Pool:
    """Whether two questions ask the same: Quora Question Pairs (Iyer et al. 2017), judged by accuracy and F1."""
    folder = benchmark_folder("qqp", path, "qqp", "QQP")
    left_out: list[str] = []

    def read(place: Path) -> Examples:
        columns = ("question1", "question2", "is_duplicate")
        content = _whole_lines(place, columns, left_out)
        rows = read_rows(place, text=columns[0], pair=columns[1], label=columns[2], content=content)
        return numbered(place, rows, ("0", "1"), "QQP")

    train, test, notes = train_and_test(folder, read, _TRAIN, _DEV)
    source = _source("QQP (Iyer et al. 2017)", folder, path)
    return Pool(train, test, ("different", "duplicate"), source, (*notes, *left_out), metrics=("accuracy", "f1"))


def mnli(path: str | None = None) -> Pool:
    """Whether the second sentence follows, may be, or cannot be: MNLI (Williams et al. 2018).

    The test set is dev-matched (the genres of the training set); dev-mismatched (others) is given beside it. Genres
    are the groups.
    """
    folder = benchmark_folder("mnli", path, "mnli", "MNLI")
    left_out: list[str] = []

    def read(place: Path) -> Examples:
        columns = ("sentence1", "sentence2", "gold_label", "genre")
        content = _whole_lines(place, columns, left_out, absent={"gold_label": "-"})
        rows = read_rows(place, text=columns[0], pair=columns[1], label=columns[2], group=columns[3], content=content)
        return numbered(place, rows, ("entailment", "neutral", "contradiction"), "MNLI")

    train, test, notes = train_and_test(folder, read, _TRAIN, ("dev_matched.tsv",))
    beside = folder / "dev_mismatched.tsv"
    mismatched = {"mismatched": read(beside)} if beside.is_file() else {}
    return Pool(
        train,
        test,
        ("entailment", "neutral", "contradiction"),
        _source("MNLI (Williams et al. 2018)", folder, path),
        (*notes, *left_out),
        more_tests=mismatched,
    )


def wnli(path: str | None = None) -> Pool:
    """Whether a pronoun stands for what the second sentence says: WNLI, of the Winograd schemas (Levesque et al. 2011).

    Its dev set repeats sentences of the training set with the other answer, so few systems beat always answering
    the most frequent class.
    """
    folder = benchmark_folder("wnli", path, "wnli", "WNLI")
    columns = ("index", "sentence1", "sentence2", "label")

    def read(place: Path, header: Sequence[str] | None = None) -> Examples:
        rows = read_rows(place, text="sentence1", pair="sentence2", label="label", header=header)
        return numbered(place, rows, ("0", "1"), "WNLI")

    train, test, notes = train_and_test(folder, read, _TRAIN, _DEV)
    rest = first_file(folder, ("val.tsv",))
    if rest is not None and test is not None:
        # One public copy has cut the training set in two, the second part without a header.
        train = joined(train, read(rest, None if read_text(rest).startswith("index\t") else columns))
        notes = (*notes, "val.tsv is the second part of the training set")
    source = _source("WNLI (Levesque et al. 2011)", folder, path)
    return Pool(train, test, ("not_entailment", "entailment"), source, notes)


def _pairs(task: str, path: str | None, columns: tuple[str, str, str], names: tuple[str, ...], origin: str) -> Pool:
    """A task of two text columns and labels that are spelt out, in train.tsv and dev.tsv."""
    folder = benchmark_folder(task, path, task, task.upper())

    def read(place: Path) -> Examples:
        rows = read_rows(place, text=columns[0], pair=columns[1], label=columns[2])
        return numbered(place, rows, names, task.upper())

    train, test, notes = train_and_test(folder, read, _TRAIN, _DEV)
    return Pool(train, test, names, _source(origin, folder, path), notes)


def _whole_lines(place: Path, columns: Sequence[str], left_out: list[str], absent: dict[str, str] | None = None) -> str:
    """A large TSV's text with its broken lines blank: another number of columns, or nothing (or `absent`) in one.

    The public copies have a few, where a line break stood in a text. How many is added to `left_out`, as a note.
    """
    lines = read_text(place).split("\n")
    header = lines[0].removesuffix("\r").split("\t")
    wanted = [(header.index(column), (absent or {}).get(column, "")) for column in columns if column in header]

    def whole(line: str) -> bool:
        fields = line.removesuffix("\r").split("\t")
        return len(fields) == len(header) and all(fields[at].strip() not in ("", empty) for at, empty in wanted)

    kept = [line if whole(line) else "" for line in lines]
    broken = sum(1 for line, other in zip(lines, kept, strict=True) if line.strip() and not other)
    if broken == sum(1 for line in lines[1:] if line.strip()):
        raise DataError(f"{place}: no line has all of the columns {', '.join(columns)}")
    if broken:
        left_out.append(f"{broken} broken or unlabelled lines of {place.name} were left out")
    return "\n".join(kept)


def _source(origin: str, folder: Path, path: str | None) -> str:
    return f"GLUE {origin}, from {'COTERIE_DATA' if path is None else f'the folder {folder.name}'}"
