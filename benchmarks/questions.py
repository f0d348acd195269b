"""What it saves to compute a question's prompt once for all its options: scoring, and a student's step.

    python benchmarks/questions.py --json questions.json          # needs COTERIE_DATA with arc-easy

SmolLM2-135M in bfloat16 on questions of ARC-Easy (at most 64 tokens an option): scoring them, and steps of a student
(LoRA of rank 16 on all projections, eight questions a step, dropout 0.05) that learns from a teacher's distributions.
Each is done with options beside each other in one row (`coterie.data.branches`) and with a sequence for every option.
CPU seconds of one thread, so that company on the machine does not count; the two ways take turns, and the median
counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from standin import machine, versions

from coterie.algorithms.factors import initial_adapter
from coterie.assets import fetch
from coterie.data.branches import branched
from coterie.data.sequences import ChoiceSet, tokenise_choices
from coterie.data.tasks import load_task
from coterie.data.tasks.language import Questions
from coterie.maths.keys import root_key
from coterie.models.loading import Base, load_language_base
from coterie.protocol import Fit, Model, Predict, WeakToStrong
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor

QUESTIONS, STEPS, LENGTH = 64, 3, 64
TRAIN = TrainSettings(optimizer="adamw", lr=5e-4, batch_size=8, steps=STEPS, dropout=0.05, accumulation=2)
KEY = root_key(5)
PLAN = Plan(dtype="bfloat16", attention="eager")


def asked(base: Base) -> ChoiceSet:
    """The first questions of the training set."""
    found = load_task("arc-easy", seed_key=KEY).train
    assert isinstance(found, Questions)
    chosen = slice(0, QUESTIONS)
    labels = found.labels[chosen]
    return tokenise_choices(found.prompts[chosen], found.choices[chosen], labels, base.tokenizer, LENGTH)


def answered(executor: Executor, ask: Ask) -> tuple[float, Any]:
    """CPU seconds of an answer, and the answer."""
    began = time.process_time()
    (done,) = executor.answer([ask])
    took = time.process_time() - began
    assert isinstance(done, Done), done
    return took, done.answer


def measured(repeats: int) -> dict[str, Any]:
    base = load_language_base(fetch("smollm2"), targets="all-linear")
    assert base.branches
    data, model = asked(base), Model(lora=initial_adapter(base.layers, 16, 2.0, KEY))
    ways = {"once": base, "apart": replace(base, branches=False)}
    executor = Executor(ways, TRAIN, PLAN)
    taken: dict[str, dict[str, list[float]]] = {way: {"score": [], "step": []} for way in ways}
    scores: dict[str, torch.Tensor] = {}
    for repeat in range(repeats + 1):
        for way in ways:
            seconds, said = answered(executor, Ask("server", Predict(model, "x"), way, None, data, KEY))
            scores[way] = said.logits
            student = Fit(model, head=False, loss=WeakToStrong(said.logits.double().softmax(dim=1).float(), 0.5))
            steps, _ = answered(executor, Ask("server", student, way, None, data, KEY))
            if repeat:  # the first is a warm-up
                taken[way]["score"].append(seconds / len(data))
                taken[way]["step"].append(steps / STEPS)
    median = {way: {what: statistics.median(all_) for what, all_ in own.items()} for way, own in taken.items()}
    exists = torch.isfinite(scores["apart"])
    return {
        "questions": len(data),
        "tokens": {"once": int(branched(data).lengths.sum()), "apart": int(data.sequences().lengths.sum())},
        "seconds": median,
        "score": median["apart"]["score"] / median["once"]["score"],
        "step": median["apart"]["step"] / median["once"]["step"],
        "farthest": float((scores["once"] - scores["apart"])[exists].abs().max()),
        "spread": float(scores["apart"][exists].std()),
        "all": taken,
    }


def main() -> None:
    """Runs it, prints the figures and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    row = measured(options.repeats)
    once, apart, tokens = row["seconds"]["once"], row["seconds"]["apart"], row["tokens"]
    told = [
        f"{row['questions']} questions: {tokens['apart']} tokens, {tokens['once']} with every prompt once",
        f"scoring one: {apart['score'] * 1e3:.0f} ms, {once['score'] * 1e3:.0f} ms ({row['score']:.2f}x)",
        f"a student's step of eight: {apart['step']:.2f} s, {once['step']:.2f} s ({row['step']:.2f}x)",
        f"scores differ by {row['farthest']:.2g} at most, in bfloat16, of a spread of {row['spread']:.3g}",
    ]
    print("\n".join(told))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "versions": versions(), **row}, indent=2))


if __name__ == "__main__":
    main()
