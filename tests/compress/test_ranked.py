"""Ranked lists: slices are truncations, errors at every rank, ranks from ratios."""

from __future__ import annotations

import math

import pytest
import torch
from compress.worlds import KEY, layer, seen
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_compress import output_error, truncated

from coterie.compress import METHODS, Ranked
from coterie.compress.ranked import OutputLoss, order_of, ranked_svd
from coterie.compress.ranks import check_ratio, parameters, rank_of
from coterie.errors import ConfigError, ModelError
from coterie.protocol import Layer

sizes = st.integers(2, 12)


@given(sizes, sizes, st.integers(0, 10**6))
def test_every_slice_of_an_svd_is_the_truncation_at_that_rank(m: int, n: int, seed: int) -> None:
    W, _ = layer(m, n, 4, seed)
    terms = ranked_svd(W)
    for k in range(1, min(m, n) + 1):
        assert torch.allclose(terms.cut(k).product(), truncated(W, k), atol=1e-10)
        assert terms.tail(k) == pytest.approx(float(torch.linalg.matrix_norm(W - terms.cut(k).product())), abs=1e-10)


@pytest.mark.parametrize("name", ["svd", "asvd", "svd-llm", "svd-llm-v2"])
def test_a_list_made_for_a_small_rank_is_the_beginning_of_one_made_for_a_large_rank(name: str) -> None:
    W, X = layer(7, 10, 40)
    method = METHODS[name]()
    whole = method.terms(("l",), W, seen(X, inputs=method.inputs(W, 7)))
    for k in range(1, 8):
        own = method.terms(("l",), W, seen(X, inputs=method.inputs(W, k))).cut(k)
        assert torch.equal(own.U, whole.U[:, :k]) and torch.equal(own.V, whole.V[:k])


@pytest.mark.parametrize("name", ["svd", "asvd", "svd-llm"])
def test_projectors_on_nested_slices_absorb_each_other(name: str) -> None:
    W, X = layer(7, 10, 40)
    method = METHODS[name]()
    terms = method.terms(("l",), W, seen(X))

    def projector(basis: torch.Tensor) -> torch.Tensor:
        Q = torch.linalg.qr(basis).Q
        return Q @ Q.mT

    few, many = terms.cut(3), terms.cut(5)
    for small, large in ((few.U, many.U), (few.V.mT, many.V.mT)):
        P, whole = projector(small), projector(large)
        assert torch.allclose(P @ whole, P, atol=1e-9) and torch.allclose(whole @ P, P, atol=1e-9)
        assert not torch.allclose(P, whole, atol=0.1)


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize(("m", "n"), [(6, 9), (9, 6)])
def test_all_terms_together_are_the_weight(name: str, m: int, n: int) -> None:
    W, X = layer(m, n, 40)
    method = METHODS[name]()
    terms = method.terms(("layer.q",), W, seen(X, inputs=method.inputs(W, min(m, n))))
    assert len(terms) == min(m, n) and (terms.scores.diff() <= 1e-12).all()
    assert torch.allclose(terms.product(), W, atol=1e-9)


@given(sizes, sizes, st.integers(0, 10**6), st.booleans())
def test_errors_at_every_rank_are_those_of_dense_products_in_any_order(
    m: int, n: int, seed: int, orthogonal: bool
) -> None:
    W, X = layer(m, n, 30, seed)
    terms = ranked_svd(W)
    if not orthogonal:
        terms = Ranked(terms.U + 0.1 * layer(m, n, 4, seed + 1)[0][:, :1], terms.V, terms.scores)
    lost = OutputLoss.of(W, terms.U, terms.V, X @ X.mT)
    whole = output_error(W, torch.zeros_like(W), X)
    scores = KEY.fold("scores", seed).normal((len(terms),), dtype=torch.float64)
    for found, made in ((lost.errors(), terms), (lost.errors(order_of(scores)), terms.by(scores))):
        assert len(found) == len(terms) + 1
        for k in range(len(terms) + 1):
            expected = output_error(W, made.U[:, :k] @ made.V[:k], X)
            assert float(found[k]) == pytest.approx(expected, rel=1e-6, abs=1e-6 * whole)


def test_other_scores_put_terms_in_another_order_and_change_nothing_else() -> None:
    terms = Ranked(
        torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([3.0, 2.0, 1.0])
    )
    other = terms.by(torch.tensor([1.0, 5.0, 1.0]))
    assert other.U.tolist() == [[2, 1, 3]] and other.V.flatten().tolist() == [10, 1, 100]
    assert other.scores.tolist() == [5, 1, 1] and torch.equal(other.product(), terms.product())


@pytest.mark.parametrize("rank", [0, -1, 4])
def test_a_slice_of_no_terms_or_of_more_than_there_are_is_refused(rank: int) -> None:
    terms = ranked_svd(torch.eye(3, dtype=torch.float64))
    with pytest.raises(ModelError, match=f"rank {rank} of a list of 3"):
        terms.cut(rank)


@pytest.mark.parametrize(
    ("m", "n", "ratio", "rank"), [(1024, 1024, 0.4, 204), (4096, 11008, 0.8, 2388), (2, 2, 1.0, 1), (64, 64, 0.5, 16)]
)
def test_the_rank_is_the_parameters_kept_over_those_of_a_term(m: int, n: int, ratio: float, rank: int) -> None:
    assert rank_of("l", Layer(m, n), ratio) == rank


@given(st.integers(1, 400), st.integers(1, 400), st.floats(0.05, 1))
def test_what_is_kept_is_within_the_ratio_and_one_more_term_is_not(m: int, n: int, ratio: float) -> None:
    shape = Layer(m, n)
    try:
        k = rank_of("l", shape, ratio)
    except ModelError:
        assert parameters(shape, 1) > ratio * m * n
        return
    assert parameters(shape, k) <= ratio * m * n * (1 + 1e-9)
    assert k == min(m, n) or parameters(shape, k + 1) > ratio * m * n * (1 - 1e-9)


def test_remapped_ranks_are_a_share_of_the_smaller_side() -> None:
    assert rank_of("l", Layer(4096, 11008), 0.4, remap=True) == math.floor(0.4 * 4096)
    assert rank_of("l", Layer(8, 32), 1.0, remap=True) == 8


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0001, float("nan")])
def test_a_ratio_outside_its_range_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="share of parameters to keep"):
        check_ratio(ratio)


def test_a_rank_below_one_is_refused_with_the_least_ratio() -> None:
    with pytest.raises(ModelError, match=r"layer a\.b \(4 x 4\) .* take at least 0\.5, or leave") as caught:
        rank_of("a.b", Layer(4, 4), 0.4)
    assert "\n" not in str(caught.value)
    assert rank_of("a.b", Layer(4, 4), 0.5) == 1
