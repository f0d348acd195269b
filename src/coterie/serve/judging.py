"""How a generated answer is judged: by the same words, the same number, people's agreement, or by running it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from coterie.data.tasks.base import Judged
from coterie.serve.sandbox import run_program

_NUMBER = re.compile(r"-?\$?-?\d[\d,]*(?:\.\d+)?")
_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\n@", "\nassert ", "\nfrom ", "\nimport ")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MARKS = re.compile(r"[^\w\s]")


def exact(said: str, references: Sequence[str]) -> float:
    """1 where the answer is one of the references, but for white space at the ends and letters' case."""
    return float(said.strip().casefold() in {reference.strip().casefold() for reference in references})


def number(said: str, references: Sequence[str]) -> float:
    """1 where the final number is that of the reference: GSM8K's exact match (Cobbe et al. 2021, arXiv 2110.14168).

    The final number is the first one after the last `####`, as its worked answers end, else after the last "answer
    is", else the last of all; `$` and thousands' commas are no part of it.
    """
    found, wanted = final_number(said), final_number(references[0])
    return float(found is not None and found == wanted)


def final_number(text: str) -> float | None:
    """The number that a worked answer ends with; None without any."""
    for mark in ("####", "answer is"):
        if mark in text:
            after = _NUMBER.search(text.rpartition(mark)[2])
            return None if after is None else _value(after[0])
    every = _NUMBER.findall(text)
    return _value(every[-1]) if every else None


def agreement(said: str, references: Sequence[str]) -> float:
    """min(1, people who gave this answer / 3): the accuracy of visual questions (Antol et al. 2015, arXiv 1505.00468).

    Without case, marks and articles. What the first line says counts.
    """
    first = (said.strip().splitlines() or [""])[0]
    same = sum(_plain(first) == _plain(reference) for reference in references)
    return min(1.0, same / 3)


def completion(said: str) -> str:
    """A generated function body, up to where something else begins at the left margin (Chen et al. 2021)."""
    return said[: min((place for stop in _STOPS if (place := said.find(stop)) >= 0), default=len(said))]


def code(said: str, references: Sequence[str], seconds: float = 5.0) -> float:
    """1 where prompt and completion pass the problem's own test, in the sandbox: pass@1 of HumanEval, one sample.

    references: the prompt, the test (which defines `check`), and the name of the function that is to be checked.
    """
    prompt, test, name = references
    program = f"{prompt}{completion(said)}\n\n{test}\n\ncheck({name})\n"
    return float(run_program(program, seconds).passed)


JUDGES: Mapping[Judged, Callable[[str, Sequence[str]], float]] = {
    "exact": exact,
    "number": number,
    "agreement": agreement,
    "code": code,
}

TITLES: Mapping[Judged, str] = {
    "exact": "the same answer",
    "number": "the same final number",
    "agreement": "agreement with people",
    "code": "pass@1",
}


def _value(digits: str) -> float:
    return float(digits.replace("$", "").replace(",", ""))


def _plain(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", _MARKS.sub("", text.casefold())).split())
