"""FedSLM: exact averages in a group, the barycentre of unequal ranks, what is fused and taught, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms import FedSLM
from coterie.algorithms.fedslm import State
from coterie.algorithms.fedslm_fusion import Fuse, Groups, fused, trained_cores
from coterie.algorithms.fedslm_students import Form
from coterie.compress.ranked import ranked_svd
from coterie.compress.ranks import rank_of
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import root_key
from coterie.protocol import (
    Card,
    Client,
    Dense,
    Federation,
    Fit,
    Fitted,
    InnerCore,
    Layer,
    LowRank,
    Memory,
    Predict,
    Predictions,
    Server,
    Uploads,
    WeakToStrong,
    Weights,
    copied,
)

KEY = root_key(31)
W = KEY.fold("W").normal((6, 8), dtype=torch.float64)


def card(name: str, k: int | None, examples: int = 10, layers: tuple[str, ...] = ("up_proj",), rank: int = 2) -> Card:
    held = {layer: Layer(6, 8, k) for layer in layers}
    return Card(name, rank, examples, 2.0, held, spec="base" if k is None else f"ratio-{k}")


def factors(k: int, matrix: Tensor = W) -> tuple[Tensor, Tensor]:
    terms = ranked_svd(matrix).cut(k)
    return terms.U, terms.V


def server(phase: str = "main", data: tuple[str, ...] = ("unlabeled",)) -> Server:
    return Server(data, lambda purpose: KEY.fold("server", purpose), 1, phase)


def begun(method: FedSLM, *cards: Card) -> State:
    state = method.start(Federation(cards, 3, ("unlabeled",)), server())
    assert isinstance(state, State)
    return state


def averaged(method: FedSLM, state: State, sent: Mapping[str, tuple[Card, Any, float]]) -> State:
    after = method.aggregate(state, Uploads(dict(sent)), server())
    assert isinstance(after, State)
    return after


def fuse(groups: Groups, base: Mapping[str, Tensor], how: Fuse = "literal") -> dict[str, Tensor]:
    """W_g by layer, with the singular value decomposition of each layer as the compressed models."""
    program, answer = fused(groups, list(base), how), None
    while True:
        try:
            asked = program.send(answer)
        except StopIteration as stop:
            return {name: base[name] + term.W for name, term in stop.value.items()}
        assert isinstance(asked, Weights) and len(asked.names) == 1
        (name,) = asked.names
        rank = 0 if asked.spec is None else int(asked.spec.removeprefix("ratio-"))
        answer = {name: factors(rank, base[name]) if rank else base[name]}


def test_clients_start_with_identities_in_the_layers_that_train_and_nothing_elsewhere() -> None:
    one = card("a", 3, layers=("q_proj", "gate_proj", "up_proj"))
    state = begun(FedSLM(), one)
    sent = FedSLM().send(state, one)
    assert set(sent) == {"gate_proj", "up_proj"} and all(torch.equal(core, torch.eye(3)) for core in sent.values())
    U, V = factors(3)
    assert torch.allclose(InnerCore(sent["up_proj"]).between(U, V), U @ V, atol=1e-12)


def test_layers_of_other_networks_all_train_and_names_choose_some() -> None:
    one = card("a", 3, layers=("x.query", "x.value", "y.query"))
    assert set(trained_cores(one, None)) == set(one.layers)
    assert set(trained_cores(one, ("query",))) == {"x.query", "y.query"}
    assert set(trained_cores(one, ("y.query",))) == {"y.query"}
    for part in ("quarry", "uery"):  # an ending is whole words between dots
        with pytest.raises(ConfigError, match=rf"client a has no compressed layer '{part}'.*query"):
            trained_cores(one, ("query", part))
    with pytest.raises(ConfigError, match="trained: name a layer"):
        trained_cores(one, ())


def test_full_models_of_unequal_ranks_are_sent_what_fits_theirs() -> None:
    few, many = card("a", None, rank=2), card("b", None, rank=4)
    for cards in ((few, many), (many, few)):
        state = begun(FedSLM(), *cards)
        assert state.groups.full["base"]["up_proj"].rank == 4
        sent = {one.id: FedSLM().send(state, one)["up_proj"] for one in cards}
        assert isinstance(sent["a"], LowRank) and isinstance(sent["b"], LowRank)
        assert (sent["a"].rank, sent["b"].rank) == (2, 4) and torch.equal(sent["a"].A, sent["b"].A[:2])


def test_of_full_models_alone_all_layers_are_fused() -> None:
    B, A = KEY.fold("B").normal((6, 2)), KEY.fold("A").normal((2, 8))
    base = {"up_proj": W, "elsewhere": KEY.fold("Q").normal((6, 8), dtype=torch.float64)}
    found = fuse(Groups({}, {"base": {name: LowRank(B, A, 2.0) for name in base}}, {"base": {"b": 3}}), base)
    assert all(torch.allclose(found[name], base[name] + 2.0 * (B @ A).double()) for name in base)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_the_mean_of_cores_in_a_group_is_the_mean_of_the_products(k: int, examples: list[int]) -> None:
    cards = [card(f"c{i}", k, n) for i, n in enumerate(examples)]
    sent = {
        one.id: (one, {"up_proj": KEY.fold("core", one.id).normal((k, k), dtype=torch.float64)}, float(one.examples))
        for one in cards
    }
    state = averaged(FedSLM(), begun(FedSLM(), *cards), sent)
    U, V = factors(k)
    total = sum(examples)
    ideal = torch.stack([n / total * U @ core["up_proj"] @ V for one, core, n in sent.values()]).sum(dim=0)
    made = U @ state.groups.cores[f"ratio-{k}"]["up_proj"] @ V
    assert float((made - ideal).norm() / ideal.norm()) < 1e-12


def test_fedslm_barycentre_diag_4_1_rank_1_and_full() -> None:
    """W = diag(4, 1), groups of rank 1 and of the full model with equal data, no training: W_g = diag(4, 0.5)."""
    base = torch.diag(torch.tensor([4.0, 1.0]))
    one = replace(card("a", 1), layers={"up_proj": Layer(2, 2, 1)})
    two = replace(card("b", None), layers={"up_proj": Layer(2, 2)})
    state = begun(FedSLM(), one, two)
    sent = {one.id: (one, FedSLM().send(state, one), 0.5), two.id: (two, FedSLM().send(state, two), 0.5)}
    after = averaged(FedSLM(), state, sent)
    assert torch.allclose(fuse(after.groups, {"up_proj": base})["up_proj"], torch.diag(torch.tensor([4.0, 0.5])))


@pytest.mark.parametrize("k", [1, 3, 5])
def test_zero_training_of_one_rank_loses_the_tail_of_the_spectrum(k: int) -> None:
    groups = Groups({f"ratio-{k}": {"up_proj": torch.eye(k)}}, {}, {f"ratio-{k}": {"a": 5}})
    lost = float((fuse(groups, {"up_proj": W})["up_proj"] - W).norm())
    assert lost == pytest.approx(float(torch.linalg.svdvals(W)[k:].norm()), rel=1e-6)


def test_every_group_counts_by_the_examples_of_those_who_ever_answered() -> None:
    cards = [card("a", 2, 10), card("b", 2, 30), card("c", 4, 60), card("d", None, 100), card("e", 3, 500)]
    method = FedSLM()
    state = begun(method, *cards)
    for names in (("a", "d"), ("b", "c"), ("a",)):
        sent = {one.id: (one, method.send(state, one), 1.0) for one in cards if one.id in names}
        state = averaged(method, state, sent)
    shares = state.groups.shares()
    assert shares == pytest.approx({"ratio-2": 0.2, "ratio-4": 0.3, "base": 0.5})
    W_g = fuse(state.groups, {"up_proj": W})["up_proj"]
    expected = 0.2 * torch.mm(*factors(2)) + 0.3 * torch.mm(*factors(4)) + 0.5 * W
    assert torch.allclose(W_g, expected, atol=1e-10)


def test_a_group_that_does_not_answer_keeps_its_state() -> None:
    cards, method = [card("a", 2), card("b", 4), card("c", None)], FedSLM()
    state = begun(method, *cards)
    moved = {"up_proj": KEY.fold("moved").normal((2, 2))}
    after = averaged(method, state, {"a": (cards[0], moved, 1.0)})
    assert torch.equal(after.groups.cores["ratio-2"]["up_proj"], moved["up_proj"])
    assert torch.equal(after.groups.cores["ratio-4"]["up_proj"], torch.eye(4))
    assert torch.equal(after.groups.full["base"]["up_proj"].A, state.groups.full["base"]["up_proj"].A)


def test_the_full_group_counts_with_its_adapter_where_others_are_compressed() -> None:
    B, A = KEY.fold("B").normal((6, 2)), KEY.fold("A").normal((2, 8))
    lora = {name: LowRank(B, A, 2.0) for name in ("up_proj", "elsewhere")}
    groups = Groups({"ratio-3": {"up_proj": torch.eye(3)}}, {"base": lora}, {"ratio-3": {"a": 1}, "base": {"b": 3}})

    def weights(names: tuple[str, ...], spec: str | None) -> Any:
        (name,) = names
        return {name: factors(3) if spec == "ratio-3" and name == "up_proj" else W}

    program, answer = fused(groups, ["up_proj", "elsewhere"], "literal"), None
    with pytest.raises(StopIteration) as stop:
        while True:
            asked = program.send(answer)
            answer = weights(asked.names, asked.spec)
    found = stop.value.value
    assert set(found) == {"up_proj"}  # a layer outside S keeps the server's weights
    expected = 0.25 * torch.mm(*factors(3)) + 0.75 * (W + 2.0 * (B @ A).double())
    assert torch.allclose(W + found["up_proj"].W, expected, atol=1e-6)


def test_trained_only_takes_the_servers_weights_for_layers_that_a_group_left_alone() -> None:
    base = {"up_proj": W, "q_proj": KEY.fold("Q").normal((6, 8), dtype=torch.float64)}
    core = KEY.fold("core").normal((3, 3), dtype=torch.float64)
    groups = Groups({"ratio-3": {"up_proj": core}}, {}, {"ratio-3": {"a": 1}})
    literal, kept = fuse(groups, base), fuse(groups, base, "trained_only")
    U, V = factors(3)
    assert torch.allclose(literal["up_proj"], U @ core @ V) and torch.allclose(kept["up_proj"], U @ core @ V)
    assert torch.allclose(kept["q_proj"], base["q_proj"])
    assert torch.allclose(literal["q_proj"], torch.mm(*factors(3, base["q_proj"])))
    assert float((literal["q_proj"] - base["q_proj"]).norm()) > 0.1


def taught(method: FedSLM, logits: Tensor) -> tuple[State, list[Any]]:
    """The state after the elicitation, and what the server asked for beside weights."""
    cards = [card("a", 3), card("b", None)]
    state = begun(method, *cards)
    state = averaged(method, state, {one.id: (one, method.send(state, one), 0.5) for one in cards})
    program, answer = method.aggregate(state, Uploads({}), server("elicitation")), None
    asked: list[Any] = []
    while True:
        try:
            request = program.send(answer)  # type: ignore[union-attr]
        except StopIteration as stop:
            return stop.value, asked
        if isinstance(request, Weights):
            answer = {"up_proj": W.float() if request.spec != "ratio-3" else tuple(f.float() for f in factors(3))}
            continue
        asked.append(request)
        if isinstance(request, Predict):
            answer = Predictions(logits, torch.full((len(logits),), -1))
        else:
            assert isinstance(request, Fit)
            moved = {name: value + len(asked) for name, value in request.initial.parameters.items()}
            answer = Fitted(request.initial.with_parameters(moved), 0.5, 4, 2)


def test_the_fused_model_teaches_students_that_all_start_alike_and_the_first_is_deployed() -> None:
    others: tuple[tuple[Form, float], ...] = (("entropy", 0.5), ("confidence", 0.25))
    method = FedSLM(form="confidence", alpha=0.25, beside=others, epochs=3, student_lr=0.5)
    logits = torch.tensor([[0.0, 1.0, -torch.inf], [2.0, 0.0, 1.0]])
    state, asked = taught(method, logits)
    teacher, *fits = asked
    assert isinstance(teacher, Predict) and teacher.data == "unlabeled"
    expected = 0.5 * torch.mm(*factors(3)) + 0.5 * W - W
    assert torch.allclose(teacher.model["delta"]["up_proj"].W.double(), expected, atol=1e-6)
    assert [(fit.loss.form, fit.loss.alpha) for fit in fits] == [("confidence", 0.25), ("entropy", 0.5)]
    for fit in fits:
        assert isinstance(fit.loss, WeakToStrong) and torch.allclose(fit.loss.targets, logits.softmax(dim=-1))
        assert (fit.data, fit.epochs, fit.head, fit.lr_scale) == ("unlabeled", 3, False, {"lora.*": 0.5})
        assert all(torch.equal(fit.initial.parameters[n], v) for n, v in fits[0].initial.parameters.items())
        assert fit.initial["lora"]["up_proj"].rank == 16 and fit.initial["lora"]["up_proj"].scale == 2.0
    deployed = method.global_model(state)
    assert deployed is not None and deployed["lora"]["up_proj"] is state.students["confidence-0.25"]["up_proj"]
    further = method.further_global_models(state)
    assert list(further) == ["weak", "entropy-0.5"]
    assert torch.equal(further["entropy-0.5"]["lora"]["up_proj"].A, fits[1].initial["lora"]["up_proj"].A + 3)


def test_before_the_elicitation_the_server_has_no_model() -> None:
    state = begun(FedSLM(), card("a", 3))
    assert FedSLM().global_model(state) is None
    phases = FedSLM().phases(4)
    assert [(phase.name, phase.rounds, phase.clients) for phase in phases][1:] == [("elicitation", 1, "none")]


def test_an_upload_at_ratio_0_4_of_a_square_layer_of_1024_is_166464_bytes() -> None:
    k = rank_of("layer", Layer(1024, 1024), 0.4)
    assert k == 204
    layer = Layer(1024, 1024, k)
    assert FedSLM().bytes_up(layer, card("a", k)) == FedSLM().bytes_down(layer, card("a", k)) == 166_464
    assert FedSLM().bytes_up(Layer(1024, 1024), card("b", None, rank=16)) == 16 * 2048 * 4


def test_a_compressed_client_trains_and_sends_cores_alone_and_a_full_one_factors() -> None:
    method, small, whole = FedSLM(), card("a", 3), card("b", None)
    state = begun(method, small, whole)
    for one, pattern in ((small, "core.*"), (whole, "lora.*")):
        client = Client(one, Memory({}, copied), ("train",), lambda purpose: KEY.fold(purpose), 1, "main")
        program = method.local(client, method.send(state, one))
        request = next(program)
        assert request.train == (pattern,)
        with pytest.raises(StopIteration) as stop:
            program.send(Fitted(request.initial, 1.0, 1, 1))
        method.check(stop.value.value.payload, one)
        assert set(stop.value.value.payload) == {"up_proj"}


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"up_proj": torch.eye(4)}, r"client a, layer up_proj: a core \(4, 4\) where \(3, 3\) is expected"),
        ({"up_proj": LowRank(torch.ones(6, 1), torch.ones(1, 8))}, "client a, layer up_proj: a core LowRank where"),
        ({}, "client a: one core for each of 1 compressed layers is expected"),
        ({"up_proj": torch.eye(3), "q_proj": torch.eye(3)}, "client a: one core for each of 1"),
    ],
)
def test_uploads_that_are_no_cores_of_this_client_are_refused(payload: Any, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        FedSLM().check(payload, card("a", 3))


def test_a_server_without_unlabeled_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server_data\.unlabeled"):
        FedSLM().start(Federation((card("a", 3),), 3, ("public/x",)), server(data=("public/x",)))


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 1.5},
        {"alpha": math.nan},
        {"beside": (("entropy", -0.1),)},
        {"epochs": 0},
        {"student_lr": 0},
        {"student_lr": math.inf},
        {"student_alpha": math.nan},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        FedSLM(**options)


def test_the_state_of_a_run_holds_what_is_deployed_and_the_teacher_but_no_factors_of_bases() -> None:
    state, _ = taught(FedSLM(), torch.zeros(2, 2))
    assert isinstance(state.weak["up_proj"], Dense) and list(state.students) == ["entropy-0.5"]
    assert set(state.groups.cores["ratio-3"]["up_proj"].shape) == {3}
