"""SuperGLUE (Wang et al. 2019, arXiv 1905.00537): WiC, BoolQ and CB, each with its dev set as the test set."""

from __future__ import annotations

from pathlib import Path

from coterie.data.files import Row, read_records, read_rows, read_text
from coterie.data.tasks.base import Examples, Pool, benchmark_folder, first_file, joined, numbered, train_and_test
from coterie.errors import DataError

_TRAIN, _DEV = ("train.jsonl",), ("val.jsonl", "dev.jsonl")
_WHOLE = {"boolq": 9427, "cb": 250}
"""Examples of the official training sets."""


def wic(path: str | None = None) -> Pool:
    """Whether a word means the same in two sentences: WiC (Pilehvar & Camacho-Collados 2019).

    The benchmark gives the word's place in both sentences, and its baseline reads the encoder's states there. A
    classifier of the whole pair has no such input, so the word is marked in the text, by asterisks, as Raffel et al.
    2020 (arXiv 1910.10683, appendix D) mark the word in question. Read are the files of WiC itself (train.data.txt
    and train.gold.txt, flat or in a folder train) or of SuperGLUE (train.jsonl); the test set that WiC published
    later is given beside dev.
    """
    folder = benchmark_folder("wic", path, "wic", "WiC", "superglue_wic")
    train, test, notes = train_and_test(folder, _wic, _wic_names("train"), (*_wic_names("dev"), "val.jsonl"))
    later = first_file(folder, _wic_names("test")[:2])
    labelled = later is not None and _gold(later).is_file()
    return Pool(
        train,
        test,
        ("different", "same"),
        _source("WiC (Pilehvar & Camacho-Collados 2019)", folder, path),
        notes,
        more_tests={"official test": _wic(later)} if later is not None and labelled else {},
    )


def boolq(path: str | None = None) -> Pool:
    """Yes or no to a question, with a passage that tells: BoolQ (Clark et al. 2019)."""
    folder = benchmark_folder("boolq", path, "boolq", "BoolQ", "superglue_boolq", "superglue_fewshot_BoolQ")

    def read(place: Path) -> Examples:
        rows = read_rows(place, text="question", pair="passage", label="label")
        return numbered(place, rows, ("false", "true"), "BoolQ")

    train, test, notes = train_and_test(folder, read, _TRAIN, _DEV)
    few = folder / "dev32.jsonl"
    if few.is_file() and test is not None:
        # FewGLUE hands out 32 + 32 examples in place of the training set.
        note = f"the official training set ({_WHOLE['boolq']} examples) is missing: few-shot and dev set stand for it"
        train, test, notes = joined(train, read(few), test), None, (*notes, note)
    return Pool(train, test, ("no", "yes"), _source("BoolQ (Clark et al. 2019)", folder, path), notes)


def cb(path: str | None = None) -> Pool:
    """Whether the text commits its author to the hypothesis: CommitmentBank (de Marneffe et al. 2019).

    Judged by accuracy and macro-averaged F1, since few examples are neutral.
    """
    folder = benchmark_folder("cb", path, "cb", "CB", "superglue_cb")
    names = ("entailment", "contradiction", "neutral")

    def read(place: Path) -> Examples:
        return numbered(place, read_rows(place, text="premise", pair="hypothesis", label="label"), names, "CB")

    train, test, notes = train_and_test(folder, read, _TRAIN, _DEV)
    if test is not None and len(train) < _WHOLE["cb"]:
        notes = (*notes, f"{len(train)} of the {_WHOLE['cb']} official training examples are in the folder")
    source = _source("CommitmentBank (de Marneffe et al. 2019)", folder, path)
    return Pool(train, test, names, source, notes, metrics=("accuracy", "macro_f1"))


def marked(sentence: str, start: int, end: int) -> str:
    """The sentence with asterisks round the characters start … end - 1."""
    return f"{sentence[:start]}*{sentence[start:end]}*{sentence[end:]}"


def _wic_names(part: str) -> tuple[str, ...]:
    return f"{part}.data.txt", f"{part}/{part}.data.txt", f"{part}.jsonl"


def _wic(place: Path) -> Examples:
    rows = _wic_jsonl(place) if place.suffix == ".jsonl" else _wic_tables(place)
    return numbered(place, rows, ("F", "T"), "WiC")


def _wic_tables(place: Path) -> list[Row]:
    """WiC's own layout: the word's place is a number of space-separated tokens, labels are lines of another file."""
    columns = ("word", "pos", "places", "first", "second")
    records = read_records(place, ("places", "first", "second"), kind="tsv", header=columns)
    gold = read_text(_gold(place)).split()
    if len(gold) != len(records):
        raise DataError(f"{place}: {len(records)} examples, but {_gold(place).name} holds {len(gold)} labels")
    rows = []
    for (line, values), label in zip(records, gold, strict=True):
        tokens = [values["first"].split(), values["second"].split()]
        places = values["places"].split("-")
        if len(places) != 2 or not all(p.isdigit() and int(p) < len(t) for p, t in zip(places, tokens, strict=True)):
            raise DataError(f"{place}, line {line}: {values['places']!r} are no places of words in the two sentences")
        for words, at in zip(tokens, map(int, places), strict=True):
            words[at] = f"*{words[at]}*"
        rows.append(Row(line, " ".join(tokens[0]), " ".join(tokens[1]), label))
    return rows


def _wic_jsonl(place: Path) -> list[Row]:
    """SuperGLUE's layout: the word's places are characters, start1 … end1 - 1 and start2 … end2 - 1."""
    spans = ("start1", "end1", "start2", "end2")
    rows = []
    for line, values in read_records(place, ("sentence1", "sentence2", "label", *spans)):
        first, second = values["sentence1"], values["sentence2"]
        if not all(values[name].isdigit() for name in spans):
            raise DataError(f"{place}, line {line}: {', '.join(spans)} must be whole numbers")
        start1, end1, start2, end2 = (int(values[name]) for name in spans)
        if not (start1 < end1 <= len(first) and start2 < end2 <= len(second)):
            raise DataError(f"{place}, line {line}: the word's places lie outside of the sentences")
        label = "T" if values["label"] == "true" else "F"
        rows.append(Row(line, marked(first, start1, end1), marked(second, start2, end2), label))
    return rows


def _gold(place: Path) -> Path:
    return place.with_name(place.name.replace(".data.", ".gold."))


def _source(origin: str, folder: Path, path: str | None) -> str:
    return f"SuperGLUE {origin}, from {'COTERIE_DATA' if path is None else f'the folder {folder.name}'}"
