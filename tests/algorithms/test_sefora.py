"""SeFoRA and SeFoRA-Ho: what travels, what comes back, ranks over rounds, and what is measured."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import (
    Outcome,
    best,
    cards,
    dense,
    deployed,
    gap,
    ideal,
    play,
    random_training,
    rotated,
    server,
)
from engines.world import FAST, world
from engines.world import play as play_run
from hypothesis import given
from hypothesis import strategies as st
from reference.dense_sketch import error_bound
from reference.random_factors import bounded

from algorithms.test_rank_update import decaying
from coterie.algorithms import FedIT, SeFoRA
from coterie.algorithms.rank_update import ranks_of
from coterie.algorithms.sketches import Sketch
from coterie.engines.sites import Volatile, load_record
from coterie.errors import ConfigError, ModelError
from coterie.experiments.methods import algorithm
from coterie.protocol import Card, Federation, Layer, Model, Seen, Uploads, copied
from coterie.protocol.messages import Uploaded, leaves
from coterie.training.asks import Plan
from coterie.wire.codec import encode

LAYERS = {"first": Layer(20, 15), "second": Layer(14, 18)}


@bounded
@given(st.lists(st.integers(1, 2), min_size=1, max_size=3), st.integers(0, 999))
def test_a_mean_product_of_rank_up_to_r_is_deployed_exactly(ranks: list[int], seed: int) -> None:
    members = cards({str(i): r for i, r in enumerate(ranks)}, layers=LAYERS)
    method = SeFoRA(rank=6)
    outcome = play(method, members, random_training(seed))
    made = deployed(method, outcome)
    assert made is not None
    assert gap(made, ideal(outcome, {one.id: 1.0 for one in members})) < 1e-5  # fp32 sketches


def test_beyond_r_the_error_is_finite_and_at_least_that_of_the_best_rank_r_product() -> None:
    members = cards(dict.fromkeys("abcd", 3), layers=LAYERS)
    outcome = play(SeFoRA(), members, random_training())
    whole = ideal(outcome, dict.fromkeys("abcd", 1.0))
    made, least = deployed(SeFoRA(), outcome), best(whole, 3)
    assert made is not None
    for layer, product in made.items():
        lost = float((product - whole[layer]).norm())
        assert float((least[layer] - whole[layer]).norm()) < lost < float("inf")


def test_the_deployed_B_is_orthonormal_after_every_round() -> None:
    members, outcome = cards({"a": 1, "b": 3}, layers=LAYERS), None
    for number in (1, 2):
        state, memories = (outcome.state, outcome.memories) if outcome else (None, None)
        outcome = play(SeFoRA(), members, random_training(number), state=state, memories=memories, number=number)
        for term in outcome.state.lora.values():
            assert torch.allclose(term.B.mT @ term.B, torch.eye(3), atol=1e-6)


def test_only_products_count_at_unequal_ranks_too() -> None:
    members = cards({"a": 1, "b": 3}, layers=LAYERS)
    plain = play(SeFoRA(), members, random_training())
    other = play(SeFoRA(), members, rotated(random_training()))
    one, two = deployed(SeFoRA(), plain), deployed(SeFoRA(), other)
    assert one is not None and two is not None and gap(one, two) < 1e-5


def test_uploads_have_one_size_whatever_the_rank_and_tell_it_nowhere() -> None:
    members = cards({"a": 1, "b": 2, "c": 4}, layers=LAYERS)
    outcome = play(SeFoRA(), members, random_training())
    for payload in outcome.payloads.values():
        assert {name: (tuple(one.Y.shape), tuple(one.Z.shape)) for name, one in payload.items()} == {
            "first": ((20, 4), (6, 15)),
            "second": ((14, 4), (6, 18)),
        }
        assert all(isinstance(leaf, torch.Tensor) for _, leaf in leaves(payload))
        assert all(type(one) is Sketch for one in payload.values())


def test_upload_bytes_of_the_specification_and_the_downloads() -> None:
    layer, one = Layer(1024, 1024), cards({"a": 16})[0]
    assert SeFoRA(k=18).bytes_up(layer, one) == SeFoRA().bytes_up(layer, one) == 139_264
    assert SeFoRA().bytes_down(layer, one) == 16 * 2048 * 4
    small = cards({"a": 2, "b": 16})
    asked = SeFoRA().in_federation(Federation(tuple(small), 1))
    assert asked.bytes_up(layer, small[0]) == 139_264


def test_upload_relative_to_fedit_is_rm_plus_kn_over_r_times_m_plus_n() -> None:
    layer, one = Layer(1024, 768), cards({"a": 16})[0]
    ratio = SeFoRA(k=32).bytes_up(layer, one) / FedIT().bytes_up(layer, one)
    assert ratio == pytest.approx((16 * 1024 + 32 * 768) / (16 * (1024 + 768)))


def test_the_matrices_are_new_in_every_round_and_their_seed_is_sent_once() -> None:
    members = cards({"a": 2, "b": 2}, layers=LAYERS)
    first = play(SeFoRA(), members, random_training())
    again = play(SeFoRA(), members, random_training(), number=2)
    assert not torch.equal(first.payloads["a"]["first"].Y, again.payloads["a"]["first"].Y)
    assert first.downloads["a"].key == again.downloads["a"].key == first.state.key


def test_a_smaller_client_enters_with_the_best_rank_r_i_part_of_the_global_product() -> None:
    members = cards({"a": 1, "b": 3}, layers=LAYERS)
    first = play(SeFoRA(), members, random_training())
    entered: dict[str, Model] = {}

    def watch(name: str, model: Model) -> Model:
        entered[name] = model
        return random_training(1)(name, model)

    play(SeFoRA(), members, watch, state=first.state, memories=first.memories, number=2)
    whole = {layer: dense(term) for layer, term in first.state.lora.items()}
    assert gap({layer: dense(term) for layer, term in entered["a"]["lora"].items()}, best(whole, 1)) < 1e-6
    for layer, term in entered["b"]["lora"].items():
        assert torch.equal(term.B, first.state.lora[layer].B) and torch.equal(term.A, first.state.lora[layer].A)


def test_ranks_shrink_at_an_update_stay_and_grow_again_at_the_next() -> None:
    members, method = cards({"a": 2, "b": 4}, layers=LAYERS), SeFoRA(update_every=2)
    outcome, entered, kept = None, [], []
    for number, share in ((1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1), (5, 0.9), (6, 0.1)):
        state, memories = (outcome.state, outcome.memories) if outcome else (None, None)
        outcome = play(method, members, decaying(share), number=number, state=state, memories=memories)
        entered.append({name: ranks_of(model["lora"])["first"] for name, model in outcome.fitted.items()})
        kept.append({name: memory["ranks"]["first"] for name, memory in outcome.memories.items()})
    full, one = {"a": 2, "b": 4}, {"a": 1, "b": 1}
    assert entered == [full, full, full, one, full, full]
    assert kept == [full, full, one, one, full, full]
    assert {term.rank for term in outcome.state.lora.values()} == {4}  # r itself stays (F7)


def test_in_an_update_round_the_shrunk_factors_are_sketched() -> None:
    members, method = cards({"a": 4}, layers=LAYERS), SeFoRA(update_every=1)
    first = play(method, members, random_training())
    second = play(method, members, decaying(0.1), state=first.state, memories=first.memories, number=2)
    made = deployed(method, second)
    assert made is not None
    assert gap(made, best(ideal(second, {"a": 1.0}), 1)) < 1e-5 < gap(made, ideal(second, {"a": 1.0}))


def test_zero_updates_leave_a_zero_product_that_can_still_learn() -> None:
    members = cards({"a": 2, "b": 2}, layers=LAYERS)
    outcome = play(SeFoRA(), members, lambda name, model: model)
    for layer, term in outcome.state.lora.items():
        assert not term.B.any() and torch.equal(term.A, outcome.before.lora[layer].A)
    assert SeFoRA().measures(outcome.state, Federation(tuple(members), 1), seen(outcome)) == {"average_rank": 2.0}


def test_the_start_is_gaussian_with_deviation_one_over_r_and_zero_B() -> None:
    members = [Card("a", 8, 1, 1.0, {"w": Layer(64, 3000)})]
    term = SeFoRA().start(Federation(tuple(members), 1), server(0)).lora["w"]
    assert abs(float(term.A.std()) - 1 / 8) < 1e-3 and not term.B.any()


def test_layers_narrower_than_r_are_sketched_at_their_own_width() -> None:
    members = cards({"a": 4, "b": 4}, layers={"thin": Layer(3, 9), "wide": Layer(12, 12)})
    outcome = play(SeFoRA(), members, random_training())
    made = deployed(SeFoRA(), outcome)
    assert made is not None
    assert {name: term.rank for name, term in outcome.state.lora.items()} == {"thin": 3, "wide": 4}
    whole = ideal(outcome, {"a": 1.0, "b": 1.0})
    assert gap({"thin": made["thin"]}, {"thin": whole["thin"]}) < 1e-5


def seen(outcome: Outcome) -> dict[str, Seen]:
    return {name: Seen(1 / len(outcome.fitted), model, None) for name, model in outcome.fitted.items()}


def test_measures_are_the_true_error_the_tail_and_lemma_2() -> None:
    members, method = cards(dict.fromkeys("abcd", 3), layers=LAYERS), SeFoRA(k=9)
    outcome = play(method, members, random_training())
    told = method.measures(outcome.state, Federation(tuple(members), 1), seen(outcome))
    unscaled = {layer: one / 2.0 for layer, one in ideal(outcome, dict.fromkeys("abcd", 1.0)).items()}
    spectra = {layer: torch.linalg.svdvals(one) for layer, one in unscaled.items()}
    energy = sum(float(one.square().sum()) for one in unscaled.values())
    error = sum(
        float((unscaled[layer] - term.B.double() @ term.A.double()).square().sum())
        for layer, term in outcome.state.lora.items()
    )
    tail = sum(float(S[3:].square().sum()) for S in spectra.values())
    bound = sum(error_bound(S.tolist(), 3, 9) for S in spectra.values())
    wanted = {"sketch_error": error, "tail_energy": tail, "sketch_bound": bound}
    assert told == pytest.approx({k: (v / energy) ** 0.5 for k, v in wanted.items()} | {"average_rank": 3.0}, rel=1e-5)


def test_in_a_real_network_nothing_is_measured_since_nobody_sees_products() -> None:
    members = cards({"a": 2}, layers=LAYERS)
    outcome = play(SeFoRA(), members, random_training())
    assert SeFoRA().measures(outcome.state, Federation(tuple(members), 1), {}) == {}


def test_wrong_sizes_are_told_with_client_and_layer() -> None:
    members, method = cards({"a": 2, "b": 2}, layers=LAYERS), SeFoRA()
    outcome = play(method, members, random_training())
    good = outcome.payloads["a"]
    with pytest.raises(ModelError, match=r"client a, layer first: Y \(20, 2\) and Z \(4, 14\)"):
        method.check(good | {"first": Sketch(good["first"].Y, good["first"].Z[:, :-1])}, members[0])
    with pytest.raises(ModelError, match=r"client a: one sketch for each of 2 layers"):
        method.check({"first": good["first"]}, members[0])
    thinner = copied(good) | {"first": Sketch(good["first"].Y[:, :1], good["first"].Z)}
    sent = Uploads([Uploaded(members[0], thinner, 1.0), Uploaded(members[1], good, 1.0)])
    with pytest.raises(ModelError, match=r"client a, layer first: a sketch of 1 columns and 4 rows where 2 and 4"):
        method.aggregate(outcome.before, sent, server(1))


def test_k_must_exceed_r_by_two_at_least() -> None:
    with pytest.raises(ConfigError, match="k must be above 17 for rank 16, not 17"):
        algorithm("sefora", {"rank": 16, "k": 17})
    with pytest.raises(ValueError, match="k must be above 5 for rank 4"):
        play(SeFoRA(k=5), cards({"a": 4}), random_training())


@pytest.mark.parametrize(("r", "k"), [(16, 32), (16, 18), (8, 16), (8, 10), (4, 8), (4, 6), (2, 4)])
def test_the_sizes_of_table_3_are_options(r: int, k: int) -> None:
    assert algorithm("sefora-ho", {"k": k}).sizes(Layer(1024, 1024), r) == (r, k)  # type: ignore[attr-defined]


EVERY_ROUND: dict[str, Any] = {"update_every": 1, "tau": 0.9}


@pytest.mark.parametrize("name", ["sefora", "sefora-plus", "flexlora-adaptive", "flora-adaptive"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_run_with_updates_is_the_same_in_strict_mode_stacked_and_resumed(name: str, per_layer: bool) -> None:
    """What the battery plays without an update, with one in every round but the first."""
    made = algorithm(name, EVERY_ROUND | {"per_layer": per_layer})
    store = Volatile()
    run = world(made, ranks=(2, 4, 8), store=store)
    plain = []
    for one in run.rounds(run.begin()):
        plain.append(one)
        if one.progress.round == 2:
            then = copy.deepcopy(store)
    strict = play_run(world(made, ranks=(2, 4, 8), strict=True))
    assert [one.metrics for one in plain] == [one.metrics for one in strict]
    assert encode(plain[-1].progress.state) == encode(strict[-1].progress.state)
    averages = [one.metrics["measures"]["average_rank"] for one in plain]
    assert averages[0] == pytest.approx(14 / 3) and 1 <= averages[-1] < 14 / 3
    again = world(made, ranks=(2, 4, 8), store=then)
    assert encode(list(again.rounds(plain[1].progress))[-1].progress.state) == encode(plain[-1].progress.state)
    stacked = play_run(world(made, ranks=(2, 4, 8), plan=Plan(clients_per_step=3, padding_rank=8)))
    for mine, other in zip(plain, stacked, strict=True):
        assert mine.metrics["train"]["loss"] == pytest.approx(other.metrics["train"]["loss"], rel=1e-3)


def test_an_absent_client_keeps_its_rank() -> None:
    store = Volatile()
    run = world(SeFoRA(update_every=1), ranks=(4, 4, 4), store=store, sample=2, rounds=3, train=replace(FAST, steps=2))
    kept: dict[str, Any] = {}
    for played in run.rounds(run.begin()):
        for name in run.cards:
            memory = load_record(store, name).memory
            if name not in played.metrics["cohort"]:
                assert memory == kept.get(name, {})
            kept[name] = memory
    assert all(kept.values())
