"""Prompts and the answers to be learnt: own files, and grade-school maths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coterie.data.files import read_records
from coterie.data.tasks.base import Pool, benchmark_folder, train_and_test
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
    return Pool(train, test, (NO_GROUP,), source("GSM8K (Cobbe et al. 2021)", folder, path), notes)


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
