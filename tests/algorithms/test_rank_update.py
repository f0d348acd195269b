"""The rank update: when, by how much, what it keeps, and that each half needs only what it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import dense
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_lowrank import best_rank
from reference.random_factors import bounded, normal, pair, with_spectrum

from algorithms.fixtures import card, uploads
from coterie.algorithms.rank_update import RankUpdate, average_rank, learnt_ranks, ranks_of, truncated
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.maths.keys import root_key
from coterie.protocol import Card, Client, LowRank, Memory, Model, copied

WIDE = {"first": (12, 9), "second": (10, 10)}


def of(spectrum: list[float], m: int = 12, n: int = 9, seed: int = 1) -> LowRank:
    return LowRank(*with_spectrum(seed, m, n, torch.tensor(spectrum, dtype=torch.float64)))


def decaying(share: float) -> Any:
    """Training that ends at singular values 1, share, share^2, ..., so that tau decides the rank."""

    def trained(name: str, model: Model) -> Model:
        lora = {}
        for layer, term in model["lora"].items():
            (m, r), n = term.B.shape, term.A.shape[1]
            B, A = with_spectrum(len(name), m, n, share ** torch.arange(r, dtype=torch.float64))
            lora[layer] = LowRank(B.float(), A.float(), term.scale)
        return Model(lora=lora)

    return trained


@pytest.mark.parametrize(("tau", "rank"), [(0.9, 2), (0.85, 1), (0.9995, 3)])
def test_n13_singular_values_3_1_and_a_tenth(tau: float, rank: int) -> None:
    term = of([3.0, 1.0, 0.1])
    made = RankUpdate(tau=tau).shrunk({"w": term})["w"]
    assert made.rank == rank
    assert float((dense(made) - best_rank(dense(term), rank)[0]).norm()) < 1e-10


def test_the_energy_must_exceed_tau_and_not_only_reach_it() -> None:
    term = LowRank(torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    assert RankUpdate(tau=0.5).shrunk({"w": term})["w"].rank == 3
    assert RankUpdate(tau=0.49).shrunk({"w": term})["w"].rank == 2


def test_no_energy_gives_rank_one_that_can_still_learn() -> None:
    B, A = pair(1, 6, 3, 5)
    made = RankUpdate().shrunk({"w": LowRank(torch.zeros_like(B), A)})["w"]
    assert made.rank == 1 and not made.B.any()
    assert float(made.A.norm()) == pytest.approx(1.0)


def test_what_is_kept_is_balanced_between_the_factors() -> None:
    made = RankUpdate(tau=0.95).shrunk({"w": of([3.0, 2.0, 1.0, 0.1])})["w"]
    S = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(made.B.mT @ made.B, S, rtol=0, atol=1e-10)
    torch.testing.assert_close(made.A @ made.A.mT, S, rtol=0, atol=1e-10)


def test_one_rank_for_all_layers_is_the_largest_that_any_needs_and_per_layer_each_has_its_own() -> None:
    adapter = {"steep": of([3.0, 0.1, 0.1]), "flat": of([1.0, 1.0, 1.0])}
    assert ranks_of(RankUpdate().shrunk(adapter)) == {"steep": 3, "flat": 3}
    assert ranks_of(RankUpdate(per_layer=True).shrunk(adapter)) == {"steep": 1, "flat": 3}


@pytest.mark.parametrize(
    ("every", "wanted"), [(1, [2, 3, 4, 5, 6, 7]), (2, [3, 5, 7]), (3, [4, 7]), (100, []), (None, [])]
)
def test_updates_come_after_every_T_u_rounds_but_not_in_the_first(every: int | None, wanted: list[int]) -> None:
    assert [number for number in range(1, 8) if RankUpdate(every).updates(number)] == wanted
    assert RankUpdate(100).updates(101) and not RankUpdate(100).updates(100)


@bounded
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 999))
def test_truncation_is_the_best_approximation_whether_B_is_orthonormal_or_not(
    r: int, rank: int, orthonormal: bool, seed: int
) -> None:
    B, A = pair(seed, 8, r, 7)
    B = torch.linalg.qr(B).Q if orthonormal else B
    made = truncated({"w": LowRank(B, A)}, {"w": rank})["w"]
    assert made.rank == min(r, rank)
    assert float((dense(made) - best_rank(B @ A, rank)[0]).norm()) < 1e-9 * float((B @ A).norm())


def test_the_svd_of_A_alone_would_not_do_where_B_is_not_orthonormal() -> None:
    """F3: B stretches the direction that is the smaller one in A."""
    B = torch.diag(torch.tensor([0.1, 5.0], dtype=torch.float64))
    A = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))
    made = truncated({"w": LowRank(B, A)}, {"w": 1})["w"]
    torch.testing.assert_close(dense(made), torch.diag(torch.tensor([0.0, 5.0], dtype=torch.float64)))


def test_before_the_first_round_leading_columns_and_rows_are_taken() -> None:
    A = normal(1, 4, 6)
    made = truncated({"w": LowRank(torch.zeros(5, 4, dtype=torch.float64), A)}, {"w": 2})["w"]
    assert torch.equal(made.A, A[:2]) and made.B.shape == (5, 2) and not made.B.any()


def test_a_direction_without_energy_keeps_a_row_that_can_learn() -> None:
    B = torch.linalg.qr(normal(1, 8, 4)).Q
    A = torch.zeros(4, 6, dtype=torch.float64)
    A[0] = 1.0
    made = truncated({"w": LowRank(B, A)}, {"w": 3})["w"]
    torch.testing.assert_close(dense(made), B @ A, rtol=0, atol=1e-12)
    assert float(made.A.norm(dim=1).min()) > 0.99 and not made.B[:, 1:].any()


def client(one: Card, memory: dict[str, Any], number: int) -> Client:
    return Client(one, Memory(memory, copied), ("train",), root_key(0).fold, number, "main")


def test_a_client_starts_from_the_rank_it_kept_and_from_its_cards_in_an_update_round() -> None:
    update, one = RankUpdate(4), card("1", 3)
    assert update.starting_ranks(client(one, {}, 2)) == {"w": 3}
    assert update.starting_ranks(client(one, {"ranks": {"w": 1}}, 2)) == {"w": 1}
    assert update.starting_ranks(client(one, {"ranks": {"w": 1}}, 5)) == {"w": 3}
    assert update.starting_ranks(client(one, {"ranks": {"w": 9}}, 2)) == {"w": 3}  # the card is the upper bound


def test_the_server_learns_ranks_from_shapes_and_sends_the_cards_in_an_update_round() -> None:
    update, one = RankUpdate(4), card("1", 3)
    known = learnt_ranks({"2": {"w": 2}, "1": {"w": 3}}, uploads({"1": LowRank(normal(1, 2, 1), normal(2, 1, 2))}))
    assert known == {"1": {"w": 1}, "2": {"w": 2}}
    assert update.ranks_to_send(one, known, 2) == {"w": 1}
    assert update.ranks_to_send(one, known, 5) == {"w": 3}
    assert update.ranks_to_send(card("9", 2), known, 2) == {"w": 2}


def test_the_average_rank_is_the_mean_over_clients_of_their_mean_over_layers() -> None:
    assert average_rank({"1": {"a": 1, "b": 3}, "2": {"a": 4}}) == 3.0
    assert average_rank({}) == 0.0


@pytest.mark.parametrize("bad", [{"update_every": 0}, {"tau": 0.0}, {"tau": 1.0}])
@pytest.mark.parametrize("method", ["sefora", "sefora-plus", "flexlora-adaptive"])
def test_options_out_of_range_are_told(method: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        algorithm(method, bad)
