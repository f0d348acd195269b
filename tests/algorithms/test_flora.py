"""FLoRA: fixture N4, exactness whatever the ranks, a base that grows round by round, what it costs."""

from __future__ import annotations

import torch
from conformance.harness import best, cards, gap, ideal, play, random_training
from engines.world import base as small_base
from engines.world import dense, world
from engines.world import play as run_all

from algorithms.fixtures import T1_WEIGHTS, t1, t2, uploads
from coterie.algorithms import FedPALoRA, FlexLoRA, FLoRA
from coterie.algorithms.factors import stack_weighted
from coterie.protocol import Layer, Model, as_adapters

FULL = {"a": 1, "b": 2, "c": 4}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def patched(state: object, since: int = 0) -> dict[str, torch.Tensor]:
    """What the log adds to the base, in fp64."""
    total: dict[str, torch.Tensor] = {}
    for adapter in as_adapters(state.base.since(since)):  # type: ignore[attr-defined]
        for name, product in dense(Model(lora=adapter)).items():
            total[name] = total.get(name, torch.zeros_like(product)) + product
    return total


def test_t1_stacks_to_the_mean_product_with_the_weight_on_one_factor_only() -> None:
    stack = stack_weighted(uploads(t1(), T1_WEIGHTS))["w"]
    assert torch.equal(stack.A, torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64)))
    assert torch.equal(stack.B, torch.eye(2, dtype=torch.float64))
    assert torch.equal(stack.product(), torch.diag(torch.tensor([0.75, 0.25], dtype=torch.float64)))


def test_t2_stacks_unequal_ranks_exactly() -> None:
    stack = stack_weighted(uploads(t2()))["w"]
    assert stack.rank == 3
    assert torch.allclose(stack.product(), torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64)), atol=1e-15)


def test_permuting_clients_leaves_the_product_unchanged() -> None:
    one, two = t1()["1"], t1()["2"]
    first = stack_weighted(uploads({"1": one, "2": two}, {"1": 0.75, "2": 0.25}))["w"]
    second = stack_weighted(uploads({"1": two, "2": one}, {"1": 0.25, "2": 0.75}))["w"]
    assert torch.equal(first.product(), second.product())


def test_after_t_rounds_the_base_has_the_sum_of_the_mean_products() -> None:
    state, total = None, None
    for number in (1, 2, 3):
        outcome = play(FLoRA(), cards(FULL), random_training(number), weights=WEIGHTS, state=state, number=number)
        state, target = outcome.state, ideal(outcome, WEIGHTS)
        total = target if total is None else {name: total[name] + target[name] for name in total}
    assert state is not None and total is not None and state.base.version == 3
    assert gap(patched(state), total) < 1e-6


def test_the_engine_s_base_is_the_first_one_with_all_stacks_merged() -> None:
    before, run = small_base(), world(FLoRA())
    state = run_all(run)[-1].progress.state
    for name, change in patched(state).items():
        now = run.executor.bases["base"].weight(name).double()
        assert torch.allclose(now - before.weight(name).double(), change, atol=1e-6)
        assert float(change.abs().max()) > 1e-4


def test_a_client_of_weight_zero_is_no_part_of_the_patch() -> None:
    (patch,) = play(FLoRA(), cards(FULL), random_training(), weights=WEIGHTS | {"b": 0.0}).state.base.patches
    assert {term.rank for term in patch.values()} == {sum(rank for name, rank in FULL.items() if name != "b")}


def test_factors_start_afresh_every_round_and_for_every_client() -> None:
    entered: list[torch.Tensor] = []

    def seen(name: str, model: Model) -> Model:
        entered.extend([model["lora"]["first"].A])
        assert not model["lora"]["first"].B.any()
        return random_training()(name, model)

    first = play(FLoRA(), cards({"a": 2, "b": 2}), seen)
    play(FLoRA(), cards({"a": 2, "b": 2}), seen, state=first.state, number=2)
    assert len({one.numpy().tobytes() for one in entered}) == 4


def test_truncated_by_svd_it_is_flexlora_and_the_reference_of_fedpa() -> None:
    """The same weights, one scale, full participation; each method's clients trained to the same factors."""
    rank = max(FULL.values())
    stacked = play(FLoRA(), cards(FULL), random_training(), weights=WEIGHTS)
    cut = best(patched(stacked.state), rank)
    for other in (FlexLoRA(), FedPALoRA()):
        outcome = play(other, cards(FULL), random_training(), weights=WEIGHTS)
        made = dense(other.global_model(outcome.state))
        assert gap(made, cut) < 2e-6


def test_the_stack_of_ten_clients_costs_327680_bytes_a_layer_and_goes_to_all() -> None:
    layer = {"w": Layer(1024, 1024)}
    members = cards({f"c{i}": 4 for i in range(10)}, layers=layer)
    assert FLoRA().bytes_up(layer["w"], members[0]) == 32_768
    outcome = play(FLoRA(), members, random_training())
    (patch,) = outcome.state.base.patches
    assert sum(term.B.nbytes + term.A.nbytes for term in patch.values()) == 327_680
    run = world(FLoRA(), ranks=(2, 4, 16), rounds=2)
    run_all(run)
    size = sum(one.d_out + one.d_in for one in run.cards["c0"].layers.values()) * 4
    rows = [row for row in run.ledger.rows() if row["kind"] == "base"]
    assert [(row["round"], row["client"], row["payload"]) for row in rows] == [
        (2, name, (2 + 4 + 16) * size) for name in ("c0", "c1", "c2")
    ]
