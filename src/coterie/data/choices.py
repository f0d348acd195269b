"""Multiple-choice questions, for scoring each choice by its likelihood: the commonsense sets of LLM-Adapters.

The files (Hu et al. 2023, arXiv 2304.01933) are JSON lists of `instruction`, `input`, `output` and `answer`. The
instruction is text that holds question, choices and answer format; here it is taken apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.files import read_text
from coterie.data.partition import split
from coterie.data.tasks.base import benchmark_folder, first_file
from coterie.errors import ConfigError, DataError, nearest
from coterie.maths.keys import Key, root_key

CHOICE_TASKS: Mapping[str, tuple[str, str]] = {
    "arc-easy": ("llm_adapters_ARC-Easy", "ARC-Easy (Clark et al. 2018)"),
    "arc-challenge": ("llm_adapters_ARC-Challenge", "ARC-Challenge (Clark et al. 2018)"),
    "openbookqa": ("llm_adapters_openbookqa", "OpenBookQA (Mihaylov et al. 2018)"),
    "boolq": ("llm_adapters_boolq", "BoolQ without passages (Clark et al. 2019)"),
    "piqa": ("llm_adapters_piqa", "PIQA (Bisk et al. 2020)"),
    "winogrande": ("llm_adapters_winogrande", "WinoGrande (Sakaguchi et al. 2020)"),
    "social-iqa": ("llm_adapters_social_i_qa", "Social IQA (Sap et al. 2019)"),
}
"""Folder under COTERIE_DATA (or the same without its prefix) and origin, by name."""

_PREFIX = "llm_adapters_"
_FORMAT = re.compile(r"(?P<body>.*?)\s*Answer format:\s*(?P<names>\S+)\s*", re.DOTALL)


@dataclass(frozen=True)
class ChoiceExample:
    """One question. `choices[label]` is the right answer.

    prompt: what is asked, without the choices. choices: their texts. names: what the answer format calls them
    (answer1 …; for true/false questions the same as `choices`). instruction: the whole, as in the file.
    """

    prompt: str
    choices: tuple[str, ...]
    label: int
    names: tuple[str, ...]
    instruction: str


@dataclass(frozen=True)
class ChoiceTask:
    """Questions to train on and to be tested with; `notes` say what was done to them on loading."""

    name: str
    train: tuple[ChoiceExample, ...]
    test: tuple[ChoiceExample, ...]
    source: str
    notes: tuple[str, ...]

    metrics = ("accuracy",)


def load_choices(
    name: str,
    *,
    seed_key: Key,
    limit_train: int | None = None,
    limit_test: int | None = None,
    path: str | None = None,
) -> ChoiceTask:
    """The named multiple-choice task, from train.json and test.json in `path` or under COTERIE_DATA.

    Where there is only test.json, a fifth of it is the test set, the same for every seed. Test questions that training
    repeats are dropped from training. Limits as for `coterie.data.load_task`.

    Raises:
        ConfigError: unknown task, or a limit below one.
        DataError: missing or malformed data.
    """
    if name not in CHOICE_TASKS:
        raise ConfigError(f"there is no multiple-choice task {name!r}{nearest(name, CHOICE_TASKS)}")
    folder_name, origin = CHOICE_TASKS[name]
    folder = benchmark_folder(name, path, folder_name, folder_name.removeprefix(_PREFIX))
    fixed = root_key(0).fold("choices", name)
    train_path, test_path = first_file(folder, ("train.json",)), first_file(folder, ("test.json",))
    if test_path is None:
        raise DataError(f"{folder}: no file test.json")
    test = read_choices(test_path)
    notes = []
    if train_path is not None:
        known = {example.instruction for example in test}
        whole = read_choices(train_path)
        train = [example for example in whole if example.instruction not in known]
        if len(train) < len(whole):
            notes.append(f"{len(whole) - len(train)} training questions were dropped: they stand in the test set")
    else:
        train, test = _shared(test, 0.8, fixed.fold("test"))
        notes.append(f"train.json is missing from the folder: test.json is split into {len(train)} and {len(test)}")
    for limit, size in (("limit_train", limit_train), ("limit_test", limit_test)):
        if size is not None and size < 1:
            raise ConfigError(f"{limit} is {size}; it must be at least 1")
    if limit_train is not None and limit_train < len(train):
        notes.append(f"limit_train: {limit_train} of {len(train)} questions were kept")
        train, _ = _shared(train, limit_train / len(train), seed_key.fold("limit_train"))
    if limit_test is not None and limit_test < len(test):
        notes.append(f"limit_test: {limit_test} of {len(test)} questions were kept")
        test, _ = _shared(test, limit_test / len(test), fixed.fold("limit_test"))
    where = "COTERIE_DATA" if path is None else f"the folder {folder.name}"
    source = f"{origin}, as instructions of LLM-Adapters (Hu et al. 2023), from {where}"
    return ChoiceTask(name, tuple(train), tuple(test), source, tuple(notes))


def read_choices(path: Path) -> list[ChoiceExample]:
    """The questions of one file.

    Raises:
        DataError: not such a file, or an instruction whose choices cannot be found.
    """
    try:
        records = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(records, list) or not records:
        raise DataError(f"{path}: a list of questions is expected")
    return [_example(path, place, record) for place, record in enumerate(records)]


def _example(path: Path, place: int, record: Any) -> ChoiceExample:
    given = record if isinstance(record, dict) else {}
    instruction, extra, answer = (given.get(key, "") for key in ("instruction", "input", "answer"))
    if not (isinstance(instruction, str) and isinstance(answer, str) and isinstance(extra, str)):
        raise DataError(f"{path}, question {place}: instruction, input and answer must be texts")
    parted = _parted(f"{instruction}\n\n{extra}" if extra.strip() else instruction)
    if parted is None:
        raise DataError(f"{path}, question {place}: no choices in the instruction {instruction[:40]!r}")
    prompt, choices, names = parted
    if answer not in names:
        raise DataError(f"{path}, question {place}: the answer {answer!r} is not among {', '.join(names)}")
    return ChoiceExample(prompt, choices, names.index(answer), names, instruction)


def _parted(instruction: str) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Prompt, choices and their names. Choices stand behind `Answer1:`, `Answer2:` …, in this order; a text that
    is a choice may hold a marker too, so each is looked for behind the one before, the first one from behind."""
    found = _FORMAT.fullmatch(instruction)
    if found is None:
        return None
    body, names = found["body"], tuple(found["names"].split("/"))
    if len(set(names)) != len(names) or len(names) < 2:
        return None
    if not any(name[-1:].isdigit() for name in names):
        return body.strip(), names, names
    at = body.rfind(f"{names[0].capitalize()}:")
    starts = []
    for name in names:
        marker = f"{name.capitalize()}:"
        at = body.find(marker, at) if at >= 0 else -1
        if at < 0:
            return None
        starts.append((at, at + len(marker)))
        at += len(marker)
    ends = [start for start, _ in starts[1:]] + [len(body)]
    choices = tuple(body[begin:end].strip() for (_, begin), end in zip(starts, ends, strict=True))
    return (body[: starts[0][0]].strip(), choices, names) if all(choices) else None


def _shared(
    examples: Sequence[ChoiceExample], share: float, key: Key
) -> tuple[list[ChoiceExample], list[ChoiceExample]]:
    """Two disjoint lists, the first with `share` of the examples, places of the right answer in proportion."""
    labels = np.array([example.label for example in examples], dtype=np.int64)
    parts = split(np.arange(len(examples)), labels, {"one": share, "other": 1 - share}, key)
    first, second = ([examples[place] for place in parts[name]] for name in ("one", "other"))
    return first, second
