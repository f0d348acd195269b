"""What a trained language model generates for the test prompts of a task, and how much of it is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.data.tasks import Instructions
from coterie.data.tasks.base import Judged
from coterie.data.tasks.registry import load_pool
from coterie.errors import ConfigError
from coterie.experiments import folders
from coterie.experiments.bases import model_place
from coterie.experiments.shares import chosen_task
from coterie.maths.keys import root_key
from coterie.serve.judging import JUDGES
from coterie.serve.loading import Found, find, open_found
from coterie.serve.predictor import BATCH, Predictor


@dataclass(frozen=True)
class Scored:
    """value: the mean of the examples' scores, each in [0, 1]; judged: by what; rows: prompt, answer, score."""

    task: str
    judged: Judged
    value: float
    rows: list[dict[str, Any]]


def score(
    folder: str | Path,
    *,
    task: str | None = None,
    client: str | None = None,
    base: str | Path | None = None,
    limit: int | None = None,
    max_new_tokens: int = 256,
    batch_size: int = BATCH,
    device: str = "cpu",
    dtype: str | None = None,
    run_code: bool = False,
    advance: Callable[[int], None] = lambda examples: None,
) -> Scored:
    """Generate an answer, greedily, to each of a task's test prompts, and judge it as the task says.

    Args:
        folder: a finished run, an adapter, a whole model, or an asset's name.
        task: by default that of the run; a benchmark that has test examples alone is taken whole.
        limit: so many of the prompts, the same ones whatever the seed.
        run_code: allow generated programs to be run, which a task such as humaneval asks for; see `sandbox`.
        advance: called with the number of examples done since the last call.

    Raises:
        ConfigError: programs to run without `run_code`, no task, or one of another kind.
        ModelError, DataError, RunError: as `coterie.load` and `Predictor.generate`.
    """
    found = _found(folder, client)
    name, judged, examples = _examples(folder, task)
    if judged == "code" and not run_code:
        raise ConfigError(
            f"task {name!r} is judged by running the programs that the model writes; allow it with --run-code, after "
            "reading in docs/generation.md what the sandbox stops"
        )
    order = root_key(0).fold("pooled").permutation(len(examples))
    chosen = examples.select(order[: len(examples) if limit is None else limit])
    return scored(name, judged, chosen, open_found(found, base, device, dtype), max_new_tokens, batch_size, advance)


def scored(
    task: str,
    judged: Judged,
    examples: Instructions,
    predictor: Predictor,
    max_new_tokens: int,
    batch_size: int = BATCH,
    advance: Callable[[int], None] = lambda examples: None,
) -> Scored:
    """As `score`, of given examples by a given model.

    Raises:
        ModelError: a classifier, or a base that cannot see the images which the prompts are about.
    """
    references = examples.references or tuple((answer,) for answer in examples.answers)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(examples), batch_size):
        part = range(start, min(start + batch_size, len(examples)))
        prompts = [examples.prompts[i] for i in part]
        pictures = None if examples.pictures is None else [examples.pictures[i] for i in part]
        answers = predictor.generate(prompts, max_new_tokens, pictures=pictures, batch_size=batch_size)
        for place, prompt, said in zip(part, prompts, answers, strict=True):
            right = JUDGES[judged](said, references[place])
            rows.append({"prompt": prompt, "generated": said, "reference": references[place][0], "score": right})
        advance(len(part))
    return Scored(task, judged, sum(row["score"] for row in rows) / max(1, len(rows)), rows)


def _found(folder: str | Path, client: str | None) -> Found:
    """What there is in the folder; an asset's name stands for its own."""
    place = Path(folder).expanduser()
    return find(place if place.is_dir() else model_place(str(folder)), client)


def _examples(folder: str | Path, task: str | None) -> tuple[str, Judged, Instructions]:
    """The name of the task, how its answers are judged, and its test examples."""
    if task is not None:
        pool = load_pool(task)
        name, judged, examples = task, pool.judged, pool.train if pool.test is None else pool.test
    else:
        place = Path(folder).expanduser()
        if not (place / folders.CONFIG).is_file():
            raise ConfigError(f"{folder} is no run, so it names no task; give one with --task, such as --task gsm8k")
        config, _ = folders.read_config(place)
        made = chosen_task(config)
        name, judged, examples = made.name, made.judged, made.test
    if not isinstance(examples, Instructions):
        raise ConfigError(
            f"task {name!r} ({examples.kind}) is not answered freely, and its run has measured it already; score is "
            "for prompts with answers, such as gsm8k"
        )
    return name, judged, examples
