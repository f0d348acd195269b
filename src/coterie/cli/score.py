"""`coterie score`: what a language model generates for a task's test prompts, and how much of it is right."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def score(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="A finished run, an adapter, a whole model, an asset's name, or a CONFIG to play first.",
        ),
    ],
    task: Annotated[str | None, typer.Option(help="By default the run's; such as gsm8k or humaneval.")] = None,
    client: Annotated[str | None, typer.Option(help="The model of this client of the run.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many prompts, always the same ones.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 32,
    base: Annotated[
        str | None, typer.Option(help="The base model, where the adapter's own is not on this machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="As torch names it, such as cuda.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Of the frozen weights: float32 or bfloat16.")] = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run generated programs, locked down; read docs/generation.md first.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A new .jsonl file for prompts, answers and scores.")
    ] = None,
) -> None:
    """Let a language model answer a task's test prompts, and say how much of it is right.

    GSM8K is judged by the final number, HumanEval by running the generated programs (only with --run-code), questions
    about images by people's answers, any other task by the same words.

    In place of FOLDER, a configuration (.yaml) is played first, in its usual folder; a run that is there is taken.
    """
    from coterie.errors import ConfigError
    from coterie.serve.judging import TITLES
    from coterie.serve.scoring import score as measure

    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already; name a new file")
    if Path(folder).suffix in (".yaml", ".yml"):
        folder = str(_played(Path(folder)))
    started, done = time.monotonic(), 0

    def advance(examples: int) -> None:
        nonlocal done
        done += examples
        print(f"answered {done} prompts in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    found = measure(
        folder,
        task=task,
        client=client,
        base=base,
        limit=limit,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        run_code=run_code,
        advance=advance,
    )
    if out is not None:
        out.write_text("".join(json.dumps(row) + "\n" for row in found.rows), encoding="utf-8")
    print(f"{found.task}: {TITLES[found.judged]} {100 * found.value:.1f} % of {len(found.rows)} prompts")


def _played(config: Path) -> Path:
    """The folder of the configuration's run, played to its end where it is not yet."""
    from coterie.cli.endings import resumable
    from coterie.cli.progress import watcher
    from coterie.experiments.config import load
    from coterie.experiments.runs import default_folder, resume, run

    chosen = load(config)
    place = default_folder(chosen)
    with resumable(place):
        if place.exists():
            resume(place, watcher())
        else:
            run(chosen, place, watcher())
    return place
