"""Every declared trait holds, and every undeclared one is shown false by an example."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance.harness import (
    Outcome,
    Trained,
    best,
    cards,
    deployed,
    equal_training,
    fading_training,
    gap,
    ideal,
    in_double,
    main_round,
    play,
    play_phases,
    random_training,
    rotated,
    schedule,
    server,
    server_data,
)
from coterie.algorithms import METHODS, Algorithm
from coterie.errors import ConfigError
from coterie.protocol import Card, Federation, Layer, Sparse, TopLogits, map_nodes, map_tensors
from coterie.protocol.messages import leaves
from coterie.wire.codec import encode, size

TIGHT, LOOSE = 2e-6, 1e-2
RANKS = {"a": 2, "b": 2, "c": 2}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
CROWD = dict.fromkeys("abcdefgh", 2)
WIDE = {"first": Layer(20, 24), "second": Layer(18, 18)}


ITSELF: dict[str, dict[str, object]] = {
    "fed-plora": {"rank": 4},
    "fedsee": {"training": 3, "tau": 0.34, "steps": 2},
    "fedsrd": {"pruning": 0.5, "down_pruning": 0.4},
    "fedsrd-e": {"pruning": 0.5, "down_pruning": 0.4},
    "flexlora-adaptive": {"update_every": 1, "tau": 0.5},
    "flora-adaptive": {"update_every": 1, "tau": 0.5},
    "fslora": {"rank": 4},
}
"""Options under which a method is no other one at the ranks above and within three rounds, and sends more than an
entry or two of a layer."""


def methods(deploying: bool = False) -> list[object]:
    """Every registered method; with deploying=True those that make a global model of what clients send."""
    made = {name: METHODS[name](**ITSELF.get(name, {})) for name in sorted(METHODS)}
    if deploying:
        made = {name: one for name, one in made.items() if not (one.traits.pools_data or one.traits.server_trains)}
        made = {name: one for name, one in made.items() if deployed(one, one_round(one)) is not None}
    return [pytest.param(algorithm, id=name) for name, algorithm in made.items()]


def one_round(algorithm: Algorithm, **options: object) -> Outcome:
    return main_round(algorithm, cards(RANKS), random_training(), weights=WEIGHTS, **options)  # type: ignore[arg-type]


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
    """With few clients and with a crowd, in which a method that keeps a multiple of the rank loses something too."""
    apart = []
    crowd = main_round(algorithm, cards(CROWD, layers=WIDE), random_training())
    for outcome, weights in ((one_round(algorithm), WEIGHTS), (crowd, dict.fromkeys(CROWD, 1.0))):
        made = deployed(algorithm, outcome)
        assert made is not None
        apart.append(gap(made, best(ideal(outcome, weights), max(RANKS.values()))))
    assert holds(algorithm.traits.best_rank, max(apart))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_gauge_invariance_means_that_only_products_count(algorithm: Algorithm) -> None:
    plain = deployed(algorithm, one_round(algorithm))
    other = deployed(algorithm, main_round(algorithm, cards(RANKS), rotated(random_training()), weights=WEIGHTS))
    assert plain is not None and other is not None
    assert holds(algorithm.traits.gauge_invariant, gap(other, plain))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_one_client_means_that_its_own_product_is_deployed(algorithm: Algorithm) -> None:
    outcome = main_round(algorithm, cards({"a": 2}), random_training())
    made = deployed(algorithm, outcome)
    assert made is not None
    assert holds(algorithm.traits.one_client, gap(made, ideal(outcome, {"a": 1.0})))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_equal_clients_means_that_what_all_send_is_deployed(algorithm: Algorithm) -> None:
    outcome = main_round(algorithm, cards(RANKS), equal_training(), weights=WEIGHTS)
    made = deployed(algorithm, outcome)
    assert made is not None
    assert holds(algorithm.traits.equal_clients, gap(made, ideal(outcome, WEIGHTS)))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_zero_weight_means_absence(algorithm: Algorithm) -> None:
    nobody = deployed(algorithm, main_round(algorithm, cards(RANKS), random_training(), weights=WEIGHTS | {"b": 0.0}))
    two = cards({"a": 2, "c": 2})
    absent = deployed(algorithm, main_round(algorithm, two, random_training(), weights={"a": 0.5, "c": 0.2}))
    assert nobody is not None and absent is not None
    assert holds(algorithm.traits.zero_weight, gap(nobody, absent))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_linear_upload_means_that_only_the_weighted_sum_of_uploads_counts(algorithm: Algorithm) -> None:
    shift = {"a": 1 / WEIGHTS["a"], "b": -1 / WEIGHTS["b"], "c": 0.0}

    def tamper(name: str, payload: object) -> object:
        return map_tensors(payload, lambda one: one + shift[name] * 0.4 if one.is_floating_point() else one)

    plain = deployed(algorithm, one_round(algorithm))
    moved = deployed(algorithm, one_round(algorithm, tamper=tamper))
    assert plain is not None and moved is not None
    assert holds(algorithm.traits.linear_upload, gap(moved, plain))


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_what_is_declared_of_products_holds_to_1e_10_where_all_is_in_fp64(algorithm: Algorithm) -> None:
    """Methods whose server casts what it makes to the fp32 of its start are held to what fp32 resolves."""
    facts, members = algorithm.traits, cards(RANKS)
    apart: list[float] = []

    def found(trained: Trained, members: list[Card] = members) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = {card.id: WEIGHTS[card.id] for card in members}
        outcome = main_round(algorithm, members, in_double(trained), weights=weights)
        made = deployed(algorithm, outcome)
        assert made is not None
        parts = [algorithm.global_model(outcome.state), getattr(outcome.state, "base", None)]
        dtypes.update(leaf.dtype for _, leaf in leaves(parts) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        return made, ideal(outcome, weights)

    dtypes: set[torch.dtype] = set()
    made, target = found(random_training())
    if facts.exact:
        apart.append(gap(made, target))
    if facts.best_rank:
        apart.append(gap(made, best(target, max(RANKS.values()))))
    if facts.gauge_invariant:
        apart.append(gap(found(rotated(in_double(random_training())))[0], made))
    if facts.one_client:
        apart.append(gap(*found(random_training(), members[:1])))
    if facts.equal_clients:
        apart.append(gap(*found(equal_training())))
    assert max(apart, default=0.0) <= (1e-10 if torch.float64 in dtypes else TIGHT)


@pytest.mark.parametrize("algorithm", methods(deploying=True))
def test_a_layer_that_only_some_clients_have_is_what_it_is_without_the_others(algorithm: Algorithm) -> None:
    """Whether it is the first or the last client that lacks it."""
    apart = {}
    for lacking in ("a", "c"):
        members = [
            replace(card, layers={"first": card.layers["first"]}) if card.id == lacking else card
            for card in cards(RANKS)
        ]
        holding = [card for card in members if card.id != lacking]
        shares = {card.id: WEIGHTS[card.id] for card in members}
        found = [
            deployed(algorithm, main_round(algorithm, some, random_training(), weights=shares))
            for some in (members, holding)
        ]
        assert found[0] is not None and found[1] is not None and set(found[0]) == {"first", "second"}
        assert float(found[0]["second"].norm()) > LOOSE
        apart[lacking] = gap({"second": found[0]["second"]}, {"second": found[1]["second"]})
    assert max(apart.values()) <= TIGHT


@pytest.mark.parametrize("algorithm", methods())
def test_layers_narrower_than_the_rank_are_met_or_refused_by_name(algorithm: Algorithm) -> None:
    for narrow in (Layer(7, 1), Layer(1, 7)):
        members = cards(RANKS, layers={"narrow": narrow, "second": Layer(6, 6)})
        try:
            first = play(algorithm, members, random_training())
        except ConfigError as told:
            assert "narrow" in str(told)
            continue
        second = play(algorithm, members, random_training(1), state=first.state, memories=first.memories, number=2)
        made = deployed(algorithm, second)
        assert made is None or all(bool(product.isfinite().all()) for product in made.values())


@pytest.mark.parametrize("algorithm", methods())
def test_unequal_ranks_are_met_or_refused_as_declared(algorithm: Algorithm) -> None:
    members = cards({"a": 1, "b": 2, "c": 4})
    if algorithm.traits.ranks == "equal":
        with pytest.raises(ConfigError, match=r"\ba\b.*\bb\b"):
            play(algorithm, members, random_training())
        return
    outcome = play(algorithm, members, random_training())
    wanted = {"server": 4} if algorithm.traits.pools_data else {card.id: card.rank for card in members}
    if all("lora" not in model for model in outcome.fitted.values()):  # cores: as many as the rank pays for
        wide = [sum(term.rank for term in outcome.fitted[name]["core"].values()) for name in sorted(wanted)]
        assert wide == sorted(wide) and wide[0] < wide[-1]
        return
    for name, rank in wanted.items():
        assert all(term.rank == rank for term in outcome.fitted[name]["lora"].values())


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
    outcome = main_round(algorithm, members, random_training(), weights=WEIGHTS)
    made = deployed(algorithm, outcome)
    assert made is not None
    target = ideal(outcome, WEIGHTS)
    if algorithm.traits.best_rank:
        assert gap(made, best(target, 2)) <= TIGHT
    alone = main_round(algorithm, members[2:], random_training())
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
    """In all phases, and in two main rounds, for a site may keep nothing of the first."""
    played = play_phases(algorithm, cards(RANKS), random_training)
    assert any(memory for outcome in played for memory in outcome.memories.values()) == algorithm.traits.keeps_memory


@pytest.mark.parametrize("algorithm", methods())
def test_payload_bytes_equal_the_methods_formula(algorithm: Algorithm) -> None:
    """In every round of every phase."""
    unequal = algorithm.traits.ranks == "unequal"
    found = beside_formula(algorithm, cards({"a": 1, "b": 2, "c": 4} if unequal else RANKS))
    if not algorithm.traits.adaptive_size:
        assert all(sent == told for sent, told in found)
        return
    assert all(sent <= told for sent, told in found) and any(sent < told for sent, told in found)


@pytest.mark.parametrize("algorithm", methods())
def test_payload_bytes_equal_the_methods_formula_in_layers_narrower_than_the_rank(algorithm: Algorithm) -> None:
    for narrow in (Layer(9, 2), Layer(2, 9)):
        members = cards(dict.fromkeys("abc", 4), layers={"narrow": narrow, "second": Layer(6, 6)})
        try:
            found = beside_formula(algorithm, members)
        except ConfigError as told:
            assert "narrow" in str(told)
            continue
        assert all(sent <= told if algorithm.traits.adaptive_size else sent == told for sent, told in found)


def beside_formula(algorithm: Algorithm, members: list[Card]) -> list[tuple[int, int]]:
    """What was sent and what the formula says, each way, of all clients and rounds of a run; nothing to the absent."""
    federation = Federation(tuple(members), 3, server_data(algorithm, members))
    asked, found = algorithm.in_federation(federation), []
    played = play_phases(algorithm, members, fading_training, rounds=3)
    for number, (one, phase) in enumerate(zip(played, schedule(algorithm, 3), strict=True), start=1):
        for card in members:
            formulas = [asked.bytes_of_round(layer, card, number, phase) for layer in card.layers.values()]
            formulas.append(asked.bytes_apart(card, federation))
            sent = size(one.payloads.get(card.id)).payload, size(one.bodies.get(card.id)).payload
            found += zip(sent, map(sum, zip(*formulas, strict=True)), strict=True)
    return found


@pytest.mark.parametrize("algorithm", methods())
def test_the_order_of_clients_changes_no_bit(algorithm: Algorithm) -> None:
    members = cards(RANKS)
    first = play(algorithm, members, random_training(), weights=WEIGHTS)
    second = play(algorithm, list(reversed(members)), random_training(), weights=WEIGHTS)
    assert encode(first.state) == encode(second.state)


@pytest.mark.parametrize("algorithm", methods())
def test_uploads_hold_nothing_but_what_training_made(algorithm: Algorithm) -> None:
    """Positions are no content of their own: they stand beside the values of a sparse tensor."""
    outcome = one_round(algorithm)
    for sent in outcome.payloads.values():
        payload = map_nodes(sent, Sparse, lambda sparse: sparse.values)
        payload = map_nodes(payload, TopLogits, lambda said: (said.logits, said.losses))
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
        assert encode((second.state, second.memories)) != encode((first.state, first.memories))


@pytest.mark.parametrize("algorithm", methods())
def test_data_are_pooled_exactly_as_declared(algorithm: Algorithm) -> None:
    """A reference trains at the server alone and says which data it lacks; a federation does neither."""
    outcome = one_round(algorithm)
    assert (set(outcome.fitted) == {"server"}) == algorithm.traits.pools_data
    assert not algorithm.traits.server_trains or "server" in outcome.fitted
    assert all(phase.clients == "none" for phase in algorithm.phases(3)) == algorithm.traits.pools_data
    if algorithm.traits.pools_data:
        with pytest.raises(ConfigError, match="'pooled"):
            algorithm.start(Federation(tuple(cards(RANKS)), 1), server(0))


def test_the_federation_knows_its_common_scale_and_largest_rank() -> None:
    assert Federation(tuple(cards({"a": 1, "b": 3})), 1).scale == 2.0
    assert Federation(tuple(cards({"a": 1, "b": 3}, scale={"a": 1.0, "b": 2.0})), 1).scale is None
    assert Federation(tuple(cards({"a": 1, "b": 3})), 1).rank == 3
