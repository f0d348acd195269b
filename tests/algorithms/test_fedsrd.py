"""FedSRD: fixtures N11 and N29, both halves against their slow twins, what travels, who missed a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, cards, play, random_training, server
from engines.world import FAST, world
from engines.world import play as play_run
from reference import dense_fedsrd as slow

from algorithms.fixtures import T1_WEIGHTS, card, t1, term
from coterie.algorithms import FedIT, FedSRD, FedSRDe
from coterie.algorithms.fedsrd import State
from coterie.algorithms.pruning import Deltas
from coterie.algorithms.turns import Turns
from coterie.engines.setting import Fault
from coterie.engines.sites import Volatile, load_record
from coterie.engines.traffic import unwrapped
from coterie.errors import ConfigError, ModelError
from coterie.maths.keys import Key, root_key
from coterie.protocol import Card, Client, Layer, LowRank, Model, Sparse, Uploads
from coterie.protocol.messages import Uploaded
from coterie.wire.codec import decode, encode

WHOLE: dict[str, Any] = {"pruning": 0.0, "growth": 0.0, "down_pruning": 0.0}
BOTH = [pytest.param(made, id=made.traits.title) for made in (FedSRD, FedSRDe)]
MEMBERS = cards({"a": 2, "b": 2, "c": 2})


def everywhere(delta: torch.Tensor) -> Sparse:
    return Sparse.at(delta, torch.ones_like(delta, dtype=torch.bool))


def state(lora: LowRank) -> State:
    return State({"w": lora}, Key(0), "", {}, Turns.none())


def aggregated(
    algorithm: FedSRD, start: LowRank, trained: dict[str, LowRank], number: int, weights: dict[str, float] | None = None
) -> LowRank:
    """The pair after clients uploaded all of their deltas."""
    entries = [
        Uploaded(
            card(name, one.rank),
            Deltas({"w": everywhere(one.B - start.B)}, {"w": everywhere(one.A - start.A)}),
            (weights or {}).get(name, 1.0),
        )
        for name, one in trained.items()
    ]
    made: LowRank = algorithm.aggregate(state(start), Uploads(entries), server(number)).lora["w"]
    return made


@pytest.mark.parametrize("made", BOTH)
def test_in_an_even_round_a_moves_so_that_the_product_is_met_exactly(made: type[FedSRD]) -> None:
    """N11: B = (1, 0), A = (1, 0), W = [[1, 1], [0, 0]]: dA = (0, 1)."""
    start, target = term([[1], [0]], [[1, 0]]), term([[1], [0]], [[1, 1]])
    after = aggregated(made(**WHOLE), start, {"1": target}, 2)
    assert torch.allclose(after.A, torch.tensor([[1.0, 1.0]]).double(), atol=1e-12)
    assert torch.equal(after.B, start.B)
    assert torch.allclose(after.product(), target.product(), atol=1e-12)


def test_the_step_is_the_least_squares_solution_of_the_slow_twin() -> None:
    key = root_key(1)

    def drawn(name: str) -> LowRank:
        B, A = key.fold(name, "B").normal((7, 2)).double(), key.fold(name, "A").normal((2, 5)).double()
        return LowRank(B, A)

    start = drawn("start")
    trained = {name: drawn(name) for name in ("1", "2", "3")}
    weights = {"1": 0.5, "2": 0.3, "3": 0.2}
    mean = sum((weights[name] * one.product() for name, one in trained.items()), torch.zeros(7, 5).double())
    for algorithm, W in ((FedSRDe(**WHOLE), mean), (FedSRD(**WHOLE), slow.cut(mean, 2))):
        for number, factor in ((1, "B"), (2, "A")):
            after = aggregated(algorithm, start, trained, number, weights)
            expected = start.parameters[factor] + slow.step(W, start.B, start.A, factor)
            assert torch.allclose(after.parameters[factor], expected, atol=1e-10)
            other = "A" if factor == "B" else "B"
            assert torch.equal(after.parameters[other], start.parameters[other])


def test_fedsrd_reconstructs_the_best_product_of_the_clients_rank() -> None:
    """Error = tail singular energy; on T1 at rank 1 diag(3/4, 0), 1/4 off."""
    products = [(one.B, one.A) for one in t1().values()]
    B, A = FedSRD().reconstructed(products, list(T1_WEIGHTS.values()), 1)
    mean = torch.diag(torch.tensor([0.75, 0.25])).double()
    assert torch.allclose(B @ A, torch.diag(torch.tensor([0.75, 0.0])).double(), atol=1e-12)
    assert float((B @ A - mean).norm()) == pytest.approx(0.25, abs=1e-9)


@pytest.mark.parametrize("made", BOTH)
def test_where_only_b_was_trained_and_nothing_is_left_out_it_is_fedit(made: type[FedSRD]) -> None:
    """A has full row rank, so the step in B meets the mean of the products, which has rank r: B + dB = mean B_i."""

    def only_b(name: str, model: Model) -> Model:
        trained = random_training()(name, model).parameters
        return model.with_parameters({part: value for part, value in trained.items() if part.endswith(".B")})

    mine = play(made(**WHOLE), MEMBERS, only_b).state.lora
    averaged = play(FedIT(), MEMBERS, only_b).state.lora
    for name, one in mine.items():
        assert torch.allclose(one.product(), averaged[name].product(), atol=1e-5)
        assert torch.equal(one.A, averaged[name].A)


def test_a_first_round_in_a_is_lost_since_b_is_zero() -> None:
    """As in the released code; a first round in B is not."""
    literal, mended = (play(FedSRDe(first=first, **WHOLE), MEMBERS, random_training()) for first in ("A", "B"))
    for name in LAYERS:
        before = literal.before.lora[name]
        assert torch.equal(literal.state.lora[name].A, before.A) and torch.equal(literal.state.lora[name].B, before.B)
        assert float(mended.state.lora[name].B.norm()) > 0


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_client_sends_its_important_entries_scaled_to_the_l1_norm_of_all(symmetric: bool) -> None:
    outcome = play(FedSRD(symmetric=symmetric), MEMBERS, random_training())
    for client, payload in outcome.payloads.items():
        for name, own in outcome.fitted[client]["lora"].items():
            start = outcome.before.lora[name]
            dB, dA = (own.B - start.B).double(), (own.A - start.A).double()
            beside = own.A if symmetric else start.A
            for sent, delta, other, factor in ((payload.B, dB, beside, "B"), (payload.A, dA, own.B, "A")):
                weight = slow.importance(delta, other.double(), factor)
                share = slow.ratio(weight, 0.85, 0.1, 0.11)
                expected = slow.sparsified(delta, weight, share)
                assert torch.allclose(sent[name].dense().double(), expected, rtol=1e-5)
                assert float(sent[name].values.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-5)


def test_without_pruning_the_whole_deltas_travel() -> None:
    outcome = play(FedSRD(**WHOLE), MEMBERS, random_training())
    for client, payload in outcome.payloads.items():
        for name, own in outcome.fitted[client]["lora"].items():
            start = outcome.before.lora[name]
            assert torch.equal(payload.B[name].dense(), own.B - start.B)
            assert torch.equal(payload.A[name].dense(), own.A - start.A)


def test_the_server_sends_a_random_part_of_the_step_divided_by_what_it_keeps() -> None:
    """The mean over masks is the step itself."""
    whole = play(FedSRDe(pruning=0.0, growth=0.0, down_pruning=0.0), MEMBERS, random_training())
    part = play(FedSRDe(pruning=0.0, growth=0.0, down_pruning=0.75), MEMBERS, random_training())
    for name, delta in part.state.delta.items():
        step = whole.state.delta[name].dense()
        kept = delta.mask
        assert int(kept.sum()) == max(1, round(0.25 * step.numel()))
        assert torch.allclose(delta.dense()[kept], step[kept] * step.numel() / int(kept.sum()), rtol=1e-5)


@pytest.mark.parametrize("made", BOTH)
def test_every_site_has_the_servers_pair_to_the_bit_whatever_it_missed(made: type[FedSRD]) -> None:
    store = Volatile()
    faults = (Fault("c1", 2, "exception"), Fault("c2", 2, "late"))
    run = world(made(), ranks=(4, 4, 4), rounds=5, store=store, faults=faults, train=replace(FAST, lr=1e-3))
    for played in run.rounds(run.begin()):
        state = played.progress.state
        for name, one in run.cards.items():
            client = Client(one, load_record(store, name).memory, (), lambda purpose: Key(0), 1, "main")
            found = run.algorithm.site_model(client, unwrapped(run.algorithm.send(state, one)))["lora"]
            assert encode(found) == encode(state.lora)


@pytest.mark.parametrize("made", BOTH)
def test_with_pruning_too_strict_mode_and_going_on_change_no_bit(made: type[FedSRD]) -> None:
    fields: dict[str, Any] = {"ranks": (4, 4, 4), "train": replace(FAST, optimizer="adamw", lr=1e-3), "sample": 2}
    loose = play_run(world(made(), **fields))
    strict = play_run(world(made(), strict=True, **fields))
    assert [p.metrics for p in loose] == [p.metrics for p in strict]
    store = Volatile()
    run = world(made(), store=store, **fields)
    first = next(run.rounds(run.begin()))
    *_, last = world(made(), store=store, **fields).rounds(decode(encode(first.progress)))
    assert encode(last.progress) == encode(loose[-1].progress)


def test_who_missed_a_round_gets_whole_factors_and_others_one_sparse_delta() -> None:
    outcome = play(FedSRD(), MEMBERS, random_training())
    later = play(
        FedSRD(),
        MEMBERS[:2],
        random_training(1),
        state=outcome.state,
        memories=outcome.memories,
        number=2,
    )
    present, absent, stranger = (
        FedSRD().send(later.state, one) for one in (*MEMBERS[1:], replace(MEMBERS[2], id="stranger"))
    )
    assert set(present.deltas) == {"A"} and not present.factors
    assert not absent.deltas and set(absent.factors) == {"B", "A"}
    assert not stranger.deltas and set(stranger.factors) == {"B", "A"}
    first = FedSRD().send(outcome.before, MEMBERS[0])
    assert not first.deltas and not first.factors


def test_byte_formulas_at_the_default_shares() -> None:
    """768 x 768 at rank 8: 6144 entries of each factor; 922 and 614 of them are sent, with 768 bytes of bits."""
    one = Card("a", 8, 1, 1.0, {"w": Layer(768, 768)})
    assert FedSRD().bytes_up(one.layers["w"], one) == 2 * (922 * 4 + 768)
    assert FedSRD().bytes_down(one.layers["w"], one) == 614 * 4 + 768
    assert FedSRD().bytes_of_round(one.layers["w"], one, 1, *FedSRD().phases(1))[1] == 0
    assert FedSRD(down_pruning=0.98).bytes_down(one.layers["w"], one) == 123 * 8
    saved = FedSRD().bytes_up(one.layers["w"], one) / FedIT().bytes_up(one.layers["w"], one)
    assert 0.15 < saved < 0.2


def test_what_the_engine_books_is_what_the_formula_says_at_most() -> None:
    run = world(FedSRD(), ranks=(4, 4, 4), rounds=3)
    play_run(run)
    algorithm, layers = run.algorithm, run.cards["c0"].layers.values()
    rows = [row for row in run.ledger.rows() if row["client"] == "c0" and row["kind"] == "message"]
    for row in rows:
        both = [algorithm.bytes_of_round(layer, run.cards["c0"], row["round"], run.schedule[0]) for layer in layers]
        if row["direction"] == "down":
            assert row["payload"] == sum(down for _, down in both)
        else:
            assert 0.4 * sum(up for up, _ in both) < row["payload"] <= sum(up for up, _ in both)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="pruning"):
        FedSRD(pruning=1.0)
    with pytest.raises(ModelError, match="client a: an upload must be one sparse dB"):
        FedSRD().check(None, MEMBERS[0])
    with pytest.raises(ConfigError, match="FedSRD-e needs one rank"):
        play(FedSRDe(), cards({"a": 1, "b": 2}), random_training())
