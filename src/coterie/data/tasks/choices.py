"""Multiple choice scored by likelihood: own files, medical and commonsense benchmarks, classes as choices.

A prompt is made by a template; the choices that may follow it are texts, of which the model should find the right one
the likeliest. The choices are not listed in the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from coterie.data.files import read_everything, read_text
from coterie.data.tasks.base import Examples, Pool, benchmark_folder, train_and_test
from coterie.data.tasks.columns import holder, inside, joined
from coterie.data.tasks.language import ChoiceScore, Questions, check_template, filled
from coterie.data.tasks.own import check_fraction
from coterie.errors import ConfigError, DataError, nearest

ASKED = "{question}\nAnswer:"
"""The template of questions, unless the task has another."""

CONTEXT = "{context}\n{question}\nAnswer:"
"""The same for questions about a text."""

_UNKNOWN = (None, "", -1, "-1")
"""What public files hold in place of an answer that they keep back."""


def choices_file(
    path: str,
    test_path: str | None = None,
    question: str = "question",
    choices: str | list[str] = "choices",
    answer: str = "answer",
    context: str | None = None,
    group: str | None = None,
    template: str | None = None,
    score: ChoiceScore = "sum",
    answers_from: int | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """A user's own questions in JSON lines, or in CSV or TSV where each choice has a column of its own.

    question, choices, answer, context, group: keys or columns, and answers_from, see `question_of`. template:
    `{question}` and `{context}` stand for their texts. group: what a question naturally belongs to, for the partitioner
    `natural`.

    Raises:
        ConfigError: a template without the question, or another score.
        DataError: a missing file or column, or a record that is no question.
    """
    columns = {"question": question, "choices": choices, "answer": answer, "context": context, "group": group}
    train_path = Path(path).expanduser()
    train = _questions(train_path, columns, template, score, answers_from)
    if test_path is None:
        check_fraction(test_fraction, "or give a test_path")
        return pool_of(train, None, f"the file {train_path.name}", test_fraction=test_fraction)
    apart = Path(test_path).expanduser()
    test = _questions(apart, columns, template, score, answers_from)
    return pool_of(train, test, f"the files {train_path.name} and {apart.name}")


def copa(path: str | None = None, score: ChoiceScore = "sum") -> Pool:
    """Which of two sentences is the cause or the effect of a third: COPA (Roemmele et al. 2011), of SuperGLUE.

    The choice follows the premise and "because" or "so", as by Brown et al. 2020 (arXiv 2005.14165). The benchmark's
    own test labels are hidden, so its dev set is the test set.
    """
    folder = benchmark_folder("copa", path, "copa", "COPA", "superglue_copa")
    links = {"cause": "because", "effect": "so"}

    def read(place: Path) -> Questions:
        asked = []
        for number, record in enumerate(_records(place, ("premise", "question", "choice1", "choice2", "label"))):
            premise, kind = str(record["premise"]).strip(), record["question"]
            if kind not in links:
                raise DataError(f"{place}, question {number}: {kind!r} is neither cause nor effect")
            options = [_lowered(str(record[name]).strip()) for name in ("choice1", "choice2")]
            right = _place(f"{place}, question {number}", record["label"], options, ())
            asked.append((f"{premise.rstrip('.')} {links[kind]}", tuple(options), right, None))
        return gathered(asked, score)

    train, test, notes = train_and_test(folder, read, ("train.jsonl",), ("val.jsonl", "dev.jsonl"))
    return pool_of(train, test, source("COPA (Roemmele et al. 2011), of SuperGLUE", folder, path), notes)


def hellaswag(path: str | None = None, score: ChoiceScore = "sum") -> Pool:
    """Which of four endings a description goes on with: HellaSwag (Zellers et al. 2019, arXiv 1905.07830).

    The prompt is the activity and the beginning, without the marks that WikiHow's articles have in brackets. Read are
    the published files (hellaswag_train.jsonl, hellaswag_val.jsonl), or such rows as train.jsonl and
    validation.jsonl. The benchmark's own test labels are hidden, so its validation set is the test set.
    """
    folder = benchmark_folder("hellaswag", path, "hellaswag", "HellaSwag")

    def read(place: Path) -> Questions:
        asked = []
        for number, record in enumerate(_records(place, ("activity_label", "ctx", "endings", "label"))):
            where = f"{place}, question {number}"
            _, listed = _listed(where, record, "endings")
            endings = tuple(_unmarked(ending) for ending in listed)
            prompt = f"{str(record['activity_label']).strip()}: {_unmarked(str(record['ctx']))}"
            asked.append((prompt, endings, _place(where, record["label"], endings, ()), None))
        return gathered(asked, score)

    _check_score(score)
    train, test, notes = train_and_test(
        folder, read, ("hellaswag_train.jsonl", "train.jsonl"), ("hellaswag_val.jsonl", "validation.jsonl", "val.jsonl")
    )
    return pool_of(train, test, source("HellaSwag (Zellers et al. 2019)", folder, path), notes)


def medmcqa(path: str | None = None, score: ChoiceScore = "sum") -> Pool:
    """Questions of medical entrance exams with four choices: MedMCQA (Pal et al. 2022, arXiv 2203.14371)."""
    folder = benchmark_folder("medmcqa", path, "medmcqa")
    columns = {"question": "question", "choices": "options", "answer": "answer_idx"}

    def read(place: Path) -> Questions:
        return _questions(place, columns, None, score)

    train, test, notes = train_and_test(folder, read, ("train.jsonl",), ("test.jsonl",))
    return pool_of(train, test, source("MedMCQA (Pal et al. 2022)", folder, path), notes)


def pubmedqa(path: str | None = None, score: ChoiceScore = "sum") -> Pool:
    """Yes, no or maybe to the question of a medical abstract: PubMedQA (Jin et al. 2019, arXiv 1909.06146).

    Its labelled questions, of which those of test_ground_truth.json are the test set.
    """
    folder = benchmark_folder("pubmedqa", path, "pubmedqa")
    known, held_out = (_json_object(folder / name) for name in ("ori_pqal.json", "test_ground_truth.json"))
    names = ("yes", "no", "maybe")
    parts: dict[bool, list[Asked]] = {True: [], False: []}
    for number, record in known.items():
        where = f"{folder / 'ori_pqal.json'}, question {number}"
        wanted = ("QUESTION", "CONTEXTS", "final_decision")
        if not isinstance(record, dict) or any(name not in record for name in wanted):
            raise DataError(f"{where}: {', '.join(wanted)} are needed")
        texts = {"question": str(record["QUESTION"]).strip(), "context": " ".join(map(str, record["CONTEXTS"]))}
        right = _place(where, record["final_decision"], names, names)
        parts[number in held_out].append((filled(CONTEXT, texts), names, right, None))
    if not parts[True] or not parts[False]:
        raise DataError(f"{folder}: the questions are all test or all training; give both files as published")
    train, test = gathered(parts[False], score), gathered(parts[True], score)
    return pool_of(train, test, source("PubMedQA (Jin et al. 2019)", folder, path), names=names)


def answered(pool: Pool, template: str | None, score: ChoiceScore) -> Pool:
    """A classification task as multiple choice between the names of its classes.

    template: `{text}`, and `{pair}` where the task is on pairs, stand for the texts; by default they stand in lines
    of their own before "Answer:".

    Raises:
        ConfigError: a task of another kind, a template without the text, or another score.
    """
    _check_score(score)
    if not isinstance(pool.train, Examples):
        raise ConfigError(f"choices:… makes choices of classes, and this task is one of {pool.train.kind} already")
    paired = pool.train.pairs is not None
    form = template if template is not None else "{text}\n{pair}\nAnswer:" if paired else "{text}\nAnswer:"
    check_template(form, ("text", "pair") if paired else ("text",))

    def ask(examples: Any) -> Questions:
        prompts = tuple(filled(form, {"text": text, "pair": pair}) for text, pair in examples.contents())
        return Questions(prompts, (pool.label_names,) * len(prompts), examples.labels, examples.groups, score)

    return Pool(
        ask(pool.train),
        None if pool.test is None else ask(pool.test),
        pool.label_names,
        pool.source,
        pool.notes,
        pool.test_fraction,
        pool.metrics,
        {name: ask(examples) for name, examples in pool.more_tests.items()},
    )


Asked = tuple[str, tuple[str, ...], int, str | None]
"""Prompt, choices, the right one's place, group."""


def question_of(
    where: str,
    record: Mapping[str, Any],
    columns: Mapping[str, Any],
    template: str | None,
    answers_from: int | None = None,
) -> Asked:
    """One record as a question; `where` says in a message which it is.

    columns: names of the record's parts, by role; `a.b` is what a has under b. The choices are a list of texts, a
    mapping from names to texts, `text` and `label` (names) as a mapping of two lists or in a mapping for each choice,
    or several columns. The answer is a choice's name, its text, its letter from A, or its number. answers_from: the
    number of the first choice; where it is given, a number is never taken for a choice's text. None: 0. A context of
    several texts is put together.

    Raises:
        DataError: fewer than two choices, something that is no text, or an answer that is none of the choices.
    """
    values = {role: inside(record, name) for role, name in columns.items() if isinstance(name, str)}
    if "context" in values:
        values["context"] = joined(values["context"])
    for role in ("question", "context"):
        text = values.get(role, "")
        if not isinstance(text, str) or (role == "question" and not text.strip()):
            raise DataError(f"{where}: no text in {columns[role]!r}")
    names, texts = _listed(where, record, columns["choices"])
    right = _place(where, values.get("answer"), texts, names, answers_from)
    form = template if template is not None else CONTEXT if columns.get("context") else ASKED
    prompt = filled(form, {role: str(values.get(role, "")).strip() for role in ("question", "context")})
    return prompt, texts, right, str(values["group"]).strip() if columns.get("group") else None


def gathered(asked: Sequence[Asked], score: ChoiceScore = "sum") -> Questions:
    """Questions one after another; all or none of them have a group."""
    groups = tuple(group for *_, group in asked if group is not None)
    return Questions(
        tuple(prompt for prompt, *_ in asked),
        tuple(options for _, options, *_ in asked),
        np.array([right for _, _, right, _ in asked], dtype=np.int64),
        groups or None,
        score,
    )


def pool_of(
    train: Questions,
    test: Questions | None,
    origin: str,
    notes: tuple[str, ...] = (),
    *,
    names: Sequence[str] | None = None,
    test_fraction: float = 0.2,
) -> Pool:
    """Questions as a pool; labels are named by the choices' common texts, or else by their places from 1."""
    most = max(len(options) for part in (train, test) if part is not None for options in part.choices)
    places = tuple(f"answer {place + 1}" for place in range(most))
    return Pool(train, test, tuple(names or places), origin, notes, test_fraction)


def source(origin: str, folder: Path, path: str | None) -> str:
    """Where a benchmark's questions come from."""
    return f"{origin}, from {'COTERIE_DATA' if path is None else f'the folder {folder.name}'}"


def check_questions(columns: Mapping[str, Any], template: str | None, score: str) -> None:
    """Refuse a template that leaves out the question, or the context that is given, and an unknown score."""
    _check_score(score)
    if template is not None:
        check_template(template, ("question", "context"))
        if columns.get("context"):
            check_template(template, ("context", "question"))


def is_known(answer: Any) -> bool:
    """Whether an answer is given; public test sets often keep it back."""
    return answer not in _UNKNOWN


def _questions(
    place: Path,
    columns: Mapping[str, Any],
    template: str | None,
    score: ChoiceScore,
    answers_from: int | None = None,
) -> Questions:
    check_questions(columns, template, score)
    wanted = [
        name
        for role in ("question", "choices", "answer", "context", "group")
        for name in ([columns[role]] if isinstance(columns.get(role), str) else columns.get(role) or [])
    ]
    records = _records(place, wanted)
    asked = [
        question_of(f"{place}, question {i}", record, columns, template, answers_from)
        for i, record in enumerate(records)
    ]
    if not asked:
        raise DataError(f"{place}: no questions")
    return gathered(asked, score)


def _records(place: Path, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """The records of a file that has all wanted columns."""
    columns, records = read_everything(place)
    for name in wanted:
        if holder(name, columns) is None:
            raise DataError(f"{place}: no column {name!r}{nearest(name, columns)}")
    return records


def _listed(where: str, record: Mapping[str, Any], column: str | list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names (none where they have none) and texts of the choices."""
    names: Sequence[Any] = ()
    texts: Any
    if isinstance(column, str):
        texts = inside(record, column)
        if (
            isinstance(texts, list)
            and texts
            and all(isinstance(t, Mapping) and {"text", "label"} <= set(t) for t in texts)
        ):
            names, texts = [one["label"] for one in texts], [one["text"] for one in texts]
        elif isinstance(texts, Mapping) and set(texts) == {"text", "label"}:
            names, texts = texts["label"], texts["text"]
        elif isinstance(texts, Mapping):
            names, texts = list(texts), list(texts.values())
    else:
        names, texts = column, [inside(record, name) for name in column]
    sound = isinstance(texts, list | tuple) and all(isinstance(text, str) and text.strip() for text in texts)
    if not sound or len(texts) < 2 or len(names) not in (0, len(texts)):
        raise DataError(f"{where}: the choices must be two texts or more, not {json.dumps(texts, default=str)[:40]}")
    return tuple(str(name) for name in names), tuple(text.strip() for text in texts)


def _place(where: str, answer: Any, texts: Sequence[str], names: Sequence[str], answers_from: int | None = None) -> int:
    """The place of the right choice: by its name, its text, its letter, or its number (see `question_of`)."""
    given = answer.strip() if isinstance(answer, str) else answer
    first = answers_from or 0
    found = -1
    if isinstance(given, int) and not isinstance(given, bool):
        found = given - first
    elif isinstance(given, str) and given:
        letters = [chr(ord("A") + place) for place in range(len(texts))]
        numbers = [str(place + first) for place in range(len(texts))]
        kinds = [list(names), list(texts), letters, numbers]
        if answers_from is not None:
            kinds.insert(1, numbers)
        found = next((kind.index(given) for kind in kinds if given in kind), -1)
    if not 0 <= found < len(texts):
        known = ", ".join(names or texts)
        way_out = (
            "; if they count from 1, set task.answers_from=1" if str(given) == str(len(texts)) and not first else ""
        )
        raise DataError(
            f"{where}: the answer {given!r} is none of the {len(texts)} choices ({known[:60]}), from {first}{way_out}"
        )
    return found


def _check_score(score: str) -> None:
    if score not in get_args(ChoiceScore):
        raise ConfigError(f"task.score is {score!r}; it must be one of {', '.join(get_args(ChoiceScore))}")


def _json_object(place: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(place))
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{place}: a JSON object is expected")
    return content


def _unmarked(text: str) -> str:
    """A text without WikiHow's [header], [title], [step] and [substeps], a title ending in a full stop."""
    return " ".join(re.sub(r"\[[^\[\]]*\]", " ", text.replace(" [title]", ". ")).split())


def _lowered(text: str) -> str:
    """A sentence as the end of another: its first letter small, but for the word I."""
    return text if text[:2] in ("I ", "I'") else text[:1].lower() + text[1:]
