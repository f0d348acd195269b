"""Gradient checkpointing changes no bit, and accumulation only the last ones; both under stacking too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from training.small import (
    EXACT,
    PLAIN,
    STEPS,
    answers,
    ask,
    base_of,
    bert,
    farthest,
    gpt2_lm,
    identical,
    language_base_of,
    llama_lm,
    lora,
    sequences,
    stacked,
    tensors,
    texts,
)

from coterie.errors import ModelError
from coterie.models.loading import Base
from coterie.protocol import Fit, ProductDistance
from coterie.training.recompute import recomputed, repeated_layers

NETWORKS = [bert, gpt2_lm, llama_lm]


def base_for(network) -> Base:
    return base_of(bert()) if network is bert else language_base_of(network())


def cohort(base: Base, network, ranks=(2, 4, 3), **work):
    make = texts if network is bert else sequences
    return [
        ask(base, Fit(lora(base, rank, f"c{i}"), **(work or {"steps": 3 + i})), f"c{i}", make((22, 9, 17)[i], f"c{i}"))
        for i, rank in enumerate(ranks)
    ]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_a_mini_batch_in_parts_is_the_whole_mini_batch(network, parts: int) -> None:
    base = base_for(network)
    settings = replace(STEPS, batch_size=7, clip=0.5)
    whole, split = (
        answers(base, cohort(base, network, epochs=2), replace(settings, accumulation=number), stacked(EXACT))
        for number in (1, parts)
    )
    # 22, 9 and 17 examples: every epoch ends with a batch of 1, 2 or 3, of fewer parts than asked for.
    assert [done.answer.steps_taken for done in whole] == [8, 4, 6]
    # Llama's norms are computed in float32 whatever the dtype.
    tolerance = 1e-6 if network is llama_lm else 1e-10
    for one, other in zip(whole, split, strict=True):
        assert farthest(tensors(one), tensors(other)) < tolerance
        assert one.answer.mean_loss == pytest.approx(other.answer.mean_loss, abs=tolerance)
        assert one.answer.examples_seen == other.answer.examples_seen


def test_parts_of_unequal_numbers_of_tokens_weigh_by_their_tokens() -> None:
    base = language_base_of(gpt2_lm())
    long, short = sequences(3, "long", 8, 12), sequences(3, "short", 2, 4)
    assert int(long.labelled.sum()) > 2 * int(short.labelled.sum())
    data = replace(
        long,
        ids=torch.cat([long.ids, short.ids]),
        offsets=torch.cat([long.offsets, short.offsets[1:] + long.offsets[-1]]),
        prompts=torch.cat([long.prompts, short.prompts]),
        rows=torch.arange(6),
    )
    each = ask(base, Fit(lora(base, 4), steps=1), data=data)
    settings = replace(STEPS, batch_size=6, optimizer="sgd", clip=None)
    (whole,), (split,) = (answers(base, [each], replace(settings, accumulation=number)) for number in (1, 6))
    assert farthest(tensors(whole), tensors(split)) < 1e-12


@pytest.mark.parametrize("network", [bert, gpt2_lm])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_company_changes_no_bit_with_both_on(network, dtype: str) -> None:
    base = base_for(network)
    settings = replace(STEPS, steps=3, batch_size=10, dropout=0.1, accumulation=3, checkpointing=True)
    plan = replace(PLAIN, dtype=dtype)
    asks = cohort(base, network)
    alone = answers(base, asks, settings, plan)
    together = answers(base, asks, settings, stacked(plan))
    assert all(identical(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_computing_layers_again_changes_no_bit(network, dtype: str, dropout: float) -> None:
    base = base_for(network)
    penalty = ProductDistance(lora(base, 4, "reference")["lora"], weight=0.3)
    plan = stacked(replace(PLAIN, dtype=dtype))
    asks = cohort(base, network, penalties=[penalty], steps=4)
    kept, again = (
        answers(base, asks, replace(STEPS, dropout=dropout, checkpointing=checkpointing), plan)
        for checkpointing in (False, True)
    )
    assert all(identical(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("network", NETWORKS)
def test_each_layer_runs_twice_and_is_left_as_it_was(network) -> None:
    base = base_for(network)
    layers = repeated_layers(base.network)
    assert len(layers) == 2
    norm = next(part for part in layers[0].modules() if "Norm" in type(part).__name__)
    calls: list[int] = []
    handle = norm.register_forward_hook(lambda *_: calls.append(1))
    for checkpointing, expected in ((False, 3), (True, 6)):
        calls.clear()
        answers(base, [cohort(base, network, (2,), steps=3)[0]], replace(STEPS, checkpointing=checkpointing), PLAIN)
        assert len(calls) == expected
    handle.remove()
    with pytest.raises(RuntimeError, match="halfway"), recomputed(base.network, []):
        assert "forward" in vars(layers[0])
        raise RuntimeError("halfway")
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_network_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="leave checkpointing off"):
        repeated_layers(nn.Sequential(nn.Linear(2, 2)))


class Held:
    """A tensor that waits for the backward pass; counts how many entries wait at once, at most."""

    now = most = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Held.now += tensor.numel()
        Held.most = max(Held.most, Held.now)

    def __del__(self) -> None:
        Held.now -= self.tensor.numel()


def test_less_waits_for_the_backward_pass() -> None:
    base = base_of(bert(num_hidden_layers=6))
    each = ask(base, Fit(lora(base, 4), steps=1), data=texts(16))

    def most(**changes) -> int:
        Held.now = Held.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            answers(base, [each], replace(STEPS, batch_size=16, **changes), PLAIN)
        assert Held.now == 0
        return Held.most

    plain = most()
    # The parameters wait in each part too. What a layer computes again is not seen here, but is of one layer only.
    assert most(accumulation=4) < 0.5 * plain
    assert most(checkpointing=True) < 0.2 * plain
