"""Training cores inside compressed bases: gradients of the dense layer, a client's bits alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from compress.worlds import frozen, windows
from torch import nn
from training.small import (
    EXACT,
    KEY,
    PLAIN,
    STEPS,
    answers,
    ask,
    gpt2_lm,
    identical,
    language_base_of,
    llama_lm,
    sequences,
    stacked,
)

from coterie.compress import SVD, cut, rank_layers
from coterie.errors import ModelError
from coterie.models.loading import Base
from coterie.models.targets import linears
from coterie.protocol import Evaluate, Fit, Gradient, InnerCore, LowRank, Model
from coterie.training.asks import Ask


def compressed(make: Callable[[], nn.Module] = llama_lm) -> Base:
    """Some of the adapted layers of a decoder as factors, of ranks that are no multiples of anything."""
    network = frozen(make())
    names = [name for name in linears(network) if name.endswith(("down_proj", "v_proj", "c_proj"))]
    cut(network, rank_layers(network, names, SVD(), windows(4, 9), 0.7), SVD(), 0.7)
    return language_base_of(network)


def cores(base: Base, name: str, std: float = 0.2) -> dict[str, InnerCore]:
    made = {}
    for layer in base.factored:
        k = base.layers[layer].inner
        assert k is not None
        made[layer] = InnerCore(torch.eye(k) + KEY.fold("core", name, layer).normal((k, k), std))
    return made


def asks(base: Base) -> list[Ask]:
    return [
        ask(
            base,
            Fit(Model(core=cores(base, name)), train=("core.*",), steps=3 + index),
            name,
            sequences(9 + index, name),
        )
        for index, name in enumerate("abc")
    ]


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    base = compressed(gpt2_lm)  # which, unlike LLaMA, computes all of it in the precision of its weights
    base.prepare("float64", "eager")
    own = cores(base, "a")
    data = sequences(12, "a")
    (done,) = answers(base, [ask(base, Gradient(Model(core=own), "train", wrt=("core.*",)), "a", data)])
    layer = base.factored[0]
    step = 1e-5
    for at in ((0, 0), (0, 1), (2, 1)):
        losses = []
        for sign in (1, -1):
            moved = own[layer].core.double().clone()
            moved[at] += sign * step
            model = Model(core=own | {layer: InnerCore(moved)})
            (scored,) = answers(base, [ask(base, Evaluate(model, "train"), "a", data)])
            losses.append(scored.answer.loss)
        slope = (losses[0] - losses[1]) / (2 * step)
        assert float(done.answer[f"core.{layer}.core"][at]) == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_a_core_stands_between_the_factors_of_its_layer() -> None:
    base = compressed(gpt2_lm)
    base.prepare("float64", "eager")
    own, data = cores(base, "a"), sequences(12, "a")
    (within,) = answers(base, [ask(base, Evaluate(Model(core=own), "train"), "a", data)])
    for layer, term in own.items():
        linear = base.slots.layers[layer].base
        linear.U.data = linear.U.data @ term.core.double()  # type: ignore[operator, union-attr]
    (merged,) = answers(base, [ask(base, Evaluate(Model(), "train"), "a", data)])
    assert within.answer.loss == pytest.approx(merged.answer.loss, abs=1e-10)


def test_a_client_s_bits_do_not_depend_on_its_company_and_dropout_leaves_cores_alone() -> None:
    for plan in (EXACT, PLAIN):
        base = compressed()
        together = answers(base, asks(base), STEPS, stacked(plan))
        alone = answers(base, asks(base), STEPS, replace(plan, clients_per_step=1))
        dropped = answers(base, asks(base), replace(STEPS, dropout=0.5), stacked(plan))
        for one, other, third in zip(together, alone, dropped, strict=True):
            assert identical(one, other) and identical(one, third)
            assert one.answer.mean_loss > 0


def test_low_rank_factors_may_stand_beside_a_core() -> None:
    base = compressed()
    layer = base.factored[0]
    shape = base.layers[layer]
    lora = {layer: LowRank(KEY.fold("B").normal((shape.d_out, 2)), KEY.fold("A").normal((2, shape.d_in)), 0.5)}
    data = sequences(12, "a")
    found = [
        answers(base, [ask(base, Evaluate(model, "train"), "a", data)])[0].answer.loss
        for model in (Model(core=cores(base, "a")), Model(lora=lora), Model(core=cores(base, "a"), lora=lora))
    ]
    assert len(set(found)) == 3


def test_a_core_in_a_layer_without_factors_is_refused() -> None:
    base = compressed()
    plain = next(name for name in base.layers if name not in base.factored)
    request = Fit(Model(core={plain: InnerCore.identity(4)}), train=("core.*",))
    (answer,) = answers(base, [ask(base, request, "a", sequences(9, "a"))])
    assert isinstance(answer, ModelError) and "holds no factors" in str(answer)
