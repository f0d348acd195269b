"""Whole networks: every method on decoders and encoders, predicted losses measured, slices nested, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from compress.test_calibration import gathered
from compress.worlds import frozen, windows
from reference.dense_compress import dense_left
from torch import Tensor, nn
from training.small import bert, gpt2_lm, llama_lm

from coterie.compress import ASVD, METHODS, QSVD, SVD, SVDLLM, SVDLLMV2, Dobi, FactoredLinear, cut, rank_layers
from coterie.compress.base import Compressor, language_loss
from coterie.compress.factored import matrix
from coterie.compress.inputs import Inputs
from coterie.compress.network import layers_in_blocks
from coterie.compress.qsvd import term_gradients
from coterie.compress.svd_llm_v2 import removed_ratios
from coterie.errors import ConfigError, ModelError
from coterie.models.targets import select_layers

NETWORKS = [llama_lm, gpt2_lm, bert]
TEXT = windows(6, 11)
LONG = windows(24, 40, "long")
DOWN = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]


def everything(network: nn.Module) -> list[str]:
    return list(layers_in_blocks(network, list(select_layers(network, "all-linear"))))


def compressed(network: nn.Module, method: Compressor, ratio: float, text: Tensor = TEXT):
    small = copy.deepcopy(network)
    ranking = rank_layers(small, everything(small), method, text, ratio)
    return small, cut(small, ranking, method, ratio, text)


def product(network: nn.Module, name: str) -> Tensor:
    layer = network.get_submodule(name)
    assert isinstance(layer, FactoredLinear)
    return layer.U @ layer.V


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_keeps_the_share_of_parameters_and_reports_the_error_that_it_makes(make, name: str) -> None:
    network, method = frozen(make()), METHODS[name]()
    if make is bert and name == "qsvd":
        with pytest.raises(ModelError, match="predicts no next token"):
            rank_layers(network, everything(network), method, TEXT, 0.6)
        return
    small, made = compressed(network, method, 0.6)
    assert 0.5 < made.parameters / made.parameters_before <= 0.6
    inputs = gathered(network, TEXT)
    for layer, rank in made.ranks.items():
        factors = small.get_submodule(layer)
        assert isinstance(factors, FactoredLinear) and factors.inner == rank
        W = matrix(network.get_submodule(layer)).double()
        lost = inputs[layer] @ (W - (factors.U.double() @ factors.V.double())).mT
        assert made.errors[layer] == pytest.approx(
            float(lost.norm() / (inputs[layer] @ W.mT).norm()), rel=1e-3, abs=1e-5
        )
    plain = {name for name, module in small.named_modules() if isinstance(module, nn.Linear)}
    assert not plain & set(made.ranks)
    held = sum(value.numel() for value in small.parameters())
    assert held == sum(value.numel() for value in network.parameters()) - made.parameters_before + made.parameters


def test_the_loss_that_svd_llm_predicts_for_a_network_s_layers_is_measured_to_1e_6() -> None:
    network = frozen(llama_lm()).double()
    names = everything(network)
    ranking = rank_layers(network, names, SVDLLM(), LONG, 0.8)
    inputs = gathered(network, LONG)
    for name in names:
        terms, W = ranking.lists[(name,)], matrix(network.get_submodule(name))
        for rank in (1, 5, len(terms)):
            lost = float((inputs[name] @ (W - terms.cut(rank).product()).mT).norm())
            predicted = float(ranking.errors[name][rank])
            assert predicted == pytest.approx(lost, rel=1e-6)
    # The tail of a whole list is that loss.
    whole = rank_layers(network, DOWN, SVDLLMV2(), LONG, 0.8)
    for name in DOWN:
        assert whole.lists[(name,)].tail(7) == pytest.approx(float(whole.errors[name][7]), rel=1e-6)


@pytest.mark.parametrize("name", ["svd", "asvd", "svd-llm", "svd-llm-v2", "qsvd"])
def test_a_smaller_model_is_a_slice_of_the_larger_one_and_of_its_own_decomposition(name: str) -> None:
    network, method = frozen(llama_lm()), METHODS[name]()
    names = everything(network)
    ranking = rank_layers(network, names, method, TEXT, 0.8)
    large, small = copy.deepcopy(network), copy.deepcopy(network)
    ranks = cut(large, ranking, method, 0.8).ranks, cut(small, ranking, method, 0.4).ranks
    alone, _ = compressed(network, method, 0.4)
    for layer in names:
        few = ranks[1][layer]
        assert few <= ranks[0][layer]
        whole, part = large.get_submodule(layer), small.get_submodule(layer)
        assert torch.equal(whole.U[:, :few], part.U) and torch.equal(whole.V[:few], part.V)
        assert torch.allclose(product(alone, layer), product(small, layer), atol=1e-5)


def test_dobi_s_smaller_models_are_slices_of_the_basis_at_the_largest_ratio() -> None:
    network, method = frozen(llama_lm()), Dobi()
    ranking = rank_layers(network, DOWN, method, TEXT, 0.8)
    large, small = copy.deepcopy(network), copy.deepcopy(network)
    cut(large, ranking, method, 0.8)
    few = cut(small, ranking, method, 0.4).ranks[DOWN[0]]
    assert torch.equal(large.get_submodule(DOWN[0]).U[:, :few], small.get_submodule(DOWN[0]).U)


def test_a_ratio_above_the_one_decomposed_for_is_refused() -> None:
    network = frozen(llama_lm())
    ranking = rank_layers(network, DOWN, SVD(), TEXT, 0.4)
    with pytest.raises(ModelError, match="decompose at the largest ratio"):
        cut(network, ranking, SVD(), 0.6)
    assert isinstance(network.get_submodule(DOWN[0]), nn.Linear)


def test_v2_gives_layers_of_one_kind_ranks_by_their_losses() -> None:
    network = frozen(llama_lm())
    network.get_submodule(DOWN[1]).weight.data *= 30  # loses more, so it keeps more
    ranking = rank_layers(network, DOWN, SVDLLMV2(), TEXT, 0.5)
    ranks = SVDLLMV2().ranks(ranking, 0.5)
    uniform = SVDLLM().ranks(ranking, 0.5)[(DOWN[0],)]
    losses = [ranking.lists[(name,)].tail(uniform) for name in DOWN]
    shares = removed_ratios(losses, 0.5)
    assert [ranks[(name,)] for name in DOWN] == [int((1 - share) * 32 * 48 / 80) for share in shares]
    assert ranks[(DOWN[0],)] < uniform < ranks[(DOWN[1],)]


def test_v2_s_refusal_speaks_of_the_ratio_that_was_asked_for() -> None:
    network = frozen(llama_lm())
    network.get_submodule(DOWN[1]).weight.data *= 1e4
    ranking = rank_layers(network, DOWN, SVDLLMV2(), TEXT, 0.2)
    with pytest.raises(ModelError) as caught:
        cut(network, ranking, SVDLLMV2(), 0.06)
    assert str(caught.value).startswith(
        f"layer {DOWN[0]} (32 x 48) would keep a rank below 1: at ratio 0.06 SVD-LLM V2"
    )
    assert str(caught.value).endswith("of its parameters; take a larger ratio, or leave the layer out")
    assert isinstance(network.get_submodule(DOWN[0]), nn.Linear)


def test_v2_at_equal_ratios_is_svd_llm() -> None:
    network = frozen(llama_lm()).double()
    # One layer of each kind, so that all of them get the ratio that was asked for.
    names = [f"model.layers.1.{part}" for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")]
    made = []
    for method in (SVDLLM(), SVDLLMV2()):
        small = copy.deepcopy(network)
        made.append((small, cut(small, rank_layers(small, names, method, LONG, 0.5), method, 0.5)))
    (first, one), (second, two) = made
    assert one.ranks == two.ranks
    for name in names:
        assert torch.allclose(product(first, name), product(second, name), atol=1e-7)
        assert one.errors[name] == pytest.approx(two.errors[name], rel=1e-7)


def test_qsvd_gives_layers_that_are_not_query_key_or_value_the_uniform_ratio_of_asvd() -> None:
    network = frozen(llama_lm())
    (small, made), (other, uniform) = compressed(network, QSVD(), 0.6), compressed(network, ASVD(), 0.6)
    joint = {name for group in made.shared for name in group}
    others = [name for name in made.ranks if name not in joint]
    assert len(joint) == 6 and len(others) == 8
    for name in others:
        assert made.ranks[name] == uniform.ranks[name]
        assert torch.allclose(product(small, name), product(other, name), atol=1e-5)


def test_the_update_is_the_best_left_factor_for_what_the_compressed_network_feeds_it() -> None:
    network = frozen(llama_lm()).double()
    small, made = compressed(network, SVDLLM(update=True), 0.5, LONG)
    name = "model.layers.1.self_attn.q_proj"  # all that comes before it is in its final state when it is fitted
    X, W, fitted = gathered(small, LONG)[name], network.get_submodule(name).weight, small.get_submodule(name)
    assert torch.allclose(fitted.U, dense_left(W, fitted.V, X.mT), atol=1e-6)
    lost, whole = (X @ (W - product(small, name)).mT).norm(), (X @ W.mT).norm()
    assert made.errors[name] == pytest.approx(float(lost / whole), rel=1e-6)
    plain, _ = compressed(network, SVDLLM(), 0.5, LONG)
    assert lost < 0.99 * (X @ (W - product(plain, name)).mT).norm()
    assert set(made.errors) == set(made.ranks)


def test_the_update_of_the_first_layers_is_least_squares_on_the_original_inputs() -> None:
    network = frozen(llama_lm()).double()
    name = "model.layers.0.self_attn.q_proj"
    small, made = compressed(network, SVDLLM(update=True), 0.5, LONG)
    X, W = gathered(network, LONG)[name], network.get_submodule(name).weight
    plain, _ = compressed(network, SVDLLM(), 0.5, LONG)
    # Its inputs are those of the network as it was, for which the truncation is the best already.
    assert torch.allclose(X @ product(small, name).mT, X @ product(plain, name).mT, atol=1e-6 * float(X.norm()))
    lost = float((X @ (W - product(small, name)).mT).norm() / (X @ W.mT).norm())
    assert made.errors[name] == pytest.approx(lost, rel=1e-6)


def test_query_key_and_value_share_one_tensor_and_at_full_rank_come_back() -> None:
    network, method = frozen(llama_lm()), QSVD()
    small, made = compressed(network, method, 0.6)
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert parts in made.shared
    first, *others = (small.get_submodule(part) for part in parts)
    assert all(other.V is first.V for other in others)
    ranking = rank_layers(network, parts, method, TEXT, 0.6)
    whole = ranking.lists[tuple(parts)]
    assert len(whole) == 32
    for part, U in zip(parts, whole.rows([32, 32, 32]), strict=True):
        assert torch.allclose(U @ whole.V, network.get_submodule(part).weight, atol=1e-4)


# LLaMA's norms compute in float32, so that differences need a larger step and are less exact.
@pytest.mark.parametrize(("make", "size", "tolerance"), [(gpt2_lm, 1e-5, 1e-4), (llama_lm, 1e-2, 5e-3)])
def test_a_term_s_score_is_its_singular_value_times_the_loss_s_derivative_by_it(
    make, size: float, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.compress.calibration.BATCH_TOKENS", 40)
    network, text = frozen(make()).double(), windows(2, 40)
    place = "model.layers.1.self_attn." if make is llama_lm else "transformer.h.1.attn."
    group = tuple(place + part for part in (("q_proj", "k_proj", "v_proj") if make is llama_lm else ("c_attn",)))
    stacked = torch.cat([matrix(network.get_submodule(name)) for name in group])
    terms = SVD().terms(group, stacked, Inputs())
    found = term_gradients(network, {group: terms}, text, language_loss)[group]
    assert not any(value.requires_grad or value.grad is not None for value in network.parameters())
    for j in (0, 3, 20):
        sigma = float(terms.scores[j])
        direction = terms.U[:, j : j + 1] @ terms.V[j : j + 1] / sigma
        squares = []
        for batch in text.split(1):
            ends = []
            for step in (size * sigma, -size * sigma):
                moved = copy.deepcopy(network)
                for name, part in zip(group, direction.split(len(stacked) // len(group)), strict=True):
                    matrix(moved.get_submodule(name)).add_(step * part)
                ends.append(float(language_loss(moved, batch)))
            squares.append(((ends[0] - ends[1]) / (2 * size * sigma)) ** 2)
        derivative = (sum(squares) / len(squares)) ** 0.5
        assert float(found[j]) == pytest.approx(sigma * derivative, rel=tolerance)


def test_qsvd_on_a_layer_that_is_all_three_needs_no_sharing() -> None:
    _, made = compressed(frozen(gpt2_lm()), QSVD(scaling="none"), 0.6)
    assert made.shared == [] and any(name.endswith("c_attn") for name in made.ranks)


def test_layers_outside_the_blocks_are_left_out_and_alone_refused() -> None:
    network = frozen(bert())
    assert "bert.pooler.dense" in select_layers(network, "all-linear")
    assert "bert.pooler.dense" not in everything(network)
    with pytest.raises(ModelError, match=r"none of the chosen layers \(bert.pooler.dense\) lies in a block"):
        rank_layers(network, ["bert.pooler.dense"], SVD(), TEXT, 0.5)


@pytest.mark.parametrize("ratio", [0, 1.5, -1])
def test_a_ratio_outside_its_range_is_refused_before_anything_runs(ratio: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        rank_layers(frozen(llama_lm()), DOWN, SVD(), TEXT, ratio)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_rank_below_one_is_refused_and_the_network_stays(name: str) -> None:
    network = frozen(llama_lm())
    with pytest.raises(ModelError, match=r"would keep a rank below 1 at ratio 0\.01; take at least"):
        rank_layers(network, everything(network), METHODS[name](), TEXT, 0.01)
    assert not any(isinstance(module, FactoredLinear) for module in network.modules())


def test_progress_is_told_block_by_block() -> None:
    told: list[tuple[int, int]] = []
    rank_layers(frozen(llama_lm()), DOWN, SVD(), TEXT, 0.5, advance=lambda *at: told.append(at))
    assert told == [(1, 2), (2, 2)]
