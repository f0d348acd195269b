"""Learnt positions: gates, the gradient of an SVD, and what Adam makes of them on a two-layer model."""

from __future__ import annotations

import math

import pytest
import torch
from compress.worlds import frozen, layer, windows
from torch import Tensor, nn
from training.small import llama_lm

from coterie.compress import METHODS, Compressor, Dobi, cut, rank_layers
from coterie.compress.base import language_loss
from coterie.compress.gates import (
    StableSVD,
    gate,
    gated,
    inverse_differences,
    kept_share,
    learnt_positions,
    within_budget,
)
from coterie.compress.network import layers_in_blocks
from coterie.compress.ranks import parameters
from coterie.models.targets import select_layers
from coterie.protocol import Layer


def test_a_gate_is_half_open_at_its_position_and_a_hard_cut_when_steep() -> None:
    gamma = torch.tensor(3.0)
    assert float(gate(gamma, 8)[3]) == 0.5
    assert gate(torch.tensor(2.5), 6, beta=1e4).tolist() == [1, 1, 1, 0, 0, 0]
    assert gate(torch.tensor(6.0), 6, beta=1e4).tolist() == [1] * 6  # gamma = m: nothing is cut


def test_a_position_beyond_the_last_singular_value_changes_nothing() -> None:
    Y, _ = layer(9, 5, 4)
    assert torch.allclose(gated(Y, torch.tensor(40.0, dtype=torch.float64)), Y, atol=1e-12)


@pytest.mark.parametrize(("m", "n"), [(6, 4), (4, 6), (5, 5)])
def test_the_gradient_of_the_svd_is_that_of_finite_differences(m: int, n: int) -> None:
    left, right = layer(m, n, 4)[0], layer(m, n, 4, "right")[0]
    U, _, Vh = torch.linalg.svd(left, full_matrices=False)
    s = torch.tensor([5.0, 3.0, 2.0, 1.2, 0.7], dtype=torch.float64)[: min(m, n)]
    Y = ((U * s) @ Vh).requires_grad_()

    def value(Y: Tensor) -> Tensor:
        U, s, Vh = StableSVD.apply(Y)
        return ((U * s.square().tanh()) @ Vh * right).sum() + (s * s.cumsum(0)).sum()

    (found,) = torch.autograd.grad(value(Y), Y)
    step = 1e-6
    for i in range(m):
        for j in range(n):
            moved = torch.zeros_like(Y)
            moved[i, j] = step
            expected = (value(Y.detach() + moved) - value(Y.detach() - moved)) / (2 * step)
            assert float(found[i, j]) == pytest.approx(float(expected), abs=1e-6)


def test_the_gradient_by_a_position_is_that_of_finite_differences() -> None:
    Y, weights = layer(7, 5, 4)[0], layer(7, 5, 4, "weights")[0]
    gamma = torch.tensor(2.3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad((gated(Y, gamma) * weights).sum(), gamma)
    ends = [(gated(Y, gamma.detach() + h) * weights).sum() for h in (1e-6, -1e-6)]
    assert float(found) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_equal_and_vanishing_singular_values_have_a_finite_gradient() -> None:
    for s in ([2.0, 2.0, 1.0], [2.0, 2.0 - 1e-12, 0.0], [1.0, 1e-200, 0.0], [0.0, 0.0, 0.0]):
        Y = torch.diag(torch.tensor(s, dtype=torch.float64)).requires_grad_()
        (found,) = torch.autograd.grad((gated(Y, torch.tensor(1.5, dtype=torch.float64)) ** 3).sum(), Y)
        assert torch.isfinite(found).all()
        assert torch.isfinite(inverse_differences(Y.detach().diagonal())).all()


def test_ranks_are_rounded_down_and_all_that_the_ratio_pays_for() -> None:
    shapes = {("a",): Layer(20, 30), ("b",): Layer(20, 20), ("c",): Layer(10, 40)}
    ranks = within_budget({("a",): 3.0, ("b",): 9.0, ("c",): 0.01}, shapes, 0.5)
    spent = sum(parameters(shapes[group], rank) for group, rank in ranks.items())
    assert spent <= 0.5 * 1400 and ranks[("c",)] == 1 and ranks[("b",)] > 2 * ranks[("a",)]
    assert 0.5 * 1400 - spent < 3 * 50


def test_the_share_that_positions_stand_for_is_that_of_their_parameters() -> None:
    shapes = {("a",): Layer(20, 30), ("b",): Layer(10, 40)}
    share = kept_share(shapes, {("a",): torch.tensor(3.5), ("b",): torch.tensor(2.0)})
    assert float(share) == pytest.approx((3.5 * 50 + 2 * 50) / 1000)
    one = kept_share({("a",): Layer(20, 30)}, {("a",): torch.tensor(12.0)})
    assert float(one) == pytest.approx(12 * 50 / 600)


@pytest.mark.parametrize("start", [4, 28])
def test_where_the_loss_does_not_care_positions_move_to_the_ratio(start: int) -> None:
    network = frozen(llama_lm())
    shapes = {("model.layers.0.mlp.down_proj",): Layer(32, 48)}

    def indifferent(network: nn.Module, windows: Tensor) -> Tensor:
        return 0 * language_loss(network, windows)

    ranks = dict.fromkeys(shapes, start)
    ((_, found),) = learnt_positions(
        network, shapes, windows(4, 12), indifferent, ranks, 0.8, epochs=60, rate=0.03
    ).items()
    wanted = 0.8 * 32 * 48 / 80
    assert abs(found - wanted) < 1.0 < abs(start - wanted)


@pytest.mark.parametrize("method", [*(kind() for kind in METHODS.values()), Dobi(learned=True, epochs=2)])
def test_networks_in_bfloat16_are_compressed_in_it(method: Compressor) -> None:
    network = frozen(llama_lm()).to(torch.bfloat16)
    names = layers_in_blocks(network, list(select_layers(network, "all-linear")))
    made = cut(network, rank_layers(network, list(names), method, windows(4, 12), 0.6), method, 0.6)
    factors = [network.get_submodule(name) for name in made.ranks]
    assert {value.dtype for module in factors for value in (module.U, module.V)} == {torch.bfloat16}
    assert math.isfinite(float(language_loss(network, windows(2, 12))))


def test_learning_favours_the_layer_that_the_loss_needs_and_keeps_to_the_ratio() -> None:
    network = frozen(llama_lm())
    names = [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    # Nothing of the second block's feed-forward layer reaches the output, so its singular values are worth nothing.
    for part in ("gate_proj", "up_proj"):
        network.get_submodule(f"model.layers.1.mlp.{part}").weight.data *= 1e-3
    text = windows(8, 12)
    method = Dobi(learned=True, epochs=20, rate=0.03)
    ranking = rank_layers(network, names, method, text, 0.5)
    first, second = (ranking.planned[(name,)] for name in names)
    uniform = rank_layers(network, names, Dobi(), text, 0.5).planned[(names[0],)]
    assert first > uniform + 2 and second < uniform - 2
    assert parameters(Layer(32, 48), first + second) <= 0.5 * 2 * 32 * 48
    losses = []
    for found, how in ((ranking, method), (rank_layers(network, names, Dobi(), text, 0.5), Dobi())):
        small = frozen(llama_lm())
        small.load_state_dict(network.state_dict())
        cut(small, found, how, 0.5)
        losses.append(float(language_loss(small, text)))
    assert losses[0] < losses[1] - 0.03
    smaller = method.ranks(ranking, 0.25)
    assert all(1 <= smaller[group] <= ranking.planned[group] for group in smaller)
