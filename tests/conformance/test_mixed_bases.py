"""The battery with clients of unequal base models: played, or refused, as each method declares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.harness import cards, fading_training, play, play_phases, random_training, schedule, server_data
from coterie.algorithms import METHODS, Algorithm
from coterie.engines.arrivals import check_arrival, misshapen
from coterie.engines.setting import Setting, Site
from coterie.errors import ConfigError, CoterieError
from coterie.protocol import Card, Federation, Layer, map_tensors
from coterie.protocol.messages import leaves
from coterie.wire.codec import encode, size

WEIGHTS = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
HALF = {"first": Layer(7, 5, 2), "second": Layer(6, 6, 3)}
MOST = {"first": Layer(7, 5, 3), "second": Layer(6, 6, 4)}
OTHER = {"alone": Layer(4, 8), "more": Layer(9, 3)}


def compressed() -> list[Card]:
    """Two clients of one ratio, one of another, one of the full model."""
    a, b, c, d = cards(dict.fromkeys("abcd", 2))
    return [
        replace(a, spec="ratio-0.4", layers=HALF),
        replace(b, spec="ratio-0.4", layers=HALF),
        replace(c, spec="ratio-0.6", layers=MOST),
        d,
    ]


def foreign() -> list[Card]:
    """Two clients of a model whose layers have other names and shapes."""
    a, b, c, d = cards(dict.fromkeys("abcd", 2))
    return [replace(a, spec="other", layers=OTHER), b, replace(c, spec="other", layers=OTHER), d]


def mixed(algorithm: Algorithm) -> list[list[Card]]:
    """The federations of unequal base models that the method declares to be for."""
    worlds = {"one": [], "compressed": [compressed()], "any": [compressed(), foreign()]}
    return worlds[algorithm.traits.bases]


def methods(*bases: str) -> list[object]:
    return [pytest.param(kind(), id=name) for name, kind in sorted(METHODS.items()) if kind.traits.bases in bases]


@pytest.mark.parametrize("algorithm", methods("one"))
def test_methods_of_one_base_model_refuse_several_and_name_two_clients(algorithm: Algorithm) -> None:
    for members in (compressed(), foreign()):
        with pytest.raises(ConfigError, match=r"trains one base model, but a has .* and (b|c|d) has ") as told:
            Setting(algorithm, {card.id: Site(card, {}) for card in members}, rounds=1)
        assert "\n" not in str(told.value)
    Setting(algorithm, {card.id: Site(card, {}) for card in cards({"a": 2, "b": 2})}, rounds=1)


@pytest.mark.parametrize("algorithm", methods("compressed"))
def test_methods_that_fuse_compressed_models_refuse_layers_of_another_shape(algorithm: Algorithm) -> None:
    a, *others = compressed()
    with pytest.raises(CoterieError, match="one name must mean one shape"):
        play(algorithm, [replace(a, layers=a.layers | {"first": Layer(5, 5, 2)}), *others], random_training())


@pytest.mark.parametrize("algorithm", methods("compressed", "any"))
def test_payload_bytes_equal_the_formula_for_every_client_of_every_base_model(algorithm: Algorithm) -> None:
    for members in mixed(algorithm):
        played = play_phases(algorithm, members, fading_training, rounds=3)
        federation = Federation(tuple(members), 3, server_data(algorithm, members))
        asked = algorithm.in_federation(federation)
        for number, (one, phase) in enumerate(zip(played, schedule(algorithm, 3), strict=True), start=1):
            for card in members:
                told = [asked.bytes_of_round(layer, card, number, phase) for layer in card.layers.values()]
                told += [asked.bytes_apart(card, federation)] if phase.clients != "none" else []
                sent = size(one.payloads.get(card.id)).payload, size(one.bodies.get(card.id)).payload
                most = tuple(map(sum, zip(*told, strict=True)))
                if algorithm.traits.adaptive_size:
                    assert all(one <= limit for one, limit in zip(sent, most, strict=True))
                else:
                    assert sent == most, (card.id, phase.name)


@pytest.mark.parametrize("algorithm", methods("compressed", "any"))
def test_the_order_of_clients_changes_no_bit_in_any_phase(algorithm: Algorithm) -> None:
    for members in mixed(algorithm):
        first = play_phases(algorithm, members, random_training)[-1]
        second = play_phases(algorithm, list(reversed(members)), random_training)[-1]
        assert encode(first.state, dense=True) == encode(second.state, dense=True)


@pytest.mark.parametrize("algorithm", methods("compressed", "any"))
def test_a_client_of_weight_zero_might_as_well_be_absent(algorithm: Algorithm) -> None:
    """What is left of a group of which some count, and one of which nobody does: it stays as it was."""
    for members in mixed(algorithm):
        for nobody in ("b", "c"):
            shares = WEIGHTS | {nobody: 0.0}
            there = play(algorithm, members, random_training(), weights=shares)
            rest = [card for card in members if card.id != nobody]
            absent = play(algorithm, rest, random_training(), weights=WEIGHTS, state=there.before)
            assert encode(there.state) == encode(absent.state)


@pytest.mark.parametrize("algorithm", methods("compressed", "any"))
def test_clients_train_what_their_own_base_model_has(algorithm: Algorithm) -> None:
    for members in mixed(algorithm):
        outcome = play(algorithm, members, random_training(), weights=WEIGHTS)
        for card in members:
            trained = {layer for terms in outcome.fitted[card.id].terms.values() for layer in terms}
            assert trained and trained <= set(card.layers)
            for terms in outcome.fitted[card.id].terms.values():
                for layer, term in terms.items():
                    term.check(card.id, card.layers[layer], None)


@pytest.mark.parametrize("algorithm", methods("compressed"))
def test_uploads_of_another_base_model_are_refused_by_name(algorithm: Algorithm) -> None:
    for members in mixed(algorithm):
        outcome = play(algorithm, members, random_training(), weights=WEIGHTS)
        for card in members:
            payload = outcome.payloads[card.id]
            other = next(one for one in members if one.spec != card.spec)
            for wrong in (misshapen(payload), map_tensors(payload, lambda one: one * float("nan"))):
                with pytest.raises(CoterieError, match=f"client {card.id}"):
                    check_arrival(wrong, card)
                    algorithm.check(wrong, card)
            with pytest.raises(CoterieError, match=f"client {other.id}"):
                check_arrival(payload, other)
                algorithm.check(payload, other)


@pytest.mark.parametrize("algorithm", methods("compressed"))
def test_uploads_hold_nothing_but_what_training_made(algorithm: Algorithm) -> None:
    for members in mixed(algorithm):
        outcome = play(algorithm, members, random_training(), weights=WEIGHTS)
        made = {card.id: [value.flatten() for value in outcome.fitted[card.id].parameters.values()] for card in members}
        for name, payload in outcome.payloads.items():
            sent = [leaf.flatten() for _, leaf in leaves(payload) if isinstance(leaf, torch.Tensor)]
            assert all(any(torch.equal(one, own) for own in made[name]) for one in sent)
