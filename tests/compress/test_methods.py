"""What each compressor promises: the fixtures of the specification, its losses, its reductions to the others."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from compress.worlds import layer, positive_definite, seen
from hypothesis import assume, given
from hypothesis import strategies as st
from reference.dense_compress import dense_asvd, dense_dobi, dense_left, dense_svd_llm, output_error, truncated

from coterie.compress import ASVD, METHODS, QSVD, SVD, SVDLLM, SVDLLMV2, Dobi
from coterie.compress.inputs import Inputs, Moments, factor_of
from coterie.compress.qsvd import attention_groups, best_scores
from coterie.compress.ranked import Ranked
from coterie.compress.svd_llm import fitted_left, whitened
from coterie.compress.svd_llm_v2 import MOST_REMOVED, eigen_whitened, removed_ratios
from coterie.errors import ConfigError, ModelError
from coterie.protocol import Layer

W12 = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
sizes = st.integers(2, 10)


def given_inputs(gram: list[float], magnitude: list[float]) -> Inputs:
    kept = Inputs()
    kept.add(Moments(torch.diag(torch.tensor(gram, dtype=torch.float64)), torch.tensor(magnitude).double(), 1))
    return kept


def kept_entries(terms: Ranked) -> list[float]:
    return [round(float(value), 5) for value in terms.cut(1).product().flatten()]


def test_n22_plain_svd_keeps_the_larger_singular_value() -> None:
    assert kept_entries(SVD().terms(("l",), W12, Inputs())) == [0, 0, 0, 2]


def test_n22_asvd_keeps_the_channel_with_larger_inputs() -> None:
    # S = diag(4, 1) at alpha 1/2: means 16 and 1.
    assert kept_entries(ASVD().terms(("l",), W12, given_inputs([1, 1], [16, 1]))) == [1, 0, 0, 0]


def test_n22_svd_llm_keeps_what_its_inputs_make_large_and_loses_4_where_plain_svd_loses_16() -> None:
    inputs = given_inputs([16, 1], [1, 1])
    terms = SVDLLM().terms(("l",), W12, inputs)
    assert kept_entries(terms) == [1, 0, 0, 0] and terms.tail(1) ** 2 == pytest.approx(4)
    plain = SVD().terms(("l",), W12, inputs).cut(1).product()
    assert float(((W12 - plain) @ inputs.gram @ (W12 - plain)).trace()) == pytest.approx(16)


def test_n23_layers_that_lose_less_give_up_more() -> None:
    assert removed_ratios([10, 100], 0.3) == pytest.approx([0.4, 0.2])


def test_n24_qsvd_keeps_the_singular_value_that_the_loss_needs() -> None:
    # W_q = (2, 0), W_k = (0, 1), W_v = (0, 0); |dL/dsigma| = (0.1, 1).
    W = torch.tensor([[2.0, 0], [0, 1], [0, 0]], dtype=torch.float64)
    terms = SVD().terms(("q", "k", "v"), W, Inputs())
    scores = terms.scores * torch.tensor([0.1, 1.0])
    assert scores.tolist() == pytest.approx([0.2, 1.0])
    kept = terms.by(scores).cut(1).product()
    assert torch.allclose(kept, torch.tensor([[0.0, 0], [0, 1], [0, 0]], dtype=torch.float64))


@given(sizes, sizes, st.integers(0, 10**6))
def test_asvd_is_its_dense_twin_and_with_equal_channels_plain_svd(m: int, n: int, seed: int) -> None:
    W, X = layer(m, n, 30, seed)
    alike = X.sign()
    for k in range(1, min(m, n) + 1):
        made = ASVD().terms(("l",), W, seen(X)).cut(k).product()
        assert torch.allclose(made, dense_asvd(W, X, k, 0.5), atol=1e-8)
        flat = ASVD().terms(("l",), W, seen(alike)).cut(k).product()
        assert torch.allclose(flat, truncated(W, k), atol=1e-8)


@given(sizes, sizes, st.integers(0, 10**6))
def test_svd_llm_s_predicted_loss_is_the_measured_one(m: int, n: int, seed: int) -> None:
    W, X = layer(m, n, 30, seed)
    assume(positive_definite(X @ X.mT))
    terms = SVDLLM().terms(("l",), W, seen(X))
    for k in range(1, min(m, n)):
        measured = output_error(W, terms.cut(k).product(), X)
        assert terms.tail(k) == pytest.approx(measured, rel=1e-6)
        assert torch.allclose(terms.cut(k).product() @ X, dense_svd_llm(W, X, k) @ X, atol=1e-6 * float(X.norm()))


def test_the_loss_identity_at_the_size_of_a_real_layer() -> None:
    W, X = layer(96, 128, 600)
    terms = SVDLLM().terms(("l",), W, seen(X[:, :200], X[:, 200:]))
    for k in (1, 20, 60, 95):
        assert terms.tail(k) == pytest.approx(output_error(W, terms.cut(k).product(), X), rel=1e-6)


@given(sizes, sizes, st.integers(0, 10**6))
def test_no_other_method_loses_less_on_the_text_than_svd_llm(m: int, n: int, seed: int) -> None:
    W, X = layer(m, n, 30, seed)
    for k in range(1, min(m, n) + 1):
        lost = {}
        for name in ("svd", "asvd", "svd-llm", "dobi"):
            method = METHODS[name]()
            terms = method.terms(("l",), W, seen(X[:, :15], X[:, 15:], inputs=method.inputs(W, k)))
            lost[name] = output_error(W, terms.cut(k).product(), X)
        slack = 1e-6 * output_error(W, torch.zeros_like(W), X)
        assert lost["svd-llm"] <= min(lost.values()) + slack


def test_with_white_inputs_svd_llm_is_plain_svd() -> None:
    W, _ = layer(5, 7, 4)
    for k in range(1, 6):
        assert torch.allclose(whitened(W, 9 * torch.eye(7)).cut(k).product(), truncated(W, k), atol=1e-9)


@given(sizes, sizes, st.integers(0, 10**6))
def test_v2_at_equal_ranks_is_svd_llm(m: int, n: int, seed: int) -> None:
    W, X = layer(m, n, 30, seed)
    assume(positive_definite(X @ X.mT))
    first, second = SVDLLM().terms(("l",), W, seen(X)), SVDLLMV2().terms(("l",), W, seen(X))
    assert torch.allclose(first.scores, second.scores, rtol=1e-8, atol=1e-9 * float(first.scores[0]))
    for k in range(1, min(m, n) + 1):
        assert torch.allclose(first.cut(k).product() @ X, second.cut(k).product() @ X, atol=1e-6 * float(X.norm()))


def test_text_of_fewer_directions_than_the_layer_is_no_obstacle() -> None:
    W, X = layer(6, 10, 4)
    gram = X @ X.mT
    L = factor_of(gram)
    assert torch.allclose(L @ L.mT, gram, atol=1e-5)
    for terms in (whitened(W, gram), eigen_whitened(W, gram)):
        assert torch.isfinite(terms.U).all() and torch.isfinite(terms.V).all()
        assert output_error(W, terms.cut(4).product(), X) <= 1e-4 * output_error(W, torch.zeros_like(W), X)


@pytest.mark.parametrize("factor", [1e-8, 1e-3, 1e4])
def test_the_size_of_the_inputs_changes_no_truncation(factor: float) -> None:
    W, X = layer(6, 10, 4)
    for made in (whitened, eigen_whitened):
        expected = made(W, X @ X.mT).cut(3).product()
        found = made(W, factor**2 * (X @ X.mT)).cut(3).product()
        assert torch.allclose(found @ X, expected @ X, rtol=1e-6, atol=1e-6 * float((W @ X).norm()))
        assert torch.allclose(found, expected, atol=1e-3 * float(W.norm()))
    L = factor_of(factor**2 * (X @ X.mT))
    assert torch.allclose(L @ L.mT, factor**2 * X @ X.mT, atol=1e-8 * factor**2 * float(X.norm()) ** 2)


def test_a_layer_without_any_input_is_factored_all_the_same() -> None:
    nothing = torch.zeros(4, 4, dtype=torch.float64)
    assert torch.equal(factor_of(nothing), torch.eye(4, dtype=torch.float64))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), st.floats(0, 0.99))
def test_the_shares_that_are_removed_have_the_wanted_mean_and_stay_below_their_bound(
    losses: list[float], removed: float
) -> None:
    shares = removed_ratios(losses, removed)
    assert sum(shares) / len(shares) == pytest.approx(removed, abs=1e-9)
    assert all(-1e-12 <= share <= max(MOST_REMOVED, removed) + 1e-9 for share in shares)
    order = sorted(range(len(losses)), key=losses.__getitem__)
    assert all(shares[a] >= shares[b] - 1e-9 for a, b in pairwise(order))


def test_equal_losses_and_no_loss_at_all_give_one_share() -> None:
    assert removed_ratios([5, 5, 5], 0.3) == pytest.approx([0.3] * 3)
    assert removed_ratios([0, 0], 0.3) == [0.3, 0.3]


def test_losses_near_one_neither_explode_nor_change_sign() -> None:
    # At e the printed rule and ours meet.
    assert removed_ratios([math.e, 30], 0.2) == pytest.approx(removed_ratios([math.e * 1e-3, 0.03], 0.2))


@pytest.mark.parametrize(("m", "n"), [(6, 9), (9, 6)])
def test_dobi_projects_outputs_on_the_pooled_directions_of_its_batches(m: int, n: int) -> None:
    W, X = layer(m, n, 60)
    long, short = [X[:, :25], X[:, 25:40], X[:, 40:]], [X[:, at : at + 3] for at in range(0, 60, 3)]
    for batches in (long, short):  # also of fewer tokens than the rank
        for k in range(1, min(m, n) + 1):
            method = Dobi()
            made = method.terms(("l",), W, seen(*batches, inputs=method.inputs(W, k))).cut(k).product()
            assert torch.allclose(made, dense_dobi(W, batches, k), atol=1e-8)


def test_dobi_s_projection_is_idempotent_and_with_one_batch_svd_llm_s() -> None:
    W, X = layer(6, 9, 60)
    method = Dobi()
    terms = method.terms(("l",), W, seen(X, inputs=method.inputs(W, 4)))
    P = terms.product() @ torch.linalg.pinv(W)
    assert torch.allclose(P @ P, P, atol=1e-9)
    for k in range(1, 5):
        assert torch.allclose(terms.cut(k).product() @ X, dense_svd_llm(W, X, k) @ X, atol=1e-8 * float(X.norm()))


def test_the_updated_factor_is_the_least_squares_one() -> None:
    W, X = layer(5, 8, 40)
    V = whitened(W, X @ X.mT).cut(3).V
    _, other = layer(5, 8, 40, "other")
    U = fitted_left(W, V, other @ other.mT)
    assert torch.allclose(U, dense_left(W, V, other), atol=1e-7)
    truncation = whitened(W, X @ X.mT).cut(3).product()
    assert output_error(W, U @ V, other) < output_error(W, truncation, other)


def test_query_key_and_value_are_found_wherever_a_place_has_all_three() -> None:
    shape = Layer(4, 4)
    names = [
        "a.q_proj",
        "a.k_proj",
        "a.v_proj",
        "a.o_proj",
        "b.query",
        "b.key",
        "c.query",
        "c.key",
        "c.value",
        "d.c_attn",
    ]
    assert attention_groups(dict.fromkeys(names, shape)) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        ("c.query", "c.key", "c.value"),
        ("d.c_attn",),
    ]
    with pytest.raises(ModelError, match="query, key and value"):
        QSVD().groups({"a.gate": shape})


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=1, max_size=4), st.floats(0.3, 0.9))
def test_the_best_scores_of_all_groups_are_nested_and_within_the_budget(lists: list[list[float]], ratio: float) -> None:
    scores = {(f"g{i}",): torch.tensor(sorted(found, reverse=True)) for i, found in enumerate(lists)}
    shapes = {group: Layer(18, 6) for group in scores}
    small, large = best_scores(scores, shapes, 0.6 * ratio), best_scores(scores, shapes, ratio)
    assert all(1 <= small[group] <= large[group] <= len(scores[group]) for group in scores)
    budget = ratio * 108 * len(scores)
    assert sum(large.values()) * 24 <= max(budget * (1 + 1e-9), 24 * len(scores))
    if sum(large.values()) < sum(map(len, lists)):
        assert (sum(large.values()) + 1) * 24 > budget
        kept = [float(s) for group, found in scores.items() for s in found[1 : large[group]]]
        left = [float(s) for group, found in scores.items() for s in found[large[group] :]]
        assert not kept or max(left) <= min(kept)


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.lists(st.floats(0, 1), min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    st.floats(0.05, 1),
)
def test_the_best_scores_of_groups_of_unequal_shapes_are_taken_while_their_own_parameters_are_paid_for(
    given_: list[tuple[int, int, list[float]]], ratio: float
) -> None:
    scores = {(f"g{i}",): torch.tensor(sorted(found, reverse=True)) for i, (_, _, found) in enumerate(given_)}
    shapes = {(f"g{i}",): Layer(m, n) for i, (m, n, _) in enumerate(given_)}
    left = ratio * sum(m * n for m, n, _ in given_) * (1 + 1e-12) - sum(m + n for m, n, _ in given_)
    expected = dict.fromkeys(scores, 1)
    further = [(float(score), j, group) for group, all_ in scores.items() for j, score in enumerate(all_) if j]
    for _, _, group in sorted(further, key=lambda found: (-found[0], found[1])):
        left -= shapes[group].d_out + shapes[group].d_in
        if left < 0:
            break
        expected[group] += 1
    assert best_scores(scores, shapes, ratio) == expected


def test_a_wide_layer_pays_more_for_a_term_than_a_narrow_one() -> None:
    scores = {("wide",): torch.tensor([9.0, 8.0, 1.0]), ("narrow",): torch.tensor([7.0, 6.0, 5.0, 4.0])}
    shapes = {("wide",): Layer(30, 30), ("narrow",): Layer(10, 10)}
    # 1,000 parameters in all; the first terms cost 80, then 8 costs 60, and 6, 5, 4 cost 20 each.
    for budget, ranks in ((80, (1, 1)), (139, (1, 1)), (140, (2, 1)), (160, (2, 2)), (199, (2, 3)), (200, (2, 4))):
        assert tuple(best_scores(scores, shapes, budget / 1000).values()) == ranks


@pytest.mark.parametrize("scaling", ["none", "diagonal", "whitened"])
def test_qsvd_scales_the_inputs_of_query_key_and_value_as_told_and_of_other_layers_as_asvd(scaling: str) -> None:
    W, X = layer(9, 6, 40)
    inputs, method = seen(X), QSVD(scaling=scaling)
    made = {
        "none": SVD().terms(("l",), W, inputs),
        "diagonal": ASVD(0.5).terms(("l",), W, inputs),
        "whitened": SVDLLM().terms(("l",), W, inputs),
    }
    products = {name: terms.cut(3).product() for name, terms in made.items()}
    for group in (("a.q_proj", "a.k_proj", "a.v_proj"), ("a.c_attn",)):
        found = method.terms(group, W, inputs).cut(3).product()
        for name, product in products.items():
            assert torch.allclose(found, product, atol=1e-9) == (name == scaling)
    assert torch.allclose(method.terms(("a.o_proj",), W, inputs).cut(3).product(), products["diagonal"], atol=1e-9)


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave remap or learned out"):
        Dobi(learned=True, remap=True)
    with pytest.raises(ConfigError, match="epochs 0"):
        Dobi(epochs=0)
