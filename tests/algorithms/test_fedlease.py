"""FedLEASE: clusters of a warm-up, experts and routers by cluster, what travels, what stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, Outcome, cards, play, random_training
from engines.world import play as play_run
from engines.world import text, with_sites, world

from coterie.algorithms import FedIT, FedLEASE
from coterie.algorithms.fedlease import State, WarmUp
from coterie.algorithms.routing import Download, Trained
from coterie.data.text import TextSet
from coterie.engines.setting import Fault, Site
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import Key, root_key
from coterie.protocol import Adapter, Card, LowRank, Model, Routed, Uploads
from coterie.protocol.messages import Uploaded, leaves
from coterie.training.asks import Plan, TrainSettings
from coterie.wire.codec import encode, size

FOUR = dict.fromkeys("abcd", 2)
GROUPS = {"a": 0, "b": 0, "c": 1, "d": 1}


def alike(name: str, model: Model) -> Model:
    """Clients of one group end near each other, those of the other far away."""
    group, own = root_key(1).fold(GROUPS[name]), root_key(2).fold(name)
    return model.with_parameters(
        {
            part: group.fold(part).normal(tuple(value.shape)) + 0.1 * own.fold(part).normal(tuple(value.shape))
            for part, value in model.parameters.items()
        }
    )


def two_rounds(algorithm: FedLEASE, names: dict[str, int] = FOUR, **options: Any) -> tuple[Outcome, Outcome]:
    members = cards(names)
    first = play(algorithm, members, alike)
    return first, play(algorithm, members, random_training(), state=first.state, number=2, **options)


def mean(adapters: list[Adapter], name: str, part: str) -> torch.Tensor:
    return torch.stack([adapter[name].parameters[part].double() for adapter in adapters]).mean(dim=0)


def test_the_warm_up_finds_the_groups_and_experts_start_from_their_means() -> None:
    first, _ = two_rounds(FedLEASE())
    state = first.state
    assert state.clusters == {"a": "0", "b": "0", "c": "1", "d": "1"} and state.silhouette > 0.8
    for cluster, members in (("0", "ab"), ("1", "cd")):
        for name in LAYERS:
            for part in ("B", "A"):
                expected = mean([first.payloads[one] for one in members], name, part)
                found = state.models[cluster][name].parameters[part]
                assert torch.allclose(found.double(), expected, atol=1e-6)
    assert all(router.shape == (3, LAYERS[name].d_in) for name, router in state.routers["0"].items())
    assert encode(state.routers["0"]) == encode(state.routers["1"])


def test_the_warm_up_begins_at_one_adapter_for_all_whose_seed_is_set_up() -> None:
    first, _ = two_rounds(FedLEASE())
    assert all(isinstance(first.downloads[name], WarmUp) and size(first.bodies[name]).payload == 0 for name in FOUR)
    keys = {first.downloads[name].init_key for name in FOUR}
    assert len(keys) == 1 and isinstance(keys.pop(), Key)


def test_outputs_are_one_for_each_expert_and_the_rest_for_the_own_one() -> None:
    """M = 2, own expert 1: outputs point to (0, 1, 1), and the top two count."""
    _, second = two_rounds(FedLEASE())
    term = second.fitted["d"]["experts"]["first"]
    assert isinstance(term, Routed) and term.outputs is not None
    assert term.outputs.tolist() == [0, 1, 1] and term.top == 2 and term.experts == 2
    assert second.fitted["a"]["experts"]["first"].outputs.tolist() == [0, 1, 0]
    _, second = two_rounds(FedLEASE(experts=3))
    found = {name: second.fitted[name]["experts"]["first"].outputs.tolist() for name in "ad"}
    assert found == {"a": [0, 1, 2, 0, 0], "d": [0, 1, 2, 2, 2]}


def test_only_the_own_expert_and_the_router_are_trained_and_uploaded() -> None:
    _, second = two_rounds(FedLEASE())
    for name, payload in second.payloads.items():
        assert isinstance(payload, Trained)
        download = second.downloads[name]
        assert isinstance(download, Download)
        before = download.experts[1 - download.own]
        for layer in LAYERS:
            term = second.fitted[name]["experts"][layer]
            other = term.expert(1 - download.own)
            assert torch.equal(other.B, before[layer].B) and torch.equal(other.A, before[layer].A)
            assert torch.equal(payload.expert[layer].B, term.B[download.own])
            assert torch.equal(payload.router[layer], term.router)
        held = sum(leaf.numel() for _, leaf in leaves(payload) if isinstance(leaf, torch.Tensor))
        assert held == sum(2 * (s.d_out + s.d_in) + 3 * s.d_in for s in LAYERS.values())


def test_experts_and_routers_become_the_means_of_their_clusters() -> None:
    _, second = two_rounds(FedLEASE())
    for cluster, members in (("0", "ab"), ("1", "cd")):
        sent = [second.payloads[one] for one in members]
        for name in LAYERS:
            for part in ("B", "A"):
                expected = mean([payload.expert for payload in sent], name, part)
                assert torch.allclose(second.state.models[cluster][name].parameters[part].double(), expected, atol=1e-6)
            expected = torch.stack([payload.router[name].double() for payload in sent]).mean(dim=0)
            assert torch.allclose(second.state.routers[cluster][name].double(), expected, atol=1e-6)


def test_a_cluster_without_members_in_a_round_stays_as_it_is() -> None:
    first, second = two_rounds(FedLEASE())
    kept = [Uploaded(card, second.payloads[card.id], 1.0) for card in cards(FOUR) if card.id in "ab"]
    after = FedLEASE().aggregate(first.state, Uploads(kept), None)  # type: ignore[arg-type]
    assert encode(after.models["1"]) == encode(first.state.models["1"])
    assert encode(after.routers["1"]) == encode(first.state.routers["1"])
    assert encode(after.models["0"]) == encode(second.state.models["0"])


def test_a_router_of_other_outputs_than_were_sent_is_left_out() -> None:
    first, second = two_rounds(FedLEASE())
    wrong = {name: torch.cat([router, router]) for name, router in second.payloads["d"].router.items()}
    sent = second.payloads | {"d": replace(second.payloads["d"], router=wrong)}
    uploads = Uploads([Uploaded(card, sent[card.id], 1.0) for card in cards(FOUR)])
    after = FedLEASE().aggregate(first.state, uploads, None)  # type: ignore[arg-type]
    assert encode(after.routers["0"]) == encode(second.state.routers["0"])
    for name, router in after.routers["1"].items():
        assert torch.allclose(router, second.payloads["c"].router[name], atol=1e-6)


def test_clients_of_unequal_scales_get_the_same_experts() -> None:
    members = cards(FOUR, scale={"a": 1.0, "b": 2.0, "c": 4.0, "d": 0.5})
    first = play(FedLEASE(), members, alike)
    second = play(FedLEASE(), members, random_training(), state=first.state, number=2)
    for name in FOUR:
        for layer, term in second.downloads[name].experts[0].items():
            assert torch.allclose(term.product(), first.state.models["0"][layer].product(), atol=1e-4)


def test_a_client_of_weight_zero_counts_for_nothing_and_a_cluster_of_such_stays() -> None:
    first, second = two_rounds(FedLEASE(), weights={"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0})
    assert encode(second.state.models["1"]) == encode(first.state.models["1"])


def test_a_client_that_missed_the_warm_up_joins_the_cluster_that_it_is_like() -> None:
    algorithm, three = FedLEASE(), dict.fromkeys("abd", 2)
    first = play(algorithm, cards(three), alike)
    assert first.state.clusters == {"a": "0", "b": "0", "d": "1"}
    members = cards(FOUR)
    late = play(algorithm, members, alike, state=first.state, number=2)
    assert isinstance(late.downloads["c"], WarmUp) and isinstance(late.downloads["d"], Download)
    assert late.state.clusters == {"a": "0", "b": "0", "c": "1", "d": "1"}
    for name in LAYERS:  # its first factors join nobody's mean
        assert torch.allclose(late.state.models["1"][name].B, late.payloads["d"].expert[name].B, atol=1e-6)
    assert isinstance(algorithm.send(late.state, members[2]), Download)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_fewer_than_three_clients_are_one_cluster(names: str) -> None:
    first, second = two_rounds(FedLEASE(), dict.fromkeys(names, 2))
    assert set(first.state.clusters.values()) == {"0"} and first.state.silhouette == 0.0
    assert second.payloads["a"].router["first"].shape == (1, LAYERS["first"].d_in)


def test_bytes_are_those_of_the_formula_once_the_number_of_experts_is_given() -> None:
    algorithm = FedLEASE(experts=3)
    first, second = two_rounds(algorithm)
    for card in cards(FOUR):
        for number, (phase, one) in enumerate(zip(algorithm.phases(1), (first, second), strict=True), start=1):
            sums = [algorithm.bytes_of_round(layer, card, number, phase) for layer in LAYERS.values()]
            assert size(one.payloads[card.id]).payload == sum(up for up, _ in sums)
            assert size(one.bodies[card.id]).payload == sum(down for _, down in sums)
    layer = replace(LAYERS["first"], d_out=1024, d_in=1024)
    card = Card("x", 4, 1, 1.0, {"w": layer})
    assert FedLEASE(experts=4).bytes_up(layer, card) == 32768 + 7 * 1024 * 4
    assert FedLEASE(experts=4).bytes_down(layer, card) == 4 * 32768 + 7 * 1024 * 4


def test_with_a_single_cluster_it_is_fedit_that_warmed_up() -> None:
    """One expert has weight one whatever its router says; so products are FedIT's, with equal weights."""
    fields: dict[str, Any] = {"ranks": (4, 4, 4), "weights": "uniform", "head": "frozen"}
    one, plain = world(FedLEASE(experts=1), rounds=2, **fields), world(FedIT(), rounds=3, **fields)
    clustered, averaged = play_run(one)[-1].progress.state, play_run(plain)[-1].progress.state
    for name, term in clustered.models["0"].items():
        assert torch.allclose(term.product(), averaged.lora[name].product(), atol=2e-5)


def test_sites_are_evaluated_and_heads_averaged_by_cluster() -> None:
    run = world(FedLEASE(experts=2), ranks=(2, 2, 2, 2), rounds=2)
    played = play_run(run)
    assert [p.metrics["phase"] for p in played] == ["warm-up", "main", "main"]
    assert played[-1].metrics["global"] is None
    assert set(played[-1].metrics["personal"]["clients"]["score"]) == {"c0", "c1", "c2", "c3"}
    assert set(played[-1].progress.heads) == {"base/all", "base/0", "base/1"}
    assert played[-1].metrics["measures"]["experts"] == 2.0


def test_all_take_part_in_the_warm_up_and_one_that_fails_there_joins_later() -> None:
    run = world(FedLEASE(), ranks=(2, 2, 2, 2), sample=2, rounds=4, faults=(Fault("c1", 1, "exception"),))
    played = play_run(run)
    assert played[0].metrics["cohort"] == ["c0", "c1", "c2", "c3"]
    state = played[0].progress.state
    assert isinstance(state, State) and set(state.clusters) == {"c0", "c2", "c3"}
    assert set(played[-1].metrics["personal"]["clients"]["score"]) == {"c0", "c1", "c2", "c3"}
    if any("c1" in one.metrics["answered"] for one in played[1:]):
        assert "c1" in played[-1].progress.state.clusters


def test_clients_whose_labels_contradict_are_told_apart_and_served_better_than_by_one_average() -> None:
    train = TrainSettings(optimizer="adamw", lr=1e-2, batch_size=8, steps=12)
    means = {}
    for algorithm in (FedIT(), FedLEASE()):
        run = world(algorithm, ranks=(4,) * 6, rounds=4, head="frozen", train=train, plan=Plan(clients_per_step=6))
        made = {}
        for number, (name, site) in enumerate(run.setting.sites.items()):
            own, test = text(64, seed=number + 1), text(40, seed=100 + number)
            turned = (flipped(own), flipped(test)) if number % 2 else (own, test)
            made[name] = Site(site.card, dict(zip(("train", "test"), turned, strict=True)))
        last = play_run(with_sites(run, made))[-1]
        means[algorithm.traits.title] = last.metrics["personal"]["clients"]["mean"]
    assert last.progress.state.clusters == {f"c{number}": str(number % 2) for number in range(6)}
    assert means["FedLEASE"] > 0.8 > 0.6 > means["FedIT"]


def flipped(data: TextSet) -> TextSet:
    """The same texts, each of the other class."""
    return TextSet(data.ids, data.offsets, 1 - data.stored_labels, data.rows, 2)


def test_what_cannot_be_used_is_refused_with_the_client_s_name() -> None:
    card = cards(FOUR)[0]
    good = two_rounds(FedLEASE())[1].payloads["a"]
    FedLEASE().check(good, card)
    with pytest.raises(ModelError, match=r"client a: routers \(2M - 1, n\)"):
        FedLEASE().check(replace(good, router={"first": good.router["first"]}), card)
    with pytest.raises(ModelError, match=r"client a: routers \(2M - 1, n\)"):
        FedLEASE().check(replace(good, router={n: r[:, :-1] for n, r in good.router.items()}), card)
    with pytest.raises(ModelError, match="client a: one term for each"):
        FedLEASE().check({"first": LowRank(torch.zeros(7, 2), torch.zeros(2, 5), 2.0)}, card)
    members = cards(FOUR)
    members[1] = replace(members[1], layers={"first": LAYERS["first"]})
    with pytest.raises(ConfigError, match=r"FedLEASE compares clients layer by layer.* of a and b only one has second"):
        play(FedLEASE(), members, alike)
    with pytest.raises(ConfigError, match="for a single cluster set experts to 1"):
        FedLEASE(max_experts=1)
