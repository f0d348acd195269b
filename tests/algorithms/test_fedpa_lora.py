"""FedPA-LoRA: preservation, alignment, reconstruction, and that the file reads as Algorithm 1."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from conformance.harness import best, cards, dense, gap, ideal, play, random_training, server
from engines.world import FAST, with_sites, world
from engines.world import play as play_run
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.fixtures import T1_WEIGHTS, t1, uploads
from coterie.algorithms import FedPALoRA
from coterie.algorithms.factors import best_rank, cut_for, initial_factors
from coterie.algorithms.fedpa_lora import State
from coterie.engines.sites import Volatile, load_record
from coterie.engines.traffic import unwrapped
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm as algorithm_of
from coterie.maths.keys import root_key
from coterie.protocol import Card, Evaluate, Federation, LowRank, Memory, Model, ProductDistance, Uploads, copied
from coterie.protocol.messages import Uploaded
from coterie.protocol.parties import Client, Layer
from coterie.training.asks import Ask


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
    client = Client(members[0], Memory({}, copied), ("train",), root.fold, 1, "main")
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


REFERENCES = {"a": (2, 1), "b": (3, 4)}
"""r_i and R_i of two clients: R_a < r_a < R_g = 4, and more than any client trains."""


def with_references() -> list[Card]:
    layers = {"w": Layer(8, 6)}
    return [Card(name, rank, 1, 2.0, layers, reference_rank=down) for name, (rank, down) in REFERENCES.items()]


def test_reference_preserved_factors_and_global_adapter_are_three_models() -> None:
    """Of a client with R_i < r_i < R_g: the best rank-R_i product, its own factors, the best rank-R_g product."""
    members, algorithm = with_references(), FedPALoRA()
    outcome = play(algorithm, members, random_training())
    U, S, Vh = torch.linalg.svd(ideal(outcome, {"a": 1.0, "b": 1.0})["w"])
    download = unwrapped(algorithm.send(outcome.state, members[0]))
    root = root_key(0)
    memory = Memory(outcome.memories["a"], copied, read_only=True)
    client = Client(members[0], memory, ("train",), root.fold, 2, "main")
    site, whole = (
        algorithm.site_model(client, download)["lora"]["w"],
        algorithm.global_model(outcome.state)["lora"]["w"],
    )
    (further,) = algorithm.further_models(client, download).items()
    assert site.rank == 1 and torch.allclose(dense(site), U[:, :1] @ torch.diag(S[:1]) @ Vh[:1], atol=1e-5)
    assert whole.rank == 4 and torch.allclose(dense(whole), U[:, :4] @ torch.diag(S[:4]) @ Vh[:4], atol=1e-5)
    assert further[0] == "preserved"
    for part, value in further[1]["lora"]["w"].parameters.items():
        assert torch.equal(value, outcome.payloads["a"]["w"].parameters[part])


def test_a_client_that_never_trained_has_preserved_the_initial_pair() -> None:
    members, algorithm = with_references(), FedPALoRA()
    state = algorithm.start(Federation(tuple(members), 1), server(0))
    root = root_key(0)
    client = Client(members[1], Memory({}, copied, read_only=True), (), root.fold, 1, "main")
    preserved = algorithm.further_models(client, unwrapped(algorithm.send(state, members[1])))["preserved"]["lora"]["w"]
    assert preserved.rank == 3 and torch.equal(preserved.A, state.reference["w"].A[:3])


def test_the_global_model_has_rank_R_g_from_the_start() -> None:
    for ranks, R_g in (({"a": (4, 1), "b": (2, 2)}, 2), ({"a": (1, 3), "b": (2, 2)}, 3)):
        layers = {"w": Layer(8, 6)}
        members = [Card(name, r, 1, 2.0, layers, reference_rank=R) for name, (r, R) in ranks.items()]
        before = FedPALoRA().start(Federation(tuple(members), 1), server(0))
        after = play(FedPALoRA(), members, random_training()).state
        assert [FedPALoRA().global_model(state)["lora"]["w"].rank for state in (before, after)] == [R_g, R_g]


@pytest.mark.parametrize("R", [1, 2, 4, 8])
def test_one_reference_rank_for_all_sets_the_download_and_leaves_the_upload(R: int) -> None:
    """Section 5.4.3: R in {1, 2, 4, 8} with r = 4 and three clients."""
    layers = {"w": Layer(16, 12)}
    members = [Card(name, 4, 1, 2.0, layers, reference_rank=R) for name in "abc"]
    algorithm = FedPALoRA()
    outcome = play(algorithm, members, random_training())
    for member in members:
        assert outcome.downloads[member.id].reference["w"].rank == R
        assert outcome.fitted[member.id]["lora"]["w"].rank == 4
        assert algorithm.bytes_down(layers["w"], member) == R * 28 * 4
        assert algorithm.bytes_up(layers["w"], member) == 4 * 28 * 4
    wanted = best(ideal(outcome, dict.fromkeys("abc", 1.0)), R)
    assert gap({"w": dense(outcome.state.reference["w"])}, wanted) < 2e-6


def slow_spectrum(clients: int, rank: int) -> Uploads:
    """Clients whose products sum to a matrix whose clients * rank singular values fall slowly, by 0.95 each."""
    count, layers = clients * rank, {"w": Layer(40, 30)}
    Q = torch.linalg.qr(root_key(5).normal((40, count)).double()).Q * 0.95 ** torch.arange(count)
    P = torch.linalg.qr(root_key(6).normal((30, count)).double()).Q
    entries = []
    for i in range(clients):
        mine = slice(i, None, clients)
        entries.append(Uploaded(Card(str(i), rank, 1, 1.0, layers), {"w": LowRank(Q[:, mine], P[:, mine].mT)}, 1.0))
    return Uploads(entries)


def reconstructed(algorithm: FedPALoRA, sent: Uploads, number: int) -> LowRank:
    state = State({"w": LowRank(torch.zeros(40, 4), torch.zeros(4, 30))}, root_key(0), 4)
    made: LowRank = algorithm.aggregate(state, sent, server(number)).reference["w"]
    return made


def test_randomised_reconstruction_loses_less_with_each_column_more_and_nothing_from_the_whole_rank_on() -> None:
    """N = 3, r = R_g = 4 as in Appendix G.1.4, p = 0 .. 10: r_tot = 12, so that p = 8 is the exact form.

    A slow spectrum, since of an exactly flat one every sampled direction is as good as any other. Excess errors are
    means over forty test matrices.
    """
    sent = slow_spectrum(3, 4)
    whole = sum(weight * dense(payload["w"]) for _, payload, weight in sent.items())
    exact = dense(reconstructed(FedPALoRA(), sent, 1))
    least = float((exact - whole).norm())
    excess = []
    for p in range(11):
        drawn = FedPALoRA(reconstruction="randomised", oversample=p)
        made = [dense(reconstructed(drawn, sent, number)) for number in range(1, 41)]
        excess.append(sum(float((one - whole).norm()) / least - 1 for one in made) / len(made))
        if p >= 8:
            assert all(torch.allclose(one, exact, atol=1e-12) for one in made)
    assert excess[0] > 0.01
    assert all(later < 0.95 * earlier for earlier, later in pairwise(excess[:8]))
    assert max(excess[8:]) < 1e-12


def test_the_sketch_is_drawn_anew_in_every_round_and_is_the_same_when_asked_again() -> None:
    algorithm = FedPALoRA(reconstruction="randomised", oversample=0)
    made = [reconstructed(algorithm, slow_spectrum(3, 4), number) for number in (1, 1, 2)]
    assert torch.equal(made[0].B, made[1].B) and not torch.allclose(dense(made[0]), dense(made[2]), atol=1e-3)


def test_sweeps_are_options_and_bad_values_are_told() -> None:
    for lam in (0.01, 0.1, 1, 2, 5, 10):
        assert algorithm_of("fedpa-lora", {"lam": lam}) == FedPALoRA(lam=float(lam))
    for p in range(11):
        chosen = algorithm_of("fedpa-lora", {"reconstruction": "randomised", "oversample": p})
        assert chosen == FedPALoRA(reconstruction="randomised", oversample=p)
    with pytest.raises(ConfigError, match=r"oversample \(-1\) must not be negative"):
        algorithm_of("fedpa-lora", {"oversample": -1})
    with pytest.raises(ConfigError, match="reconstruction"):
        algorithm_of("fedpa-lora", {"reconstruction": "random"})


def test_a_run_measures_the_reference_the_preserved_factors_and_the_global_adapter() -> None:
    """Each is scored on the pooled test; the scores are those of the models that they are said to be of."""
    store = Volatile()
    run = world(FedPALoRA(), ranks=(2, 4, 4), store=store, train=replace(FAST, optimizer="adamw", lr=1e-2, steps=10))
    downs = {"c0": 1, "c1": 5, "c2": 2}
    sites = {
        name: replace(one, card=replace(one.card, reference_rank=downs[name]))
        for name, one in run.setting.sites.items()
    }
    run = with_sites(run, sites)
    last = play_run(run)[-1]
    state, head, whole = last.progress.state, last.progress.heads["base/all"], run.setting.pooled_test

    def loss(model: Model) -> float:
        ask = Ask("a", Evaluate(model, "test"), "base", head, whole, root_key(0))
        return float(run.executor.answer([ask])[0].answer.loss)  # type: ignore[union-attr]

    references = [Model(lora=cut_for(state.reference, run.cards[name], down)) for name, down in downs.items()]
    preserved = [Model(lora=load_record(store, name).memory["factors"]) for name in downs]
    expected = [sum(map(loss, models)) / 3 for models in (references, preserved)] + [loss(Model(lora=state.reference))]
    personal, shared = last.metrics["personal"], last.metrics["global"]
    found = [personal["pooled"], personal["further"]["preserved"]["pooled"], shared["pooled"]]
    assert [one["loss"] for one in found] == pytest.approx(expected, rel=1e-6)
    assert {term.rank for term in state.reference.values()} == {5}
    assert min(abs(a - b) for a, b in combinations(expected, 2)) > 1e-3
