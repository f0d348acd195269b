"""Every declared trait holds, and every undeclared one is shown false by an example."""

from __future__ import annotations

import pytest
import torch

from conformance.harness import (
    Outcome,
    best,
    cards,
    deployed,
    equal_training,
    gap,
    ideal,
    play,
    random_training,
    rotated,
)
from coterie.algorithms import METHODS, Algorithm
from coterie.errors import ConfigError
from coterie.protocol import Federation, map_tensors
from coterie.protocol.messages import leaves
from coterie.wire.codec import encode, size

TIGHT, LOOSE = 2e-6, 1e-2
RANKS = {"a": 2, "b": 2, "c": 2}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def methods(deploying: bool = False) -> list[object]:
    """Every registered method; with deploying=True those that have a global model."""
    names = sorted(METHODS)
    if deploying:
        names = [name for name in names if deployed(METHODS[name](), one_round(METHODS[name]())) is not None]
    return [pytest.param(METHODS[name](), id=name) for name in names]


def one_round(algorithm: Algorithm, **options: object) -> Outcome:
    return play(algorithm, cards(RANKS), random_training(), weights=WEIGHTS, **options)  # type: ignore[arg-type]


def holds(declared: bool, distance: float) -> bool:
    """Declared: the distance vanishes. Undeclared: it clearly does not."""
    return distance <= TIGHT if declared else distance >= LOOSE


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_exact_means_that_the_deployed_product_is_the_weighted_mean_of_products(algorithm: Algorithm) -> None:
    outcome = one_round(algorithm)
    made = deployed(algorithm, outcome)
    assert made is not None
    assert holds(algorithm.traits.exact, gap(made, ideal(outcome, WEIGHTS)))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_best_rank_means_the_truncated_svd_of_the_weighted_mean_of_products(algorithm: Algorithm) -> None:
    outcome = one_round(algorithm)
    made = deployed(algorithm, outcome)
    assert made is not None
    assert holds(algorithm.traits.best_rank, gap(made, best(ideal(outcome, WEIGHTS), max(RANKS.values()))))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_gauge_invariance_means_that_only_products_count(algorithm: Algorithm) -> None:
    plain = deployed(algorithm, one_round(algorithm))
    other = deployed(algorithm, play(algorithm, cards(RANKS), rotated(random_training()), weights=WEIGHTS))
    assert plain is not None and other is not None
    assert holds(algorithm.traits.gauge_invariant, gap(other, plain))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_one_client_means_that_its_own_product_is_deployed(algorithm: Algorithm) -> None:
    outcome = play(algorithm, cards({"a": 2}), random_training())
    made = deployed(algorithm, outcome)
    assert made is not None
    assert holds(algorithm.traits.one_client, gap(made, ideal(outcome, {"a": 1.0})))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_equal_clients_means_that_what_all_send_is_deployed(algorithm: Algorithm) -> None:
    outcome = play(algorithm, cards(RANKS), equal_training(), weights=WEIGHTS)
    made = deployed(algorithm, outcome)
    assert made is not None
    assert holds(algorithm.traits.equal_clients, gap(made, ideal(outcome, WEIGHTS)))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_zero_weight_means_absence(algorithm: Algorithm) -> None:
    nobody = deployed(algorithm, play(algorithm, cards(RANKS), random_training(), weights=WEIGHTS | {"b": 0.0}))
    two = cards({"a": 2, "c": 2})
    absent = deployed(algorithm, play(algorithm, two, random_training(), weights={"a": 0.5, "c": 0.2}))
    assert nobody is not None and absent is not None
    assert holds(algorithm.traits.zero_weight, gap(nobody, absent))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_linear_upload_means_that_only_the_weighted_sum_of_uploads_counts(algorithm: Algorithm) -> None:
    shift = {"a": 1 / WEIGHTS["a"], "b": -1 / WEIGHTS["b"], "c": 0.0}

    def tamper(name: str, payload: object) -> object:
        return map_tensors(payload, lambda tensor: tensor + shift[name] * 0.4 * torch.ones_like(tensor))

    plain = deployed(algorithm, one_round(algorithm))
    moved = deployed(algorithm, one_round(algorithm, tamper=tamper))
    assert plain is not None and moved is not None
    assert holds(algorithm.traits.linear_upload, gap(moved, plain))


@pytest.mark.parametrize("algorithm", methods())
def test_unequal_ranks_are_met_or_refused_as_declared(algorithm: Algorithm) -> None:
    members = cards({"a": 1, "b": 2, "c": 4})
    if algorithm.traits.ranks == "equal":
        with pytest.raises(ConfigError, match=r"\ba\b.*\bb\b"):
            play(algorithm, members, random_training())
        return
    outcome = play(algorithm, members, random_training())
    for card in members:
        assert all(term.rank == card.rank for term in outcome.fitted[card.id]["lora"].values())


@pytest.mark.parametrize("algorithm", methods())
def test_unequal_scales_are_met_or_refused_as_declared(algorithm: Algorithm) -> None:
    members = cards(RANKS, scale={"a": 1.0, "b": 2.0, "c": 4.0})
    if algorithm.traits.common_scale:
        with pytest.raises(ConfigError, match="scale"):
            play(algorithm, members, random_training())
    else:
        assert play(algorithm, members, random_training()).state is not None


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_best_rank_and_one_client_hold_with_unequal_scales(algorithm: Algorithm) -> None:
    if algorithm.traits.common_scale:
        with pytest.raises(ConfigError):
            play(algorithm, cards(RANKS, scale={"a": 1.0, "b": 2.0, "c": 4.0}), random_training())
        return
    members = cards(RANKS, scale={"a": 1.0, "b": 2.0, "c": 4.0})
    outcome = play(algorithm, members, random_training(), weights=WEIGHTS)
    made = deployed(algorithm, outcome)
    assert made is not None
    target = ideal(outcome, WEIGHTS)
    if algorithm.traits.best_rank:
        assert gap(made, best(target, 2)) <= TIGHT
    alone = play(algorithm, members[2:], random_training())
    if algorithm.traits.one_client:
        product = deployed(algorithm, alone)
        assert product is not None and gap(product, ideal(alone, {"c": 1.0})) <= TIGHT


@pytest.mark.parametrize("algorithm", methods())
def test_the_base_changes_exactly_as_declared(algorithm: Algorithm) -> None:
    outcome = one_round(algorithm)
    base = getattr(outcome.state, "base", None)
    assert (base is not None and base.version > outcome.before.base.version) == algorithm.traits.changes_base


@pytest.mark.parametrize("algorithm", methods())
def test_sites_keep_memory_exactly_as_declared(algorithm: Algorithm) -> None:
    outcome = one_round(algorithm)
    assert any(memory for memory in outcome.memories.values()) == algorithm.traits.keeps_memory


@pytest.mark.parametrize("algorithm", methods())
def test_payload_bytes_equal_the_methods_formula(algorithm: Algorithm) -> None:
    members = cards({"a": 1, "b": 2, "c": 4}) if algorithm.traits.ranks == "unequal" else cards(RANKS)
    outcome = play(algorithm, members, random_training())
    second = play(algorithm, members, random_training(1), state=outcome.state, memories=outcome.memories, number=2)
    for card in members:
        up = sum(algorithm.bytes_up(layer, card) for layer in card.layers.values())
        down = sum(algorithm.bytes_down(layer, card) for layer in card.layers.values())
        for one in (outcome, second):
            assert size(one.payloads[card.id]).payload == up
            assert size(one.bodies[card.id]).payload == down


@pytest.mark.parametrize("algorithm", methods())
def test_the_order_of_clients_changes_no_bit(algorithm: Algorithm) -> None:
    members = cards(RANKS)
    first = play(algorithm, members, random_training(), weights=WEIGHTS)
    second = play(algorithm, list(reversed(members)), random_training(), weights=WEIGHTS)
    assert encode(first.state) == encode(second.state)


@pytest.mark.parametrize("algorithm", methods())
def test_uploads_hold_nothing_but_what_training_made(algorithm: Algorithm) -> None:
    outcome = one_round(algorithm)
    for payload in outcome.payloads.values():
        assert not any("head" in path or "classifier" in path for path, _ in leaves(payload))
        assert not any(isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() for _, leaf in leaves(payload))


@pytest.mark.parametrize("algorithm", methods())
def test_a_second_round_starts_from_the_first(algorithm: Algorithm) -> None:
    members = cards(RANKS)
    first = play(algorithm, members, random_training(), weights=WEIGHTS)
    second = play(
        algorithm,
        members,
        random_training(1),
        weights=WEIGHTS,
        state=first.state,
        memories=first.memories,
        number=2,
    )
    before, after = deployed(algorithm, first), deployed(algorithm, second)
    if before is not None and after is not None:
        assert gap(after, before) > LOOSE
    else:
        assert encode(second.memories) != encode(first.memories)


def test_the_federation_knows_its_common_scale_and_largest_rank() -> None:
    assert Federation(tuple(cards({"a": 1, "b": 3})), 1).scale == 2.0
    assert Federation(tuple(cards({"a": 1, "b": 3}, scale={"a": 1.0, "b": 2.0})), 1).scale is None
    assert Federation(tuple(cards({"a": 1, "b": 3})), 1).rank == 3
