"""Training cores: gradients, unequal heads in one stack, frozen heads, dropout, padding."""

from __future__ import annotations

from dataclasses import replace

import torch
from reference.dense_core import dense_core
from training.small import EXACT, KEY, PLAIN, STEPS, answers, ask, base_of, farthest, identical, stacked, tensors, texts

from coterie.models.loading import Base, inputs_of
from coterie.protocol import Core, Fit, Gradient, Model
from coterie.training.asks import Ask

SIZES = ((1, 3), (2, 2), (3, 1), (2, 3))
ONE_WIDTH = ((1, 3), (2, 3), (5, 3), (4, 3))


def cores(base: Base, heads: int, width: int, name: str, gain: bool = True) -> dict[str, Core]:
    key, wide = KEY.fold("core", name), heads * width
    return {
        layer: Core(
            key.fold("U", layer).normal((shape.d_out, wide), 0.3, torch.float64),
            key.fold("H", layer).normal((heads, width, width), 0.3, torch.float64),
            key.fold("V", layer).normal((wide, shape.d_in), 0.3, torch.float64),
            key.fold("s", layer).normal((heads,), 0.3, torch.float64) + 1 if gain else None,
        )
        for layer, shape in base.layers.items()
    }


def asks(base: Base, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Ask]:
    """Clients of unequal heads, data and steps (and widths); each has a frozen second term of cores."""
    made = []
    for index, (name, size) in enumerate(zip("abcd", sizes, strict=False)):
        frozen = cores(base, 6 - size[0], size[1], f"{name}/frozen", gain=False)
        own = Model(core=cores(base, *size, name), shared=frozen)
        request = Fit(own, train=("core.*",), steps=3 + index)
        made.append(ask(base, request, name, texts((22, 9, 17, 6)[index], name)))
    return made


def test_the_gradient_of_a_core_is_that_of_the_dense_matrix_it_adds() -> None:
    base = base_of()
    base.prepare("float64", "eager")
    model = Model(core=cores(base, 3, 2, "a"))
    (done,) = answers(base, [ask(base, Gradient(model, "train", wrt=("core.*",)), "a")])
    leaves = {name: value.clone().requires_grad_() for name, value in model.parameters.items()}
    data = texts(22, "a")
    with base.slots.bound(1, None, {name: value.double()[None] for name, value in base.head.items()}):
        for layer, term in model.with_parameters(leaves)["core"].items():
            W = dense_core(term)
            base.network.get_submodule(layer).register_forward_hook(lambda _, args, y, W=W: y + args[0] @ W.T)
        batch = data.batch(range(22), int(data.lengths.max()))
        logits = base.network(**inputs_of(base, batch)).logits
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
    expected = torch.autograd.grad(loss, list(leaves.values()))
    for name, grad in zip(leaves, expected, strict=True):
        assert torch.allclose(done.answer[name], grad, atol=1e-10), name
        assert float(grad.abs().max()) > 1e-6


def test_with_heads_of_one_width_a_client_s_bits_do_not_depend_on_its_company() -> None:
    settings = replace(STEPS, dropout=0.2, clip=1.0, weight_decay=0.05)
    for plan in (EXACT, PLAIN):
        base = base_of()
        together = answers(base, asks(base, ONE_WIDTH), settings, stacked(plan))
        alone = answers(base, asks(base, ONE_WIDTH), settings, replace(plan, clients_per_step=1))
        assert all(identical(one, other) for one, other in zip(together, alone, strict=True))


def test_padding_of_heads_and_widths_changes_rounding_alone() -> None:
    settings = replace(STEPS, optimizer="sgd", lr=0.1)
    base = base_of()
    wide = answers(base, asks(base), settings, stacked(EXACT))
    tight = answers(base, asks(base), settings, replace(EXACT, padding_rank=0, clients_per_step=1))
    for one, other in zip(wide, tight, strict=True):
        assert farthest(tensors(one), tensors(other)) <= 1e-10


def test_frozen_cores_act_but_stay_and_bases_are_no_parameters() -> None:
    base = base_of()
    asked = asks(base)
    for request, done in zip(asked, answers(base, asked, plan=stacked(EXACT)), strict=True):
        before, after = request.request.initial, done.answer.model
        for layer, term in before["core"].items():
            assert not torch.equal(after["core"][layer].core, term.core)
            assert not torch.equal(after["core"][layer].gain, term.gain)
            assert torch.equal(after["core"][layer].U, term.U) and torch.equal(after["core"][layer].V, term.V)
            assert torch.equal(after["shared"][layer].core, before["shared"][layer].core)
    without = [
        replace(one, request=replace(one.request, initial=Model(core=one.request.initial["core"]))) for one in asked
    ]
    bare = answers(base, without, plan=stacked(EXACT))
    for one, other in zip(answers(base, asked, plan=stacked(EXACT)), bare, strict=True):
        assert one.answer.mean_loss != other.answer.mean_loss


def test_dropout_acts_on_cores_that_train() -> None:
    base = base_of()
    first, second = (answers(base, asks(base, SIZES[:1]), replace(STEPS, dropout=rate))[0] for rate in (0.0, 0.5))
    assert first.answer.mean_loss != second.answer.mean_loss
