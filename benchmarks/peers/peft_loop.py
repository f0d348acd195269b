"""The script that most papers are written with: one PEFT model, its state dict swapped from client to client."""

from __future__ import annotations

import peft
import transformers
from common import Weights, Work, finish, mark, mean, own_names, peft_names, prepared
from peft import get_peft_model_state_dict, set_peft_model_state_dict


def play(work: Work, model: object, rounds: int) -> Weights:
    """The first rounds of the federation."""
    current = peft_names(work.start)
    for number in range(rounds):
        collected = []
        for place in range(len(work.cohorts[number])):
            set_peft_model_state_dict(model, current)
            work.train(model, number, place)
            collected.append({k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()})
        current = mean(collected)
    return own_names(current)


if __name__ == "__main__":
    work, out, _ = prepared()
    model = work.peft_model()
    play(work, model, 1)
    mark("ready")
    found = play(work, model, len(work.cohorts))
    mark("done")
    finish(out, found, peft=peft.__version__, transformers=transformers.__version__)
