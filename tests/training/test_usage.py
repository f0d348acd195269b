"""Mean routing weights over a data set: of tokens alone, the same in whatever batches."""

from __future__ import annotations

import pytest
import torch
from training import small

from coterie.errors import DataError
from coterie.models.loading import Base, inputs_of
from coterie.protocol import Model, Routed
from coterie.training.usage import mean_usage

M = 3


def routed(base: Base) -> Model:
    """Experts that hardly move anything, and routers that tell tokens apart."""
    terms = {}
    for name, layer in base.layers.items():
        key = small.KEY.fold("routed", name)
        B = tuple(key.fold("B", m).normal((layer.d_out, 2), 0.1) for m in range(M))
        A = (key.fold("A").normal((2, layer.d_in), 0.1),)
        terms[name] = Routed(B, A, key.fold("router").normal((M, layer.d_in), 1.0), 1.0, key.normal((M,), 1.0))
    return Model(experts=terms)


def test_usage_is_the_mean_over_tokens_of_every_example_alone() -> None:
    base = small.base_of()
    base.prepare("float64", "eager")
    model, data = routed(base), small.texts(11, "usage")
    found = mean_usage(base, model, base.head, data, 4)
    assert set(found) == {("experts", name) for name in base.layers}
    for name in base.layers:
        seen: list[torch.Tensor] = []
        slot = base.slots.layers[name]
        handle = slot.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0][0]))
        stacked = Model.stack([model])
        for example in range(len(data)):  # one at a time there is no padding at all
            batch = data.batch([example], int(data.lengths[example]))
            head = {part: value.double()[None] for part, value in base.head.items()}
            with torch.no_grad(), base.slots.bound(1, stacked, head), base.slots.everywhere():
                base.network(**inputs_of(base, batch))
        handle.remove()
        tokens = torch.cat(seen)
        expected = model["experts"][name].weights(tokens).mean(dim=0)
        torch.testing.assert_close(found["experts", name], expected, atol=1e-7, rtol=1e-6, check_dtype=False)
        assert float(found["experts", name].sum()) == pytest.approx(1) and float(expected.std()) > 0.01


def test_the_size_of_batches_changes_nothing() -> None:
    base = small.base_of()
    base.prepare("float64", "eager")
    model, data = routed(base), small.texts(11, "usage")
    one, other = (mean_usage(base, model, base.head, data, size) for size in (1, 64))
    for place, value in one.items():
        torch.testing.assert_close(value, other[place], atol=1e-12, rtol=0)


def test_no_examples_have_no_usage() -> None:
    base = small.base_of()
    with pytest.raises(DataError, match="no examples"):
        mean_usage(base, routed(base), base.head, small.texts(3).select([]), 4)
