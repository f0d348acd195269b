"""FedPA-LoRA: preservation, alignment, reconstruction, and that the file reads as Algorithm 1."""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance.harness import cards, dense, gap, ideal, play, random_training, server
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.fixtures import T1_WEIGHTS, t1, uploads
from coterie.algorithms import FedPALoRA
from coterie.algorithms.factors import best_rank, initial_factors
from coterie.maths.keys import root_key
from coterie.protocol import Card, Federation, LowRank, Memory, Model, ProductDistance, copied
from coterie.protocol.parties import Client, Layer


def test_algorithm_1_is_readable_in_under_80_lines() -> None:
    assert len(inspect.getsource(FedPALoRA).splitlines()) < 80


def test_t1_reference_is_the_best_rank_one_product() -> None:
    made = best_rank(uploads(t1(), T1_WEIGHTS), 1, scaled=False)["w"]
    assert torch.allclose(made.product(), torch.diag(torch.tensor([0.75, 0.0], dtype=torch.float64)), atol=1e-12)
    assert torch.allclose(made.A @ made.A.mT, torch.eye(1, dtype=torch.float64), atol=1e-12)


def test_clients_start_from_the_first_rows_of_one_initial_pair() -> None:
    members = cards({"a": 1, "b": 2, "c": 4})
    algorithm = FedPALoRA()
    state = algorithm.start(Federation(tuple(members), 1), server(0))
    whole = initial_factors(members[2], state.init_key)
    for member in members:
        own = initial_factors(member, state.init_key)
        for layer, factors in own.items():
            assert torch.equal(factors.A, whole[layer].A[: member.rank])
            assert torch.equal(state.reference[layer].A[: member.rank], factors.A)
            assert float(factors.B.norm()) == 0.0


def test_factors_entering_a_round_are_bitwise_those_that_left_the_last_one() -> None:
    members = cards({"a": 1, "b": 2, "c": 4})
    first = play(FedPALoRA(), members, random_training())
    entered = {}

    def watch(name: str, model: Model) -> Model:
        entered[name] = model
        return random_training(1)(name, model)

    play(FedPALoRA(), members, watch, state=first.state, memories=first.memories, number=2)
    for name, model in entered.items():
        for layer, term in model["lora"].items():
            assert torch.equal(term.B, first.payloads[name][layer].B)
            assert torch.equal(term.A, first.payloads[name][layer].A)


def test_the_first_round_is_regularised_towards_the_zero_product() -> None:
    members = cards({"a": 2, "b": 2})
    algorithm = FedPALoRA(lam=3.0)
    state = algorithm.start(Federation(tuple(members), 1), server(0))
    root = root_key(0)
    client = Client(members[0], Memory({}, copied), ("train",), lambda purpose: root.fold(purpose), 1, "main")
    from coterie.engines.traffic import unwrapped

    fit = next(algorithm.local(client, unwrapped(algorithm.send(state, members[0]))))  # type: ignore[arg-type]
    stacked = Model.stack([random_training()("a", fit.initial)])
    penalty = type(fit.penalties[0]).stack(list(fit.penalties), 0).value(stacked)
    unscaled = sum(float((term.B[0] @ term.A[0]).double().square().sum()) for term in stacked["lora"].values())
    assert abs(float(penalty) - 3.0 / 2 * unscaled) < 1e-5 * unscaled


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))
def test_the_server_step_never_raises_the_regulariser_at_equal_ranks(rank: int, clients: int, seed: int) -> None:
    """Eqs. 58-60: the new reference is nearer to the clients' products, in sum, than any product of that rank."""
    members = [Card(str(i), rank, 1, 1.0, {"w": Layer(8, 6)}) for i in range(clients)]
    first = play(FedPALoRA(), members, random_training(seed))
    second = play(FedPALoRA(), members, random_training(seed + 1), state=first.state, memories=first.memories, number=2)
    products = [dense(model["lora"]["w"]) for model in second.fitted.values()]
    old, new = dense(first.state.reference["w"]), dense(second.state.reference["w"])

    def regulariser(reference: torch.Tensor) -> float:
        return sum(float((product - reference).square().sum()) for product in products)

    assert regulariser(new) <= regulariser(old) * (1 + 1e-9)


def test_reference_ranks_cut_what_each_client_downloads() -> None:
    members = [
        Card(name, 4, 1, 1.0, {"w": Layer(8, 6)}, reference_rank=rank) for name, rank in (("a", 1), ("b", 2), ("c", 3))
    ]
    outcome = play(FedPALoRA(), members, random_training())
    assert outcome.state.reference["w"].rank == 3
    for member in members:
        sent = FedPALoRA().send(outcome.state, member).reference["w"]
        assert sent.rank == member.reference_rank
        U, S, Vh = torch.linalg.svd(ideal(outcome, {m.id: 1.0 for m in members})["w"])
        r = sent.rank
        assert torch.allclose(dense(sent), U[:, :r] @ torch.diag(S[:r]) @ Vh[:r], atol=1e-5)


def test_truncation_delta_is_the_tail_beyond_the_smallest_reference() -> None:
    members = [Card(name, 4, 1, 1.0, {"w": Layer(8, 6)}, reference_rank=rank) for name, rank in (("a", 1), ("b", 3))]
    outcome = play(FedPALoRA(), members, random_training())
    S = torch.linalg.svdvals(dense(outcome.state.reference["w"]))
    delta = FedPALoRA().measures(outcome.state, Federation(tuple(members), 1), {})["truncation_delta"]
    assert abs(delta - float(S[1:].square().sum().sqrt())) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "oversample"), [({"a": 2, "b": 2}, 2), ({"a": 1, "b": 4}, 1), ({"a": 1, "b": 1, "c": 2}, 2)]
)
def test_randomised_reconstruction_with_room_to_spare_equals_the_exact_one(
    ranks: dict[str, int], oversample: int
) -> None:
    assert max(ranks.values()) + oversample >= sum(ranks.values())  # r_tot directions are all that there are
    exact = play(FedPALoRA(), cards(ranks), random_training())
    drawn = play(FedPALoRA(reconstruction="randomised", oversample=oversample), cards(ranks), random_training())
    made, wanted = (
        {layer: dense(term) for layer, term in outcome.state.reference.items()} for outcome in (drawn, exact)
    )
    assert gap(made, wanted) < 1e-5


def test_randomised_reconstruction_without_oversampling_is_worse_than_the_exact_one() -> None:
    ranks = {"a": 2, "b": 2}
    exact = play(FedPALoRA(), cards(ranks), random_training())
    drawn = play(FedPALoRA(reconstruction="randomised", oversample=0), cards(ranks), random_training())
    for layer, matrix in ideal(exact, dict.fromkeys(ranks, 1.0)).items():
        errors = [float((dense(one.state.reference[layer]) - matrix).norm()) for one in (exact, drawn)]
        assert errors[0] * 1.01 < errors[1] < float(matrix.norm())


def test_the_penalty_gradient_is_the_one_written_out_in_the_specification() -> None:
    key = root_key(1)
    B, A = (
        key.fold("B").normal((6, 2), dtype=torch.float64),
        key.fold("A").normal((2, 5), dtype=torch.float64),
    )
    Bg, Ag = (
        key.fold("Bg").normal((6, 3), dtype=torch.float64),
        key.fold("Ag").normal((3, 5), dtype=torch.float64),
    )
    B.requires_grad_(True)
    A.requires_grad_(True)
    lam = 0.7
    align = ProductDistance.stack([ProductDistance({"w": LowRank(Bg, Ag)}, lam / 2)], 0)
    align.value(Model(lora={"w": LowRank(B[None], A[None])})).sum().backward()
    with torch.no_grad():
        assert torch.allclose(B.grad, lam * (B @ (A @ A.T) - Bg @ (Ag @ A.T)), atol=1e-12)
        assert torch.allclose(A.grad, lam * ((B.T @ B) @ A - (B.T @ Bg) @ Ag), atol=1e-12)
