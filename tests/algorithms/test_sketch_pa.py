"""Sketch-PA: FedPA-LoRA's clients, SeFoRA's messages, and half of each one's invariants."""

from __future__ import annotations

import inspect

import pytest
import torch
from conformance.harness import best, cards, dense, gap, ideal, play, random_training, server
from engines.world import play as play_run
from engines.world import world

from coterie.algorithms import FedPALoRA, LocalOnly, SketchPA
from coterie.algorithms.factors import kept_factors
from coterie.algorithms.sketches import Sketch
from coterie.engines.sites import Volatile, load_record
from coterie.engines.traffic import unwrapped
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.maths.keys import root_key
from coterie.protocol import Card, Client, Federation, Layer, LowRank, Memory, Model, ProductDistance, copied
from coterie.protocol.messages import leaves
from coterie.wire.codec import encode, size

LAYERS = {"first": Layer(40, 30), "second": Layer(32, 32)}


def test_the_method_is_readable_in_under_80_lines() -> None:
    assert len(inspect.getsource(SketchPA).splitlines()) < 80


def test_the_reference_is_fedpa_lora_s_where_the_sketch_holds_the_whole_mean_product() -> None:
    """Three clients of rank 2: the mean product has rank 6 = 3 R, all that Omega's columns need to see."""
    members = cards({"a": 2, "b": 2, "c": 2}, layers=LAYERS)
    ours, theirs = (play(method, members, random_training()) for method in (SketchPA(), FedPALoRA()))
    for layer, term in theirs.state.reference.items():
        assert gap({layer: dense(ours.state.reference[layer])}, {layer: dense(term)}) < 1e-5


def test_beyond_the_sketch_the_reference_is_near_the_best_and_no_better() -> None:
    members = cards(dict.fromkeys("abcdefgh", 2), layers=LAYERS)
    outcome = play(SketchPA(), members, random_training())
    whole = ideal(outcome, dict.fromkeys("abcdefgh", 1.0))
    for layer, one in best(whole, 2).items():
        least = float((one - whole[layer]).norm())
        lost = float((dense(outcome.state.reference[layer]) - whole[layer]).norm())
        assert least < lost < 1.2 * least


def test_references_nest_and_each_client_downloads_its_own_rank() -> None:
    members = [Card(name, 3, 1, 2.0, LAYERS, reference_rank=R) for name, R in (("a", 1), ("b", 2), ("c", 4))]
    outcome = play(SketchPA(), members, random_training())
    for one in members:
        sent = SketchPA().send(outcome.state, one)
        for layer, term in sent.reference.items():
            whole = outcome.state.reference[layer]
            assert term.rank == one.reference_rank and torch.equal(term.B, whole.B[:, : term.rank])
            assert torch.allclose(whole.A @ whole.A.mT, torch.eye(4), atol=1e-6)
            S = torch.linalg.svdvals(dense(whole)) / 2.0
            assert torch.allclose(whole.B.double().norm(dim=0), S[:4], rtol=1e-5)


def test_factors_entering_a_round_are_bitwise_those_that_left_the_last_one() -> None:
    members = cards({"a": 1, "b": 4}, layers=LAYERS)
    first = play(SketchPA(), members, random_training())
    entered: dict[str, Model] = {}

    def watch(name: str, model: Model) -> Model:
        entered[name] = model
        return random_training(1)(name, model)

    play(SketchPA(), members, watch, state=first.state, memories=first.memories, number=2)
    for name, model in entered.items():
        assert encode(model["lora"]) == encode(first.fitted[name]["lora"])


def test_no_factor_travels_up_and_unequal_ranks_send_equal_shapes() -> None:
    outcome = play(SketchPA(), cards({"a": 1, "b": 4}, layers=LAYERS), random_training())
    shapes = {name: [tuple(leaf.shape) for _, leaf in leaves(payload)] for name, payload in outcome.payloads.items()}
    assert shapes["a"] == shapes["b"] == [(40, 12), (24, 30), (32, 12), (24, 32)]
    for name, payload in outcome.payloads.items():
        assert all(type(one) is Sketch and not isinstance(one, LowRank) for one in payload.values())
        sent = [leaf for _, leaf in leaves(payload)]
        for term in outcome.fitted[name]["lora"].values():
            for factor in term.parameters.values():
                assert not any(leaf.shape == factor.shape and torch.equal(leaf, factor) for leaf in sent)


def test_the_alignment_is_fedpa_lora_s() -> None:
    members = cards({"a": 2, "b": 2}, layers=LAYERS)
    method = SketchPA(lam=3.0)
    state = play(method, members, random_training()).state
    download = unwrapped(method.send(state, members[0]))
    client = Client(members[0], Memory({}, copied), ("train",), root_key(0).fold, 2, "main")
    fit = next(method.local(client, download))  # type: ignore[arg-type]
    (penalty,) = fit.penalties
    assert isinstance(penalty, ProductDistance) and penalty.weight == 1.5
    assert encode(penalty.reference) == encode(download.reference)
    assert encode(fit.initial["lora"]) == encode(kept_factors(client, download.init_key))


def test_without_alignment_every_client_trains_alone() -> None:
    stores = {}
    for method in (SketchPA(lam=0.0), LocalOnly()):
        stores[type(method)] = Volatile()
        play_run(world(method, store=stores[type(method)], head="local"))
    for name in ("c0", "c1", "c2"):
        mine, alone = (load_record(store, name) for store in stores.values())
        assert encode(mine.memory) == encode(alone.memory)


def test_bytes_are_3R_m_plus_6R_n_and_never_more_than_a_layer_is_wide_or_high() -> None:
    one = cards({"a": 4})[0]
    assert SketchPA().bytes_up(Layer(1024, 768), one) == (12 * 1024 + 24 * 768) * 4
    assert SketchPA(columns=2, rows=3).bytes_up(Layer(1024, 768), one) == (8 * 1024 + 12 * 768) * 4
    assert SketchPA().bytes_up(Layer(20, 10), one) == (10 * 20 + 20 * 10) * 4
    assert SketchPA().bytes_down(Layer(1024, 768), one) == FedPALoRA().bytes_down(Layer(1024, 768), one)
    mixed = (Card("a", 8, 1, 1.0, LAYERS, reference_rank=2), Card("b", 1, 1, 1.0, LAYERS, reference_rank=4))
    assert (
        SketchPA().in_federation(Federation(mixed, 1)).bytes_up(Layer(1024, 768), mixed[0])
        == (12 * 1024 + 24 * 768) * 4
    )


def test_references_have_their_clients_ranks_in_narrow_layers_and_with_a_larger_r() -> None:
    layers = {"narrow": Layer(9, 2), "second": Layer(32, 32)}
    members = [Card(name, 3, 1, 2.0, layers, reference_rank=R) for name, R in (("a", 1), ("b", 4))]
    for method in (SketchPA(), SketchPA(rank=6)):
        first = play(method, members, random_training())
        second = play(method, members, random_training(1), state=first.state, memories=first.memories, number=2)
        for outcome in (first, second):
            for one in members:
                down = sum(method.bytes_down(layer, one) for layer in layers.values())
                assert size(outcome.bodies[one.id]).payload == down
        made = second.state.reference["narrow"]
        assert made.rank == first.state.rank and not made.B[:, 2:].any() and not made.A[2:].any()


def test_an_r_below_a_reference_rank_is_refused() -> None:
    members = (Card("a", 8, 1, 1.0, LAYERS, reference_rank=2), Card("b", 1, 1, 1.0, LAYERS, reference_rank=4))
    with pytest.raises(ConfigError, match=r"^rank must be at least 4, the largest reference rank, not 3$"):
        SketchPA(rank=3).start(Federation(members, 1), server(0))
    assert SketchPA(rank=4).start(Federation(members, 1), server(0)).rank == 4


def test_nothing_trained_leaves_a_zero_reference() -> None:
    outcome = play(SketchPA(), cards({"a": 2, "b": 2}, layers=LAYERS), lambda name, model: model)
    for term in outcome.state.reference.values():
        assert not term.B.any() and bool(torch.isfinite(term.A).all())


def test_a_run_measures_error_tail_and_bound_beside_fedpa_lora_s_terms() -> None:
    played = play_run(world(SketchPA(), ranks=(2, 4, 4), rounds=2))
    for one in played:
        told = one.metrics["measures"]
        assert set(told) == {"truncation_delta", "regulariser", "sketch_error", "tail_energy", "sketch_bound"}
        # Ranks 2 + 4 + 4 are below the 12 columns: sketches lose nothing, truncation to R = 4 all that there is.
        assert told["sketch_bound"] < 1e-6
        assert told["sketch_error"] == pytest.approx(told["tail_energy"], rel=1e-3) and told["tail_energy"] > 0


def test_options_out_of_range_are_told() -> None:
    with pytest.raises(ConfigError, match=r"columns \(6\) must be at least 1 and below rows \(6\)"):
        algorithm("sketch-pa", {"columns": 6})
    with pytest.raises(ConfigError, match="no option 'reconstruction'"):
        algorithm("sketch-pa", {"reconstruction": "exact"})
    with pytest.raises(ConfigError, match="scale"):
        SketchPA().start(Federation(tuple(cards({"a": 1, "b": 2}, scale={"a": 1.0, "b": 2.0})), 1), server(0))
