"""Local only: nothing but a seed travels, everybody keeps what was learnt."""

from __future__ import annotations

import torch
from conformance.harness import cards, play, random_training

from coterie.algorithms import LocalOnly
from coterie.wire.codec import size


def test_nothing_but_the_seed_ever_travels() -> None:
    outcome = play(LocalOnly(), cards({"a": 1, "b": 4}), random_training())
    assert all(payload is None for payload in outcome.payloads.values())
    assert all(size(body).payload == 0 for body in outcome.bodies.values())


def test_training_goes_on_from_the_clients_own_factors() -> None:
    members = cards({"a": 1, "b": 4})
    first = play(LocalOnly(), members, random_training())
    entered = {}

    def watch(name: str, model: object) -> object:
        entered[name] = model
        return model

    play(LocalOnly(), members, watch, state=first.state, memories=first.memories, number=2)  # type: ignore[arg-type]
    for name, model in entered.items():
        for layer, term in model["lora"].items():  # type: ignore[index]
            assert torch.equal(term.B, first.fitted[name]["lora"][layer].B)
