"""On a GPU: a stack trains to where it does on the CPU, and a step asks the device for nothing."""

from __future__ import annotations

import pytest
import torch
from training.small import answers, ask, base_of, bert, language_base_of, llama_lm, lora, sequences, tensors, texts

from coterie.models.loading import Base
from coterie.protocol import Fit
from coterie.training import fit as module
from coterie.training.asks import Ask, Done, Plan, TrainSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SGD = TrainSettings(optimizer="sgd", lr=0.05, weight_decay=0.0, steps=4, batch_size=8)
LANGUAGE = [False, True]


def base(language: bool) -> Base:
    return language_base_of(llama_lm()) if language else base_of(bert())


def cohort(own: Base) -> list[Ask]:
    asks = []
    for number, rank in enumerate((2, 4, 16, 3)):
        name = f"c{number}"
        data = sequences(20, name) if own.is_language else texts(20, name)
        asks.append(ask(own, Fit(lora(own, rank, name)), name, data, head=not own.is_language))
    return asks


@pytest.mark.parametrize("language", LANGUAGE)
def test_a_stack_ends_where_it_does_on_the_cpu(language: bool) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        own = base(language)
        found[device] = answers(own, cohort(own), SGD, Plan(device=device, clients_per_step=4, padding_rank=16))
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        held = tensors(other)
        for name, value in tensors(one).items():
            torch.testing.assert_close(held[name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("language", LANGUAGE)
def test_no_pass_waits_for_the_device(language: bool, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_of = module._Stack._forward_backward

    def watched(self: module._Stack, number: int, rows: list[int]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            pass_of(self, number, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(module._Stack, "_forward_backward", watched)
    own = base(language)
    plan = Plan(device="cuda", clients_per_step=4, padding_rank=16)
    settings = TrainSettings(steps=3, batch_size=8, dropout=dropout)
    assert all(isinstance(done, Done) for done in answers(own, cohort(own), settings, plan))
