"""A transformers Trainer for each client and round, as federated examples of model hubs do it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import peft
import torch
import transformers
from common import Weights, Work, finish, mark, mean, own_names, peft_names, prepared
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from torch.utils.data import IterableDataset


class Batches(IterableDataset[dict[str, Tensor]]):
    """A client's mini-batches, whole, in the order that the workload fixes."""

    def __init__(self, work: Work, number: int, place: int) -> None:
        self.work, self.number, self.place = work, number, place

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for indices, length in self.work.batches[self.number][self.place]:
            yield self.work.batch(indices, length)


def play(work: Work, model: torch.nn.Module, rounds: int, folder: str) -> Weights:
    """The first rounds of the federation."""
    current = peft_names(work.start)
    for number in range(rounds):
        collected = []
        for place in range(len(work.cohorts[number])):
            set_peft_model_state_dict(model, current)
            arguments = transformers.TrainingArguments(
                output_dir=folder,
                max_steps=len(work.batches[number][place]),
                per_device_train_batch_size=1,  # a mini-batch comes whole
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                logging_strategy="no",
                dataloader_pin_memory=False,
            )
            trainer = transformers.Trainer(
                model=model,
                args=arguments,
                train_dataset=Batches(work, number, place),
                data_collator=lambda batches: batches[0],
                optimizers=(work.optimizer(model), None),
            )
            # Its training mode would turn on the network's own dropout, which no contender has.
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            trainer.train()
            collected.append({k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()})
        current = mean(collected)
    return own_names(current)


if __name__ == "__main__":
    work, out, _ = prepared()
    model = work.peft_model()
    with tempfile.TemporaryDirectory() as folder:
        play(work, model, 1, folder)
        mark("ready")
        found = play(work, model, len(work.cohorts), folder)
        mark("done")
    finish(out, found, peft=peft.__version__, transformers=transformers.__version__)
