"""FedProto: class means travel, models never; features are drawn to the global prototype of their class."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import cards, play, random_training
from engines.world import FAST, base, world
from engines.world import play as rounds_of
from training.small import choices, gpt2_lm, language_base_of, llama_lm, sequences

from coterie.algorithms import FedProto, LocalOnly
from coterie.algorithms.fedproto import Download, Space, projection, prototypes_of
from coterie.engines.in_process import InProcess, Played
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Volatile
from coterie.errors import ConfigError
from coterie.maths.keys import root_key
from coterie.protocol import Card, ClassMeans, Federation, Server, Uploads
from coterie.protocol.messages import leaves
from coterie.training.asks import Plan
from coterie.training.executor import Executor
from coterie.wire.codec import size
from coterie.wire.ledger import Ledger

SERVER = Server((), root_key(0).fold, round=1, phase="main")
ONE, OTHER = (Card(name, 2, 10, 1.0, {}, width=2, classes=2) for name in "ab")


def aggregated(algorithm: FedProto, counts: tuple[int, int] = (1, 1)) -> dict[int, torch.Tensor]:
    """N19: client a {0: (1, 0)}, client b {0: (3, 2), 1: (5, 5)}; counts are of class 0."""
    a = ClassMeans((0,), torch.tensor([[1.0, 0.0]]), (counts[0],))
    b = ClassMeans((0, 1), torch.tensor([[3.0, 2.0], [5.0, 5.0]]), (counts[1], 4))
    state = algorithm.start(Federation((ONE, OTHER), 1), SERVER)
    return algorithm.aggregate(state, Uploads({"a": (ONE, a, 0.5), "b": (OTHER, b, 0.5)}), SERVER).prototypes


def test_a_global_prototype_is_the_mean_over_the_clients_that_hold_the_class() -> None:
    found = aggregated(FedProto())
    assert found[0].tolist() == [2, 1] and found[1].tolist() == [5, 5]


def test_by_count_a_client_counts_for_a_class_by_its_examples() -> None:
    assert aggregated(FedProto(by_count=True), counts=(3, 1))[0].tolist() == [1.5, 0.5]
    assert aggregated(FedProto(), counts=(3, 1))[0].tolist() == [2, 1]


def test_no_weight_ever_travels_and_a_prototype_has_the_size_of_a_feature() -> None:
    outcome = play(FedProto(), cards({"a": 1, "b": 4}), random_training())
    for name, payload in outcome.payloads.items():
        assert [tuple(leaf.shape) for _, leaf in leaves(payload) if isinstance(leaf, torch.Tensor)] == [(2, 6)]
        assert size(payload).payload == 2 * 6 * 4 and size(outcome.bodies[name]).payload == 0


@pytest.mark.parametrize("by_count", [False, True])
def test_how_many_examples_a_class_has_leaves_a_client_only_where_it_weighs(by_count: bool) -> None:
    outcome = play(FedProto(by_count=by_count), cards({"a": 1, "b": 4}), random_training())
    assert all((set(sent.counts) != {1}) == by_count for sent in outcome.payloads.values())


def test_the_first_round_is_plain_training_and_later_ones_draw_features_to_prototypes() -> None:
    """Bit for bit: no prototypes, no penalty; with lambda = 0 all rounds are."""
    plain = [one.metrics["train"]["losses"] for one in rounds_of(world(LocalOnly()))]
    drawn = [one.metrics["train"]["losses"] for one in rounds_of(world(FedProto(lam=1.0)))]
    none = [one.metrics["train"]["losses"] for one in rounds_of(world(FedProto(lam=0.0)))]
    assert drawn[0] == plain[0] and drawn[1] != plain[1]
    assert none == plain


@pytest.mark.parametrize("literal", [False, True])
def test_the_nearest_prototype_is_measured_beside_the_head(literal: bool) -> None:
    last = rounds_of(world(FedProto(literal=literal), rounds=3, train=replace(FAST, steps=10)))[-1].metrics
    nearest = last["personal"]["further"]["nearest prototype"]
    assert set(nearest["clients"]["accuracy"]) == {"c0", "c1", "c2"} and nearest["pooled"]["accuracy"] > 0.6
    assert "further" not in rounds_of(world(FedProto(nearest=False), rounds=2))[-1].metrics["personal"]


def test_literal_prototypes_are_of_the_features_that_the_last_epoch_trained_on() -> None:
    """With a learning rate of nothing both are equal where the steps are one epoch; else weights were still moving."""
    still = replace(FAST, lr=1e-12, steps=None, epochs=2)
    found = [
        next(iter(run.rounds(run.begin()))).progress.state.prototypes
        for literal in (False, True)
        for run in [world(FedProto(literal=literal), train=still, rounds=1)]
    ]
    assert all(torch.allclose(found[0][c], found[1][c], atol=1e-5) for c in (0, 1))
    moving = replace(FAST, steps=None, epochs=2)
    apart = [
        next(iter(run.rounds(run.begin()))).progress.state.prototypes
        for literal in (False, True)
        for run in [world(FedProto(literal=literal), train=moving, rounds=1)]
    ]
    assert not torch.allclose(apart[0][0], apart[1][0], atol=1e-3)


def two_kinds(algorithm: FedProto) -> list[Played]:
    """Clients of decoders of two kinds, over the options of questions, everything through bytes."""
    bases = {"gpt2": language_base_of(gpt2_lm()), "llama": language_base_of(llama_lm())}
    sites = {}
    for i, spec in enumerate(["gpt2", "llama", "gpt2"]):
        own, asked = bases[spec], choices(18 + i, f"q{i}")
        card = Card(f"c{i}", 2 + i, 18 + i, 2.0, own.layers, spec=spec, width=own.width, classes=3)
        sites[card.id] = Site(card, {"train": asked.answers(), "test": choices(6, f"t{i}")})
    setting = Setting(algorithm, sites, rounds=3, measuring=Measuring(objective_examples=0), strict=True)
    return rounds_of(InProcess(setting, Executor(bases, replace(FAST, steps=5), Plan()), Volatile(), Ledger()))


def test_decoders_of_two_kinds_share_prototypes_of_options() -> None:
    last = two_kinds(FedProto())[-1]
    assert not last.metrics["failed"] and set(last.progress.state.prototypes) <= {0, 1, 2}
    assert len(last.progress.state.prototypes) >= 2
    assert set(last.metrics["personal"]["further"]["nearest prototype"]["clients"]["accuracy"]) == {"c0", "c1", "c2"}


def test_features_of_unequal_sizes_meet_in_the_smallest_by_fixed_matrices() -> None:
    wide = base()
    small = replace(ONE, id="n", width=8)
    state = FedProto().start(Federation((replace(ONE, width=wide.width), small), 1), SERVER)
    assert state.space.entries == 8 and state.space.projected
    P = projection(32, state.space)
    assert P is not None and tuple(P.shape) == (8, 32) and torch.equal(P, projection(32, state.space))
    assert projection(32, Space(root_key(0), 32, False)) is None
    lengths = torch.stack([(P @ root_key(i).normal((32,))).square().sum() for i in range(200)])
    assert abs(float(lengths.mean()) / 32 - 1) < 0.25


def test_a_client_without_classes_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"client b has None classes.*open answers"):
        FedProto().start(Federation((ONE, replace(OTHER, classes=None)), 1), SERVER)


def test_open_answers_have_no_classes_to_draw_features_to() -> None:
    assert choices(5).answers().classes is not None and sequences(5).classes is None
    assert choices(5).answers().classes.tolist() == choices(5).labels.tolist()


def test_what_a_download_lacks_has_no_prototype() -> None:
    space = Space(root_key(0), 2, False)
    points = prototypes_of(Download(space, 3, (0, 2), torch.ones(2, 2)), ONE)
    assert points is not None and points.held.tolist() == [True, False, True]
    assert prototypes_of(Download(space, 3, (), None), ONE) is None
