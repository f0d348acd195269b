"""FedPA-LoRA's ablations: what is regularised, and what is not preserved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import cards, play, random_training
from engines.world import base, world

from coterie.algorithms import FedPAFactors, FedPALoRA, FedPAOverwritten
from coterie.engines.in_process import InProcess
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm as algorithm_of
from coterie.maths.keys import root_key
from coterie.protocol import (
    Client,
    FactorDistance,
    Federation,
    Fit,
    LowRank,
    Memory,
    Model,
    ProductDistance,
    Seen,
    copied,
)
from coterie.protocol.parties import Card, Layer
from coterie.training.asks import Plan
from coterie.wire.codec import encode

TABLE_4 = {
    "FedIT": ("fedit", {}, "averaged", None),
    "FedIT, local head": ("fedit", {}, "local", None),
    "FlexLoRA": ("flexlora", {}, "averaged", None),
    "FlexLoRA, local head": ("flexlora", {}, "local", None),
    "not preserved": ("fedpa-overwritten", {}, "averaged", ProductDistance),
    "not preserved, local head": ("fedpa-overwritten", {}, "local", ProductDistance),
    "preserved": ("fedpa-lora", {}, "averaged", ProductDistance),
    "both, B": ("fedpa-factors", {"regularised": "B"}, "local", ("B",)),
    "both, A": ("fedpa-factors", {"regularised": "A"}, "local", ("A",)),
    "both, B and A": ("fedpa-factors", {"regularised": "BA"}, "local", ("B", "A")),
    "both, the product": ("fedpa-lora", {}, "local", ProductDistance),
    "both, the product, R = 2": ("fedpa-lora", {}, "local", ProductDistance),
}
"""Row: method, options, head policy, and the regulariser's class or the factors that it holds."""


@pytest.mark.parametrize("row", TABLE_4)
def test_every_row_of_table_4_has_its_head_its_preservation_and_its_regulariser(row: str) -> None:
    method, options, head, regulariser = TABLE_4[row]
    store, R = Volatile(), 2 if row.endswith("R = 2") else None
    run = world(
        algorithm_of(method, options), ranks=(4, 4, 4), rounds=2, store=store, head=head, card={"reference_rank": R}
    )
    answer, fits = run.executor.answer, list[Fit]()

    def watched(asks: Any) -> Any:
        fits.extend(ask.request for ask in asks if isinstance(ask.request, Fit))
        return answer(asks)

    run.executor.answer = watched  # type: ignore[method-assign]
    *_, last = run.rounds(run.begin())
    records = [load_record(store, name) for name in run.cards]
    assert all((record.head is not None) == (head == "local") for record in records)
    preserved = method in ("fedpa-lora", "fedpa-factors")
    assert (last.metrics["init_mismatch"]["B"] == 0.0) == preserved
    assert all(bool(record.memory) == preserved for record in records)
    penalties = [penalty for fit in fits for penalty in fit.penalties]
    if regulariser is None:
        assert not penalties
    elif regulariser is ProductDistance:
        ranks = {term.rank for one in penalties for term in one.reference.values()}
        assert all(isinstance(one, ProductDistance) for one in penalties) and ranks == {R or 4}
    else:
        assert all(isinstance(one, FactorDistance) and one.parts == regulariser for one in penalties)
    assert len(penalties) == (0 if regulariser is None else 6)


def test_the_joint_objective_of_a_variant_has_the_variant_s_own_addend() -> None:
    """Eq. 20 with Eq. 17: lambda / 2 of the squared distance of the factors, with the new reference."""
    members = cards({"a": 2, "b": 2})
    method = FedPAFactors(lam=3.0, regularised="A")
    outcome = play(method, members, random_training())
    seen = {name: Seen(0.5, model, None) for name, model in outcome.fitted.items()}
    found = method.measures(outcome.state, Federation(tuple(members), 1), seen)
    expected = sum(
        0.5 * 3.0 / 2 * float((term.A - outcome.state.reference[layer].A).double().square().sum())
        for model in outcome.fitted.values()
        for layer, term in model["lora"].items()
    )
    assert found["regulariser"] == pytest.approx(expected, rel=1e-5)
    assert found["truncation_delta"] == 0.0


def test_only_what_is_preserved_is_shown_beside_the_reference() -> None:
    members = cards({"a": 2, "b": 2})
    for method, names in ((FedPAFactors(), {"preserved"}), (FedPAOverwritten(), set())):
        outcome = play(method, members, random_training())
        root = root_key(0)
        memory = Memory(outcome.memories["a"], copied, read_only=True)
        client = Client(members[0], memory, ("train",), root.fold, 2, "main")
        assert set(method.further_models(client, outcome.downloads["a"])) == names


def played(algorithm: Any, **options: Any) -> tuple[InProcess, Any]:
    run = world(algorithm, ranks=(4, 4, 4), rounds=2, store=Volatile(), **options)
    *_, last = run.rounds(run.begin())
    return run, last


@pytest.mark.parametrize("parts", ["B", "A", "BA"])
def test_the_penalty_is_the_weighted_squared_distance_of_the_named_factors(parts: str) -> None:
    key = root_key(2)
    own = LowRank(key.fold(1).normal((5, 2)).double(), key.fold(2).normal((2, 4)).double())
    other = LowRank(key.fold(3).normal((5, 2)).double(), key.fold(4).normal((2, 4)).double())
    penalty = FedPAFactors(lam=3.0, regularised=parts).alignment({"w": other})  # type: ignore[arg-type]
    assert isinstance(penalty, FactorDistance)
    value = FactorDistance.stack([penalty], 4).value(Model.stack([Model(lora={"w": own})], 4))
    expected = 1.5 * sum(float((getattr(own, p) - getattr(other, p)).square().sum()) for p in parts)
    assert abs(float(value) - expected) < 1e-12


def test_a_large_lambda_holds_the_regularised_factor_and_leaves_the_other_free() -> None:
    run, last = played(FedPAFactors(lam=4.0, regularised="B"))
    free, _ = played(FedPALoRA(lam=0.0))
    for name in run.cards:
        own, loose = (load_record(one.store, name).memory["factors"] for one in (run, free))
        for layer in own:
            assert float(own[layer].B.norm()) < 0.7 * float(loose[layer].B.norm())
    assert last.metrics["init_mismatch"] == {"B": 0.0, "A": 0.0}


def test_without_regularisation_all_variants_with_preservation_are_one_method() -> None:
    states = [encode(played(made)[1].progress.state) for made in (FedPAFactors(lam=0.0), FedPALoRA(lam=0.0))]
    assert states[0] == states[1]


def test_without_preservation_a_round_starts_from_the_reference() -> None:
    members = cards({"a": 2, "b": 2})
    first = play(FedPAOverwritten(), members, random_training())
    entered: dict[str, Model] = {}

    def watch(name: str, model: Model) -> Model:
        entered[name] = model
        return random_training(1)(name, model)

    play(FedPAOverwritten(), members, watch, state=first.state, number=2)
    for layer, term in first.state.reference.items():
        assert torch.equal(entered["a"]["lora"][layer].B, term.B)
    assert all(memory == {} for memory in first.memories.values())


def test_without_preservation_there_is_an_initialisation_mismatch() -> None:
    assert played(FedPAOverwritten())[1].metrics["init_mismatch"]["B"] > 0.01


@pytest.mark.parametrize("made", [FedPAFactors, FedPAOverwritten])
def test_other_reference_ranks_are_refused_by_client(made: Any) -> None:
    odd = [Card(name, 4, 1, 1.0, {"w": Layer(8, 6)}, reference_rank=rank) for name, rank in (("a", None), ("b", 2))]
    with pytest.raises(ConfigError, match="client b trains rank 4 and downloads rank 2"):
        play(made(), odd, random_training())


def test_factor_penalties_stack_with_unequal_ranks() -> None:
    network = base()
    states = []
    for clients in (1, 3):
        plan = Plan(dtype="float32", clients_per_step=clients, padding_rank=16)
        run = world(FedPAFactors(lam=1.0), ranks=(2, 4, 16), plan=plan, rounds=2, network=network)
        *_, last = run.rounds(run.begin())
        states.append(last.progress.state.reference)
    for layer, term in states[0].items():
        assert float((term.product() - states[1][layer].product()).abs().max()) <= 1e-5
