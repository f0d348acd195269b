import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import dense_lowrank as dense
from reference.random_factors import bounded, mixtures, normal, pair, with_spectrum

from coterie.maths import lowrank
from coterie.maths.keys import Key
from coterie.maths.lowrank import (
    BestRank,
    balanced,
    best_rank,
    canonical_signs,
    core_svd,
    energy_rank,
    orthonormal_rows_completed,
    stack_factors,
    truncate,
    truncate_energy,
)

T1 = [
    (torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 0.0]])),
    (torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 1.0]])),
]


def product(best: BestRank) -> torch.Tensor:
    return best.B @ best.A


def assert_best(best: BestRank, D: torch.Tensor, rank: int) -> None:
    """`best` is the truncated SVD of D in every field, whatever rank D has."""
    expected, S, tail = dense.best_rank(D, rank)
    scale = 1 + D.norm().item()
    attained = int((S[:rank] > 1e-12 * scale).sum())
    assert best.B.shape == (D.shape[0], rank)
    assert best.A.shape == (rank, D.shape[1])
    torch.testing.assert_close(product(best), expected, rtol=0, atol=1e-10 * scale)
    torch.testing.assert_close(best.singular_values[:attained], S[:attained], rtol=0, atol=1e-10 * scale)
    torch.testing.assert_close(best.tail, tail, rtol=0, atol=1e-10 * scale)
    rows = torch.zeros(rank, rank, dtype=torch.float64)
    rows[:attained, :attained] = torch.eye(attained)
    torch.testing.assert_close(best.A @ best.A.mT, rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(best.B.mT @ best.B, torch.diag(best.singular_values**2), rtol=0, atol=1e-12 * scale**2)
    for beyond in (best.B[:, attained:], best.A[attained:], best.singular_values[attained:]):
        assert not beyond.any()


def test_fixture_T1_at_rank_1_and_2_by_value():
    one = best_rank(T1, [0.75, 0.25], 1)
    torch.testing.assert_close(product(one), torch.tensor([[0.75, 0.0], [0.0, 0.0]]), rtol=0, atol=1e-7)
    assert one.tail.item() == pytest.approx(0.25)
    assert one.singular_values.item() == pytest.approx(0.75)
    two = best_rank(T1, [0.75, 0.25], 2)
    torch.testing.assert_close(product(two), torch.tensor([[0.75, 0.0], [0.0, 0.25]]), rtol=0, atol=1e-7)
    assert two.tail.item() == 0


def test_fixture_T2_with_unequal_ranks_by_value():
    T2 = [T1[0], (torch.eye(2), torch.diag(torch.tensor([3.0, 0.0])))]
    best = best_rank(T2, [0.5, 0.5], 2)
    torch.testing.assert_close(product(best), torch.tensor([[2.0, 0.0], [0.0, 0.0]]), rtol=0, atol=1e-6)
    assert not best.B[:, 1].any()
    assert not best.A[1].any()


@given(mixture=mixtures(), rank=st.integers(0, 12))
@bounded
def test_best_rank_equals_the_dense_truncated_svd(mixture, rank):
    factors, weights = mixture
    assert_best(best_rank(factors, weights, rank), dense.mixture(factors, weights), rank)


@pytest.mark.parametrize(
    ("m", "n", "ranks", "rank"),
    [
        (64, 48, (4, 4, 4), 4),
        (48, 64, (2, 4, 16), 16),
        (20, 15, (8, 8, 8), 8),  # r_tot above both sizes
        (15, 40, (8, 8, 8), 20),  # r_tot above one size, rank above what can be attained
        (1, 7, (3,), 2),
        (7, 1, (3, 1), 1),
    ],
)
def test_best_rank_equals_the_dense_truncated_svd_at_larger_sizes(m, n, ranks, rank):
    factors = [pair(i, m, r, n) for i, r in enumerate(ranks)]
    weights = [1 / len(ranks)] * len(ranks)
    assert_best(best_rank(factors, weights, rank), dense.mixture(factors, weights), rank)


LARGE = [(200, 160, (50, 60, 40), 7), (150, 190, (70, 70), 9), (140, 150, (80, 80), 5), (230, 140, (128,), 32)]


@pytest.mark.parametrize(("m", "n", "ranks", "rank"), LARGE)
def test_few_triples_of_a_large_core_come_from_a_gram_matrix_and_equal_the_dense_truncated_svd(m, n, ranks, rank):
    factors = [pair(i, m, r, n) for i, r in enumerate(ranks)]
    weights = [1 / len(ranks)] * len(ranks)
    assert lowrank._by_gram(stack_factors(factors, weights), rank) is not None
    best = best_rank(factors, weights, rank)
    assert_best(best, dense.mixture(factors, weights), rank)
    _, S, Vh = torch.linalg.svd(dense.mixture(factors, weights))
    assert float((best.A @ Vh[:rank].mT).abs().diagonal().min()) > 1 - 1e-10
    torch.testing.assert_close(best.singular_values, S[:rank], rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "spectrum",
    [
        torch.logspace(0, -12, 8),  # a rank of 8: the tail is nothing, and the last value far below the first
        torch.cat([torch.ones(8), torch.full((130,), 1e-6)]),  # a small tail
        torch.cat([torch.ones(4), torch.full((4,), 1e-7), torch.full((130,), 1e-8)]),
        torch.zeros(8),
    ],
)
def test_where_a_gram_matrix_would_lose_digits_it_is_left_and_none_are_lost(spectrum):
    S = torch.nn.functional.pad(spectrum.double(), (0, 140 - len(spectrum)))
    B, A = with_spectrum(1, 180, 170, S)
    assert lowrank._by_gram((B, A), 8) is None
    best = best_rank([(B, A)], [1.0], 8)
    torch.testing.assert_close(best.singular_values, S[:8], rtol=0, atol=1e-13)
    torch.testing.assert_close(best.tail, torch.linalg.vector_norm(S[8:]), rtol=1e-6, atol=1e-13)
    torch.testing.assert_close(best.B @ best.A, dense.best_rank(B @ A, 8)[0], rtol=0, atol=1e-12)


def test_a_gram_matrix_serves_a_stack_only_where_it_serves_every_member():
    B, A = pair(1, 150, 140, 160, 2)
    both = best_rank([(B, A)], [1.0], 6)
    B = torch.stack([B[0], B[1] * (torch.arange(140) < 6)])
    mixed = best_rank([(B, A)], [1.0], 6)
    for i, expected in enumerate([both, mixed]):
        alone = best_rank([((B if i else B[:1])[i], A[i])], [1.0], 6)
        torch.testing.assert_close(expected.B[i], alone.B, rtol=0, atol=1e-9)
        torch.testing.assert_close(expected.tail[i], alone.tail, rtol=1e-9, atol=1e-9)


def test_a_large_core_that_is_not_finite_raises():
    B, A = pair(1, 150, 140, 160)
    B[3, 3] = float("nan")
    with pytest.raises(torch.linalg.LinAlgError):
        best_rank([(B, A)], [1.0], 6)


def test_dependent_and_cancelling_clients_leave_exact_zeros_beyond_the_rank():
    B, A = pair(1, 30, 3, 20)
    G = normal(9, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)
    twin = (B @ G, torch.linalg.solve(G, A))
    assert_best(best_rank([(B, A), twin], [0.5, 0.5], 5), B @ A, 5)
    shared_B = best_rank([(B, A), (B @ G, normal(4, 3, 20))], [0.5, 0.5], 6)
    assert int((shared_B.singular_values > 0).sum()) == 3
    gone = best_rank([(B, A), (twin[0], -twin[1])], [0.5, 0.5], 2)
    assert not product(gone).any()
    assert gone.tail.item() == 0


def test_what_counts_as_rounding_does_not_depend_on_how_scale_is_split_between_the_factors():
    B, A = with_spectrum(1, 12, 10, torch.tensor([1.0, 1e-6], dtype=torch.float64))
    second = pair(5, 12, 1, 10)
    D = dense.mixture([(B, A), second], [0.5, 0.5])
    skewed = (second[0] * 1e9, second[1] / 1e9)
    assert_best(best_rank([(B, A), skewed], [0.5, 0.5], 3), D, 3)


def test_gauge_of_a_client_changes_nothing():
    factors, weights = [pair(i, 12, 3, 9) for i in range(3)], [0.5, 0.3, 0.2]
    G = normal(9, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)
    turned = [(B @ G, torch.linalg.solve(G, A)) for B, A in factors]
    torch.testing.assert_close(
        product(best_rank(factors, weights, 2)), product(best_rank(turned, weights, 2)), rtol=0, atol=1e-10
    )


@given(mixture=mixtures(), data=st.data())
@bounded
def test_order_of_clients_changes_nothing(mixture, data):
    factors, weights = mixture
    order = data.draw(st.permutations(range(len(factors))))
    a = best_rank(factors, weights, 9)
    b = best_rank([factors[i] for i in order], [weights[i] for i in order], 9)
    torch.testing.assert_close(product(a), product(b), rtol=0, atol=1e-10)
    torch.testing.assert_close(a.singular_values, b.singular_values, rtol=0, atol=1e-10)


def test_one_client_at_full_rank_comes_back_unchanged_and_a_zero_weight_equals_absence():
    B, A = pair(1, 12, 3, 9)
    torch.testing.assert_close(product(best_rank([(B, A)], [1.0], 3)), B @ A, rtol=0, atol=1e-12)
    absent, zero = best_rank([(B, A)], [1.0], 2), best_rank([(B, A), pair(2, 12, 5, 9)], [1.0, 0.0], 2)
    assert torch.equal(absent.B, zero.B)
    assert torch.equal(absent.A, zero.A)
    nobody = best_rank([(B, A)], [0.0], 2)
    assert (nobody.B.shape, nobody.A.shape, nobody.tail.item()) == ((12, 2), (2, 9), 0)
    assert not product(nobody).any()


def test_ranks_are_nested_so_a_client_takes_leading_columns_and_rows():
    factors, weights = [pair(i, 12, 3, 9) for i in range(3)], [0.5, 0.3, 0.2]
    large = best_rank(factors, weights, 6)
    for rank in range(1, 6):
        small = best_rank(factors, weights, rank)
        torch.testing.assert_close(small.B, large.B[:, :rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(small.A, large.A[:rank], rtol=0, atol=1e-12)
        again = truncate(large.B, large.A, rank)
        torch.testing.assert_close(product(again), product(small), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["exact", "randomised"])
def test_leading_axes_equal_a_loop(method):
    batched, shared = pair(1, 12, 4, 9, 2, 3), pair(2, 12, 2, 9)
    batched[0][0, 1] = 0  # one member of the stack has a lower rank
    best = best_rank([batched, shared], [0.7, 0.3], 3, method=method, key=Key(5))
    assert (best.B.shape, best.A.shape, best.tail.shape) == ((2, 3, 12, 3), (2, 3, 3, 9), (2, 3))
    for i in range(2):
        for j in range(3):
            one = best_rank([(batched[0][i, j], batched[1][i, j]), shared], [0.7, 0.3], 3, method=method, key=Key(5))
            torch.testing.assert_close(best.B[i, j], one.B, rtol=0, atol=1e-11)
            torch.testing.assert_close(best.A[i, j], one.A, rtol=0, atol=1e-11)
            torch.testing.assert_close(best.tail[i, j], one.tail, rtol=0, atol=1e-6)


def test_float32_in_float32_out_with_the_accuracy_of_float64_inside():
    factors, weights = [pair(i, 30, 4, 20, dtype=torch.float32) for i in range(3)], [0.5, 0.3, 0.2]
    for method in ("exact", "randomised"):
        best = best_rank(factors, weights, 4, method=method, key=Key(1))
        assert {x.dtype for x in (best.B, best.A, best.singular_values, best.tail)} == {torch.float32}
    expected, _, tail = dense.best_rank(dense.mixture(factors, weights), 4)
    best = best_rank(factors, weights, 4)
    torch.testing.assert_close(product(best).double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    assert best.tail.item() == pytest.approx(tail.item(), rel=1e-7)
    low = best_rank(factors, weights, 4, dtype=torch.float32)
    torch.testing.assert_close(low.B @ low.A, product(best), rtol=0, atol=1e-4)


def test_half_precision_factors_are_decomposed_in_float64_and_cast_back():
    B, A = pair(1, 12, 3, 9, dtype=torch.bfloat16)
    best = truncate(B, A, 2)
    assert best.B.dtype == torch.bfloat16
    assert torch.equal(best.B, truncate(B.double(), A.double(), 2).B.bfloat16())


def test_nothing_carries_a_gradient_and_inputs_are_left_alone():
    B, A = pair(1, 6, 2, 5)
    before = B.clone()
    best = best_rank([(B.requires_grad_(), A)], [1.0], 2)
    assert not best.B.requires_grad
    assert torch.equal(B, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": -1}, "rank -1"),
        ({"rank": 1, "oversample": -1}, "oversample -1"),
        ({"rank": 1, "method": "randomised"}, "give it a key"),
        ({"rank": 1, "method": "fast"}, "no method 'fast'; known: auto, exact, randomised"),
    ],
)
def test_what_cannot_be_approximated_is_refused_with_the_reason(arguments, message):
    with pytest.raises(ValueError, match=message):
        best_rank(T1, [0.5, 0.5], **arguments)


@given(seed=st.integers(0, 10_000), m=st.integers(1, 9), n=st.integers(1, 9), r=st.integers(0, 12))
@bounded
def test_core_svd_is_an_svd_of_the_product_with_canonical_signs(seed, m, n, r):
    B, A = pair(seed, m, r, n)
    U, S, Vh = core_svd(B, A)
    q = min(m, n, r)
    assert (U.shape, S.shape, Vh.shape) == ((m, q), (q,), (q, n))
    torch.testing.assert_close(U * S @ Vh, B @ A, rtol=0, atol=1e-11 * (1 + (B @ A).norm().item()))
    torch.testing.assert_close(U.mT @ U, torch.eye(q, dtype=U.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(Vh @ Vh.mT, torch.eye(q, dtype=U.dtype), rtol=0, atol=1e-12)
    assert (S.diff() <= 0).all()
    for column in U.mT:
        assert column[column.abs().argmax()] > 0


def test_signs_follow_the_largest_entry_of_the_left_vector_and_the_lowest_index_in_a_tie():
    U = torch.tensor([[-1.0, 0.5, -2.0, 0.0], [1.0, -3.0, 1.0, 0.0]])
    Vh = torch.arange(1.0, 9.0).reshape(4, 2)
    new_U, new_Vh = canonical_signs(U, Vh)
    assert torch.equal(new_U, torch.tensor([[1.0, -0.5, 2.0, 0.0], [-1.0, 3.0, -1.0, 0.0]]))
    assert torch.equal(new_Vh, torch.tensor([[-1.0], [-1.0], [-1.0], [1.0]]) * Vh)
    twice = canonical_signs(new_U, new_Vh)
    assert torch.equal(twice[0], new_U)
    stacked = canonical_signs(U.expand(3, 2, 4), Vh.expand(3, 4, 2))
    assert torch.equal(stacked[1][2], new_Vh)


def test_fixture_N13_energy_rank_by_value():
    assert energy_rank(torch.tensor([3.0, 1.0, 0.1]), 0.9) == 2
    assert energy_rank(torch.tensor([3.0, 1.0, 0.1]), 0.85) == 1
    assert energy_rank(torch.tensor([3.0, 1.0]), 0.9) == 2  # 9 of 10 does not exceed 0.9


@given(
    values=st.lists(st.floats(0, 10), max_size=6).map(lambda x: sorted(x, reverse=True)),
    tau=st.floats(0, 1),
)
@bounded
def test_energy_rank_equals_counting(values, tau):
    found = energy_rank(torch.tensor(values, dtype=torch.float64), tau)
    assert found.dtype == torch.int64
    assert found.item() == dense.energy_rank(values, tau)


def test_energy_rank_of_nothing_is_1_and_of_everything_is_all():
    assert energy_rank(torch.zeros(4), 0.9) == 1
    assert energy_rank(torch.zeros(0), 0.9) == 1
    assert energy_rank(torch.ones(4), 1.0) == 4
    assert energy_rank(torch.tensor([[3.0, 1.0, 0.1], [0.0, 0.0, 0.0]]), 0.9).tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"tau is 90\.0"):
        energy_rank(torch.ones(4), 90.0)


def test_truncating_by_energy_keeps_just_enough_of_it():
    S = torch.tensor([3.0, 1.0, 0.1], dtype=torch.float64)
    B, A = with_spectrum(1, 12, 9, S)
    best = truncate_energy(B, A, 0.9)
    assert best.B.shape == (12, 2)
    torch.testing.assert_close(product(best), product(truncate(B, A, 2)), rtol=0, atol=1e-12)
    assert best.tail.item() == pytest.approx(0.1)
    zero = truncate_energy(torch.zeros_like(B), A, 0.9)
    assert (zero.B.shape, zero.A.shape, zero.tail.item()) == ((12, 1), (1, 9), 0)


def test_truncating_a_stack_by_energy_gives_each_member_its_own_rank():
    members = [
        with_spectrum(s, 12, 9, torch.tensor(S, dtype=torch.float64)) for s, S in ((1, [3, 1, 0.1]), (5, [3, 0.1, 0.1]))
    ]
    best = truncate_energy(torch.stack([B for B, _ in members]), torch.stack([A for _, A in members]), 0.9)
    assert best.B.shape == (2, 12, 2)
    for i, (B, A) in enumerate(members):
        alone = truncate_energy(B, A, 0.9)
        torch.testing.assert_close(best.B[i] @ best.A[i], product(alone), rtol=0, atol=1e-12)
        torch.testing.assert_close(best.tail[i], alone.tail, rtol=0, atol=1e-12)
    assert not best.B[1, :, 1].any()


def test_a_balanced_split_keeps_the_product_and_puts_the_root_on_both_sides():
    S = torch.tensor([4.0, 0.25], dtype=torch.float64)
    best = truncate(*with_spectrum(1, 12, 9, S), 3)  # the third column is zero
    B, A = balanced(best)
    torch.testing.assert_close(B @ A, product(best), rtol=0, atol=1e-12)
    gram = torch.diag(torch.tensor([4.0, 0.25, 0.0], dtype=torch.float64))
    torch.testing.assert_close(B.mT @ B, gram, rtol=0, atol=1e-12)
    torch.testing.assert_close(A @ A.mT, gram, rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10_000), n=st.integers(1, 9), data=st.data())
@bounded
def test_completion_adds_orthonormal_rows_and_keeps_the_given_ones_bit_for_bit(seed, n, data):
    r = data.draw(st.integers(0, n))
    rank = data.draw(st.integers(r, n))
    A = torch.linalg.qr(normal(seed, n, r)).Q.mT.contiguous()
    zeroed = data.draw(st.lists(st.integers(0, r - 1), unique=True)) if r else []
    A[zeroed] = 0
    completed = orthonormal_rows_completed(A, rank, Key(seed))
    kept = [i for i in range(r) if i not in zeroed]
    assert completed.shape == (rank, n)
    assert torch.equal(completed[kept], A[kept])
    torch.testing.assert_close(completed @ completed.mT, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12)


def test_completion_leaves_the_product_of_best_rank_alone():
    best = best_rank([pair(1, 8, 1, 6)], [1.0], 4)
    completed = orthonormal_rows_completed(best.A, 4, Key(1))
    torch.testing.assert_close(best.B @ completed, product(best), rtol=0, atol=1e-14)
    assert (completed.norm(dim=1) > 0.9).all()


def test_completion_of_a_stack_equals_a_loop_and_keeps_the_dtype():
    A = torch.linalg.qr(normal(1, 3, 7, 2)).Q.mT.float().contiguous()
    A[1, 0] = 0
    completed = orthonormal_rows_completed(A, 4, Key(1))
    assert completed.dtype == torch.float32
    for i in range(3):
        torch.testing.assert_close(completed[i], orthonormal_rows_completed(A[i], 4, Key(1)))
    with pytest.raises(ValueError, match="cannot complete 2 rows of length 7 to 8"):
        orthonormal_rows_completed(A, 8, Key(1))
