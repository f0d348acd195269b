"""FedSLM: what is sent, trained and booked, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedslm_worlds import KEY, begun, card, factors, server
from coterie.algorithms import FedSLM
from coterie.compress.ranks import rank_of
from coterie.errors import ConfigError, ModelError
from coterie.protocol import (
    Client,
    Federation,
    Fitted,
    InnerCore,
    Layer,
    LowRank,
    Memory,
    copied,
)


def test_clients_start_with_identities_in_the_layers_that_train_and_nothing_elsewhere() -> None:
    one = card("a", 3, layers=("q_proj", "gate_proj", "up_proj"))
    state = begun(FedSLM(), one)
    sent = FedSLM().send(state, one)
    assert set(sent) == {"gate_proj", "up_proj"} and all(torch.equal(core, torch.eye(3)) for core in sent.values())
    U, V = factors(3)
    assert torch.allclose(InnerCore(sent["up_proj"]).between(U, V), U @ V, atol=1e-12)


def test_full_models_of_unequal_ranks_are_sent_what_fits_theirs() -> None:
    few, many = card("a", None, rank=2), card("b", None, rank=4)
    for cards in ((few, many), (many, few)):
        state = begun(FedSLM(), *cards)
        assert state.groups.full["base"]["up_proj"].rank == 4
        sent = {one.id: FedSLM().send(state, one)["up_proj"] for one in cards}
        assert isinstance(sent["a"], LowRank) and isinstance(sent["b"], LowRank)
        assert (sent["a"].rank, sent["b"].rank) == (2, 4) and torch.equal(sent["a"].A, sent["b"].A[:2])


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
