"""Questions about images, for language models that see: ScienceQA and VizWiz, in their published layouts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.data.files import read_text
from coterie.data.tasks.base import Pool, benchmark_folder
from coterie.data.tasks.choices import Asked, gathered, pool_of, question_of, source
from coterie.data.tasks.instructions import instructed
from coterie.data.tasks.language import ChoiceScore, Instructions
from coterie.errors import DataError

_ASKED = "{question}\nAnswer:"
_SHORT = "{prompt}\nAnswer the question using a single word or phrase:"


def scienceqa(path: str | None = None, score: ChoiceScore = "sum") -> Pool:
    """School questions about an image, with choices: ScienceQA (Lu et al. 2022, arXiv 2209.09513).

    Its problems.json, beside folders train, val and test (or images/train, …) that hold <number>/image.png. Questions
    without an image are left out; the group is the subject. On the hub it is hub-choices:derek-thomas/ScienceQA with
    the column image.

    Raises:
        DataError: files that are missing or of another form.
    """
    folder = benchmark_folder("scienceqa", path, "scienceqa", "ScienceQA")
    place = folder / "problems.json"
    problems = _json(place, dict)
    columns = {"question": "question", "choices": "choices", "answer": "answer", "context": "hint", "group": "subject"}
    asked: dict[str, list[Asked]] = {"train": [], "val": [], "test": []}
    files: dict[str, list[bytes]] = {split: [] for split in asked}
    left = 0
    for number, problem in problems.items():
        where = f"{place}, problem {number}"
        if not isinstance(problem, dict) or problem.get("split") not in asked:
            raise DataError(f"{where}: question, choices, answer and split (train, val or test) are needed")
        if not problem.get("image"):
            left += 1
            continue
        split = problem["split"]
        hint = str(problem.get("hint") or "").strip()
        form = "{context}\n" + _ASKED if hint else _ASKED
        held = {**problem, "hint": hint, "subject": str(problem.get("subject", "all"))}
        asked[split].append(question_of(where, held, columns, form))
        files[split].append(_image(folder, (split, f"images/{split}"), f"{number}/{problem['image']}"))
    notes = (f"{left} questions without an image were left out",) if left else ()
    made = {split: replace(gathered(own, score), pictures=files[split]) for split, own in asked.items() if own}
    train, test = _used(made, folder)
    return pool_of(train, test, source("ScienceQA (Lu et al. 2022)", folder, path), notes)


def vizwiz(path: str | None = None) -> Pool:
    """Questions that blind people asked about their photographs, with ten answers each: VizWiz (Gurari et al. 2018).

    Its folder: train.json and val.json (or Annotations/…), images in train and val. What is learnt is the commonest
    answer; a generated answer is judged by how many of the ten say the same. The official test set has no answers, so
    val is the test set. On the hub: hub-instructions with the columns image, question and answers.

    Raises:
        DataError: files that are missing or of another form.
    """
    folder = benchmark_folder("vizwiz", path, "vizwiz", "VizWiz")
    made: dict[str, Instructions] = {}
    names: tuple[str, ...] = ()
    for split in ("train", "val"):
        place = next(
            (folder / f for f in (f"{split}.json", f"Annotations/{split}.json") if (folder / f).is_file()), None
        )
        if place is None:
            continue
        records = _json(place, list)
        for number, record in enumerate(records):
            if not isinstance(record, dict) or not {"image", "question", "answers"} <= set(record):
                raise DataError(f"{place}, question {number}: image, question and answers are needed")
        answers = [_texts(record["answers"], f"{place}, question {i}") for i, record in enumerate(records)]
        prompts = [str(record["question"]).strip() for record in records]
        made[split], names = instructed(str(place), prompts, commonest(answers), None, _SHORT, None)
        pictures = [_image(folder, (split, f"images/{split}"), record["image"]) for record in records]
        made[split] = replace(made[split], references=tuple(answers), pictures=pictures)
    train, test = _used(made, folder)
    return Pool(train, test, names, source("VizWiz (Gurari et al. 2018)", folder, path), judged="agreement")


def commonest(answers: Iterable[Sequence[str]]) -> list[str]:
    """Of each list the answer that most people give, of equally common ones the first."""
    return [Counter(own).most_common(1)[0][0] for own in answers]


def _texts(answers: Any, where: str) -> tuple[str, ...]:
    """The answers, which are texts, or records with one."""
    listed = [one.get("answer") if isinstance(one, Mapping) else one for one in answers or ()]
    texts = tuple(one.strip() for one in listed if isinstance(one, str) and one.strip())
    if not texts or len(texts) < len(listed):
        raise DataError(f"{where}: answers must be a list of texts")
    return texts


def _used(made: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """Training and test set: what is there of train and of test, else val."""
    test = next((made[split] for split in ("test", "val") if split in made), None)
    if "train" not in made:
        raise DataError(f"{folder}: there are no training questions about images")
    return made["train"], test


def _image(folder: Path, places: Sequence[str], name: str) -> bytes:
    for place in places:
        if (folder / place / name).is_file():
            return (folder / place / name).read_bytes()
    raise DataError(f"{folder}: there is no image {places[0]}/{name}")


def _json(place: Path, kind: type) -> Any:
    try:
        content = json.loads(read_text(place))
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error})") from error
    if not isinstance(content, kind):
        raise DataError(f"{place}: a {'list' if kind is list else 'mapping'} is expected")
    return content
