"""A residual bottleneck behind a layer: the identity at first, able to learn, and what is refused."""

from __future__ import annotations

import pytest
import torch
from training.small import EXACT, KEY, STEPS, answers, ask, base_of, farthest, stacked, tensors, texts

from coterie.errors import ModelError
from coterie.models.loading import Base
from coterie.protocol import Bottleneck, FactorDistance, Fit, Layer, Model, Predict


def bottlenecks(base: Base, k: int = 4, name: str = "c", zero: bool = True) -> dict[str, Bottleneck]:
    made = {}
    for layer, shape in base.layers.items():
        down = torch.zeros(k, shape.d_out) if zero else KEY.fold(name, layer, "down").normal((k, shape.d_out), 0.3)
        made[layer] = Bottleneck(down, KEY.fold(name, layer, "up").normal((shape.d_out, k), 0.3))
    return made


def logits(base: Base, model: Model) -> torch.Tensor:
    (done,) = answers(base, [ask(base, Predict(model, "train"), data=texts(9))])
    found: torch.Tensor = done.answer.logits
    return found


def test_with_a_zero_down_projection_the_model_says_what_it_said_before() -> None:
    base = base_of()
    assert torch.equal(logits(base, Model()), logits(base, Model(bottleneck=bottlenecks(base))))
    other = logits(base, Model(bottleneck=bottlenecks(base, zero=False)))
    assert not torch.allclose(logits(base, Model()), other, atol=1e-2)


def test_it_acts_on_the_layers_output_token_by_token() -> None:
    term = Bottleneck(KEY.fold("d").normal((3, 5)), KEY.fold("u").normal((5, 3)))
    x = KEY.fold("x").normal((2, 7, 5))
    for row, made in zip(x.flatten(0, 1), term.apply(x).flatten(0, 1), strict=True):
        assert torch.allclose(made, term.up @ torch.nn.functional.gelu(term.down @ row), atol=1e-5)


def test_it_learns_from_zero_on_and_both_projections_move() -> None:
    base = base_of()
    start = Model(bottleneck=bottlenecks(base))
    (done,) = answers(base, [ask(base, Fit(start, train=("bottleneck.*",), head=False), data=texts(12))])
    moved = done.answer.model.parameters
    assert all(not torch.equal(value, moved[name]) for name, value in start.parameters.items())


def test_company_changes_no_bit_and_the_distance_to_the_start_is_zero_at_first() -> None:
    base = base_of()
    asks = []
    for i in range(3):
        own = bottlenecks(base, name=f"c{i}", zero=False)
        penalty = FactorDistance(own, 0.1 * (i + 1), ("down", "up"), "bottleneck")
        asks.append(ask(base, Fit(Model(bottleneck=own), ("bottleneck.*",), penalties=(penalty,)), f"c{i}", texts(12)))
    together, alone = answers(base, asks, STEPS, stacked(EXACT)), answers(base, asks)
    for one, other in zip(together, alone, strict=True):
        assert farthest(tensors(one), tensors(other)) == 0
        assert one.answer.penalty_before == 0 < one.answer.penalty_after


def test_shapes_that_do_not_fit_and_matrices_are_refused() -> None:
    term = Bottleneck(torch.zeros(2, 7), torch.zeros(7, 2))
    term.check("client a", Layer(7, 5), 1)
    with pytest.raises(ModelError, match=r"client a: down \(2, 7\) .* output of 6"):
        term.check("client a", Layer(6, 5), None)
    with pytest.raises(ModelError, match="no matrix"):
        term.dense()
