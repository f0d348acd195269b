"""Makes a workload's folder: the model by its seed, everybody's data, cohorts and mini-batches, the common start.

Called as `prepare.py FOLDER` with the workload as JSON on standard input. Which clients take part and which examples
each step sees are drawn as coterie draws them, and written down for all.

model: {layers, width, heads, vocabulary, seed} for a random encoder, or {asset} for one of `coterie assets`.
data: {length, seed} for random tokens with random labels, or {task} for the training texts of a task, cut to
`length` tokens; of questions with options a language model learns the right ones. clients, examples: how many, and how
many each has. cohort, rounds, steps, batch, lora {rank, scale, targets}, optimizer {name, lr}, seed, cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import Weights, Work
from ours import engine, texts, weights_of
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from coterie.assets import fetch
from coterie.data.sequences import SequenceSet, tokenise_choices
from coterie.data.tasks import Questions, load_task
from coterie.data.tasks.language import spaced
from coterie.data.text import TextSet, tokenise
from coterie.maths.keys import root_key
from coterie.training.evaluation import training_batches


def main() -> None:
    """Writes model/, data.safetensors, start.safetensors and work.json."""
    folder, settings = Path(sys.argv[1]), json.load(sys.stdin)
    tables = data(settings)
    settings["classes"] = int(tables["labels"].max()) + 1 if "labels" in tables else None
    save_file(tables, folder / "data.safetensors")
    if settings["classes"] is None:
        (folder / "model").symlink_to(fetch(settings["model"]["asset"]), target_is_directory=True)
    else:
        model(settings).save_pretrained(folder / "model")
    bare = Work(folder, settings, [], [])
    made = engine(bare)
    start = made.begin()
    save_file(weights_of(start), folder / "start.safetensors")
    names, text = sorted(made.cards), texts(bare)
    cohorts, batches = [], []
    for number, phase in enumerate(made.schedule, start=1):
        cohort = made._cohort(number, phase)
        cohorts.append([names.index(name) for name in cohort])
        batches.append([of_client(made, text, number, name) for name in cohort])
    content = {"settings": settings, "cohorts": cohorts, "batches": batches}
    (folder / "work.json").write_text(json.dumps(content))


def of_client(made: Any, text: Any, number: int, name: str) -> list[tuple[list[int], int]]:
    """The mini-batches of a client's Fit in a round, as places in the table of all examples."""
    own = made.setting.sites[name].data["train"]
    key = made.root.fold("request", number, name).fold("Fit", 0)
    planned = training_batches(own, made.executor.settings, key)
    return [(own.rows[torch.as_tensor(batch.indices)].tolist(), int(batch.pad_to)) for batch in planned]


def model(settings: dict[str, Any]) -> torch.nn.Module:
    """The frozen network, with some head that the start replaces."""
    asked = settings["model"]
    torch.manual_seed(asked.get("seed", 0))
    if "asset" in asked:
        place = fetch(asked["asset"])
        found: torch.nn.Module = AutoModelForSequenceClassification.from_pretrained(
            place, num_labels=settings["classes"], dtype=torch.float32
        )
        return found
    config = BertConfig(
        vocab_size=asked["vocabulary"],
        hidden_size=asked["width"],
        num_hidden_layers=asked["layers"],
        num_attention_heads=asked["heads"],
        intermediate_size=4 * asked["width"],
        max_position_embeddings=512,
        num_labels=settings["classes"],
    )
    return BertForSequenceClassification(config)


def data(settings: dict[str, Any]) -> Weights:
    """ids, mask (n, L) and labels or prompts (n,), client after client."""
    asked, count = settings["data"], settings["clients"] * settings["examples"]
    length, key = asked["length"], root_key(asked.get("seed", 0)).fold("data")
    if "task" not in asked:
        vocabulary = settings["model"]["vocabulary"]
        drawn = torch.from_numpy((key.fold("ids").bits(count * length) % (vocabulary - 5)).astype("int64")) + 5
        labels = torch.from_numpy((key.fold("labels").bits(count) % 2).astype("int64"))
        return {"ids": drawn.view(count, length), "mask": torch.ones(count, length).long(), "labels": labels}
    from transformers import AutoTokenizer

    task = load_task(asked["task"], seed_key=key.fold("task"))
    tokenizer = AutoTokenizer.from_pretrained(fetch(settings["model"]["asset"]))
    if isinstance(task.train, Questions):
        whole: TextSet | SequenceSet = answers(task.train, tokenizer, length)
    else:
        train = task.train
        whole = tokenise(train.texts, train.pairs, train.labels, tokenizer, length, cached=False)
    if len(whole) < count:
        raise SystemExit(f"{asked['task']} has {len(whole)} training examples, and {count} are asked for")
    chosen = key.choice(len(whole), count)
    batch = whole.batch(chosen, length)
    tables = {"ids": batch["input_ids"], "mask": batch["attention_mask"]}
    if isinstance(whole, SequenceSet):
        return tables | {"prompts": whole.prompts[whole.rows[torch.as_tensor(chosen)]]}
    return tables | {"labels": batch["labels"]}


def answers(questions: Questions, tokenizer: Any, length: int) -> SequenceSet:
    """Every question with its right option."""
    pairs = zip(questions.prompts, questions.choices, strict=True)
    options = [[spaced(prompt, option) for option in listed] for prompt, listed in pairs]
    return tokenise_choices(questions.prompts, options, questions.labels, tokenizer, length).answers()


if __name__ == "__main__":
    main()
