"""What all contenders share: the prepared workload, one PEFT model, marks of time. Without coterie.

A contender is a script, called as `SCRIPT FOLDER OUT [arguments]`: FOLDER is what `prepare.py` made, OUT the file for
the adapter and head that it ends with. It plays one round to warm up, then calls `mark("ready")`, plays all rounds
from the start, calls `mark("done")`, and saves. Whoever plays rounds elsewhere marks them from there.

What `prepared` understands for everybody: `--padded`, every batch is filled up to the longest length that is allowed;
`--threads N`, so many of PyTorch, in place of one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Weights = dict[str, Tensor]
PREFIX = "base_model.model."
HALVES = {"B": "lora_B.weight", "A": "lora_A.weight"}
IGNORED = -100
"""The label of a token that is not to be predicted."""


@dataclass(frozen=True)
class Work:
    """The workload. cohorts: (rounds, cohort) client numbers; batches: for each of these [(indices, padded length)]."""

    folder: Path
    settings: dict[str, Any]
    cohorts: list[list[int]]
    batches: list[list[list[tuple[list[int], int]]]]

    @classmethod
    def read(cls, folder: str) -> Work:
        """What `prepare.py` wrote."""
        return cls(Path(folder), **json.loads((Path(folder) / "work.json").read_text()))

    @cached_property
    def tables(self) -> Weights:
        """Of all examples, int64: ids, mask (n, L), and labels (n,); of a language model's in their place prompts (n,).

        L is the longest length that is allowed; prompts: how many of the first tokens are not to be predicted.
        """
        return load_file(self.folder / "data.safetensors")

    @property
    def language(self) -> bool:
        """Whether a language model is trained, and no classifier."""
        return "prompts" in self.tables

    def padded(self) -> Work:
        """The same with every batch filled up to L tokens."""
        longest = self.tables["ids"].shape[1]
        filled = [[[(indices, longest) for indices, _ in own] for own in batches] for batches in self.batches]
        return replace(self, batches=filled)

    @cached_property
    def start(self) -> Weights:
        """The adapter (layer.B, layer.A) and head that all begin with."""
        return load_file(self.folder / "start.safetensors")

    def batch(self, indices: Sequence[int], length: int) -> dict[str, Tensor]:
        """The examples as a model takes them, padded to `length` tokens."""
        rows = torch.tensor(indices)
        tables = self.tables
        ids, mask = tables["ids"][rows, :length], tables["mask"][rows, :length]
        if self.language:
            answers = mask.bool() & (torch.arange(length) >= tables["prompts"][rows][:, None])
            labels = torch.where(answers, ids, IGNORED)
        else:
            labels = tables["labels"][rows]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def network(self, **options: Any) -> Any:
        """The frozen network as transformers loads it, in fp32."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        kind = AutoModelForCausalLM if self.language else AutoModelForSequenceClassification
        return kind.from_pretrained(self.folder / "model", dtype=torch.float32, **options)

    def peft_model(self) -> Any:
        """A fresh model under PEFT, with the start loaded; in eval mode, as nobody uses dropout here."""
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        network = self.network(attn_implementation="eager")
        lora = self.settings["lora"]
        config = LoraConfig(
            task_type="CAUSAL_LM" if self.language else "SEQ_CLS",
            r=lora["rank"],
            lora_alpha=lora["rank"] * lora["scale"],
            target_modules=lora["targets"],
            lora_dropout=0.0,
        )
        model = get_peft_model(network, config).eval()
        set_peft_model_state_dict(model, peft_names(self.start))
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """A fresh one over what is trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        chosen = self.settings["optimizer"]
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[chosen["name"]]
        return kind(trained, lr=chosen["lr"], weight_decay=0.0)

    def train(self, model: Any, number: int, place: int) -> None:
        """One client's local steps on a model that holds what it downloaded."""
        optimizer = self.optimizer(model)
        for indices, length in self.batches[number][place]:
            optimizer.zero_grad()
            model(**self.batch(indices, length)).loss.backward()
            optimizer.step()


def prepared() -> tuple[Work, Path, list[str]]:
    """The workload, where to save, and further arguments; one thread unless more are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    asked, rest = parser.parse_known_args()
    torch.set_num_threads(asked.threads)
    work = Work.read(asked.folder)
    return work.padded() if asked.padded else work, asked.out, rest


def mark(name: str) -> None:
    """Tells the harness, which reads the clock."""
    print(f"mark: {name}", flush=True)


def finish(out: Path, weights: Weights, **versions: str) -> None:
    """Saves what the run ended with and tells versions."""
    save_file({name: value.detach().float().contiguous().clone() for name, value in weights.items()}, out)
    print("versions: " + json.dumps({"torch": torch.__version__} | versions), flush=True)


def peft_names(weights: Weights) -> Weights:
    """The same under the names of a PEFT state dict."""
    named = {}
    for name, value in weights.items():
        layer, _, half = name.rpartition(".")
        named[PREFIX + (f"{layer}.{HALVES[half]}" if half in HALVES else name)] = value.clone()
    return named


def own_names(state: Weights) -> Weights:
    """A PEFT state dict under our names."""
    named = {}
    for name, value in state.items():
        short = name.removeprefix(PREFIX)
        for half, ending in HALVES.items():
            short = short.replace(f".{ending}", f".{half}")
        named[short] = value
    return named


def mean(collected: Sequence[Weights]) -> Weights:
    """The plain mean, since all clients have equally many examples."""
    return {name: torch.stack([one[name] for one in collected]).mean(dim=0) for name in collected[0]}
