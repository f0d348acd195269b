"""FSLoRA: fixture N27, one unbiased sketch for both factors, changes that are not divided, FedIT at k = r."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import cards, deployed, gap, play, random_training

from algorithms.fixtures import card, term
from coterie.algorithms import FedIT, FSLoRA
from coterie.algorithms.fslora import sketched
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import LowRank, Model
from coterie.protocol.messages import leaves

IDENTITY = term([[1, 0], [0, 1]], [[1, 0], [0, 1]])


def test_b_s_a_is_two_e_j_e_j_and_the_identity_in_the_mean() -> None:
    found = [sketched(IDENTITY, [j], 1.0).product() for j in (0, 1)]
    for j, product in enumerate(found):
        expected = torch.zeros(2, 2, dtype=torch.float64)
        expected[j, j] = 2
        assert torch.equal(product, expected)
    assert torch.equal(sum(found) / 2, torch.eye(2, dtype=torch.float64))


def test_the_gradient_by_b_is_s_times_dl_dw_times_a_s() -> None:
    key = root_key(2)
    B, A = key.fold("B").normal((5, 4), dtype=torch.float64), key.fold("A").normal((4, 6), dtype=torch.float64)
    G, chosen, s = key.fold("G").normal((5, 6), dtype=torch.float64), [0, 3], 0.5
    S = torch.diag(torch.tensor([2.0, 0, 0, 2.0], dtype=torch.float64))
    own = sketched(LowRank(B, A, s), chosen, s)
    factors = [own.B.requires_grad_(), own.A.requires_grad_()]
    dB, dA = torch.autograd.grad((G * LowRank(*factors, own.scale).product()).sum(), factors)
    assert torch.allclose(dB, (s * G @ A.T @ S)[:, chosen], atol=1e-12)
    assert torch.allclose(dA, (s * S @ B.T @ G)[chosen], atol=1e-12)


def test_one_set_serves_both_factors_and_all_layers_and_changes_with_client_and_round() -> None:
    method, members = FSLoRA(rank=8), cards({"a": 2, "b": 2, "c": 2})
    outcome = play(method, members, random_training())
    sets = {}
    for state in (outcome.before, outcome.state):
        for member in members:
            chosen = state.selected(member)
            sets[state.round, member.id] = tuple(chosen)
            for name, sent in method.send(state, member).items():
                assert torch.equal(sent.A, state.lora[name].A[chosen])
                assert torch.equal(sent.B, state.lora[name].B[:, chosen])
                assert sent.scale == 2.0 * 8 / 2
    assert len(set(sets.values())) > 3


def test_what_nobody_picked_stays_to_the_bit_and_a_change_is_not_divided_by_who_made_it() -> None:
    method, members = FSLoRA(rank=6), cards({"a": 2, "b": 3})
    start = play(method, members, random_training()).state
    weights = {"a": 0.25, "b": 0.75}
    outcome = play(method, members, random_training(1), weights=weights, state=start, number=2)
    sets = {member.id: start.selected(member) for member in members}
    for name, before in start.lora.items():
        after, fitted = outcome.state.lora[name], {who: outcome.fitted[who]["lora"][name] for who in sets}
        for j in range(6):
            change = torch.zeros(before.A.shape[1], dtype=torch.float64)
            for who, chosen in sets.items():
                if j in chosen:
                    change += weights[who] * (fitted[who].A[chosen.index(j)].double() - before.A[j].double())
            if not any(j in chosen for chosen in sets.values()):
                assert torch.equal(after.A[j], before.A[j]) and torch.equal(after.B[:, j], before.B[:, j])
            assert torch.allclose(after.A[j].double(), before.A[j].double() + change, atol=1e-6)
    assert set(range(6)) - set(sets["a"]) - set(sets["b"])


def test_with_k_equal_to_r_it_is_fedit_with_uniform_weights() -> None:
    members = cards({"a": 3, "b": 3, "c": 3})
    state = {FSLoRA: None, FedIT: None}
    for number in (1, 2):
        made = {}
        for kind in state:
            outcome = play(kind(), members, random_training(number), state=state[kind], number=number)
            state[kind], made[kind] = outcome.state, deployed(kind(), outcome)
        assert gap(made[FSLoRA], made[FedIT]) < 2e-6


def test_unequal_scales_leave_the_global_pair_in_one_and_travel_in_the_client_s_own() -> None:
    method, members = FSLoRA(rank=4), cards({"a": 2, "b": 2}, scale={"a": 1.0, "b": 4.0})
    first = play(method, members, random_training())
    for member in members:
        chosen = first.state.selected(member)
        for name, sent in method.send(first.state, member).items():
            whole = first.state.lora[name].directions(chosen)
            assert torch.allclose(sent.product(), 2 * whole.product(), atol=1e-5)
            assert sent.scale == member.scale * 2
    idle = play(method, members, lambda name, model: model, state=first.state, number=2)
    assert gap(deployed(method, idle), deployed(method, first)) < 1e-6


def test_a_federation_may_have_a_global_rank_above_all_clients_or_below_some() -> None:
    for rank, kept in ((16, (2, 4)), (3, (2, 3))):
        outcome = play(FSLoRA(rank=rank), cards({"a": 2, "b": 4}), random_training())
        assert {term.rank for term in outcome.state.lora.values()} == {rank}
        assert tuple(outcome.fitted[who]["lora"]["first"].rank for who in "ab") == kept
    with pytest.raises(ValueError, match="rank must be 1 at least"):
        FSLoRA(rank=0)


def test_no_index_and_no_seed_travels() -> None:
    outcome = play(FSLoRA(rank=8), cards({"a": 2, "b": 4}), random_training())
    for content in (outcome.bodies["a"], outcome.payloads["a"]):
        assert {path.rpartition(".")[2] for path, _ in leaves(content)} == {"A", "B", "scale", "diagonal"}


def test_an_upload_of_another_rank_is_refused() -> None:
    one = card("1", 2)
    with pytest.raises(ModelError, match="client 1, layer w: rank 1 where 2 is expected"):
        FSLoRA().check({"w": term([[1], [0]], [[1, 0]])}, one)


def test_a_site_is_evaluated_with_its_sketch_and_the_server_without_any() -> None:
    method, members = FSLoRA(rank=8), cards({"a": 2, "b": 2})
    state = play(method, members, random_training()).state
    assert isinstance(method.global_model(state), Model)
    assert method.global_model(state)["lora"]["first"].rank == 8
    assert method.site_model(None, method.send(state, members[0]))["lora"]["first"].rank == 2  # type: ignore[arg-type]
