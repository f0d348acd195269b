"""The commonsense questions of LLM-Adapters (Hu et al. 2023, arXiv 2304.01933), taken out of its instructions.

The files are JSON lists of `instruction`, `input`, `output` and `answer`. The instruction is text that holds question,
choices and answer format; here it is taken apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie.data.files import read_text
from coterie.data.tasks.base import Pool, benchmark_folder, train_and_test
from coterie.data.tasks.choices import ASKED, Asked, gathered, pool_of, source
from coterie.data.tasks.language import ChoiceScore, Questions, filled
from coterie.errors import DataError

COMMONSENSE: Mapping[str, tuple[str, str]] = {
    "arc-easy": ("ARC-Easy", "ARC-Easy (Clark et al. 2018)"),
    "arc-challenge": ("ARC-Challenge", "ARC-Challenge (Clark et al. 2018)"),
    "openbookqa": ("openbookqa", "OpenBookQA (Mihaylov et al. 2018)"),
    "boolq-closed": ("boolq", "BoolQ without passages (Clark et al. 2019)"),
    "piqa": ("piqa", "PIQA (Bisk et al. 2020)"),
    "winogrande": ("winogrande", "WinoGrande (Sakaguchi et al. 2020)"),
    "social-iqa": ("social_i_qa", "Social IQA (Sap et al. 2019)"),
}
"""Folder (under COTERIE_DATA with llm_adapters_ before it, or without) and origin, by name."""

_FORMAT = re.compile(r"(?P<body>.*?)\s*Answer format:\s*(?P<names>\S+)\s*", re.DOTALL)


def commonsense(name: str, path: str | None = None, score: ChoiceScore = "sum") -> Pool:
    """The named set, from train.json and test.json; where one is missing, the other is split.

    Raises:
        DataError: missing or malformed data.
    """
    folder_name, origin = COMMONSENSE[name]
    folder = benchmark_folder(name, path, f"llm_adapters_{folder_name}", folder_name)

    def read(place: Path) -> Questions:
        return read_instructions(place, score)

    train, test, notes = train_and_test(folder, read, ("train.json",), ("test.json",))
    common = train.choices[0] if len(set(train.choices)) == 1 else None
    said = source(f"{origin}, as instructions of LLM-Adapters (Hu et al. 2023)", folder, path)
    return pool_of(train, test, said, notes, names=common)


LOADERS = {name: partial(commonsense, name) for name in COMMONSENSE}


def read_instructions(path: Path, score: ChoiceScore = "sum") -> Questions:
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
    return gathered([_asked(path, place, record) for place, record in enumerate(records)], score)


def _asked(path: Path, place: int, record: Any) -> Asked:
    given = record if isinstance(record, dict) else {}
    instruction, extra, answer = (given.get(key, "") for key in ("instruction", "input", "answer"))
    if not (isinstance(instruction, str) and isinstance(answer, str) and isinstance(extra, str)):
        raise DataError(f"{path}, question {place}: instruction, input and answer must be texts")
    parted = parted_instruction(f"{instruction}\n\n{extra}" if extra.strip() else instruction)
    if parted is None:
        raise DataError(f"{path}, question {place}: no choices in the instruction {instruction[:40]!r}")
    question, choices, names = parted
    if answer not in names:
        raise DataError(f"{path}, question {place}: the answer {answer!r} is not among {', '.join(names)}")
    return filled(ASKED, {"question": question}), choices, names.index(answer), None


def parted_instruction(instruction: str) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """Question, choices and what the answer format calls them (for true/false questions the choices themselves).

    Choices stand behind `Answer1:`, `Answer2:` …, in this order; a text that is a choice may hold a marker too, so
    each is looked for behind the one before, the first one from behind. None where there are no choices.
    """
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
