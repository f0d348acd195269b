"""Fed-RAC-LoRA: fixture N14, exactness, new random factors every round, a chain that any holder of the log replays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import LAYERS, cards, play, random_training
from engines.world import base, world
from engines.world import play as play_run

from coterie.algorithms import FedRACLoRA
from coterie.algorithms.fed_rac_lora import State
from coterie.engines.setting import Fault
from coterie.errors import ModelError
from coterie.maths.keys import Key, root_key
from coterie.protocol import BaseLog, Card, Layer, LowRank, SeededPatch, Server, Uploads, as_adapters
from coterie.protocol.base_log import drawn_factor
from coterie.protocol.messages import Uploaded
from coterie.wire.codec import decode, encode, size

SQUARE = {"w": Layer(2, 2)}


def at_round(number: int) -> Server:
    return Server((), lambda purpose: Key(0), number, "main")


def merged(factors: list[torch.Tensor], sides: str, scale: float) -> tuple[SeededPatch, LowRank]:
    """What equally weighted clients' trained factors add to a 2 x 2 layer, as sent and as factors."""
    entries = [
        Uploaded(Card(str(number), 1, 1, scale, SQUARE), {"w": factor}, 1.0) for number, factor in enumerate(factors)
    ]
    made = FedRACLoRA(sides=sides).aggregate(State(Key(1)), Uploads(entries), at_round(1))  # type: ignore[arg-type]
    (patch,) = made.base.patches
    assert isinstance(patch, SeededPatch)
    return patch, patch.adapter()["w"]


def test_the_merge_is_s_times_the_random_factor_times_the_mean() -> None:
    """N14: B_S = (1, 1), A_1 = (1, 0), A_2 = (0, 1), s = 2 adds the all-ones matrix; with a drawn B_S too."""
    _, term = merged([torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])], "A", 2.0)
    assert torch.equal(term.A, torch.tensor([[0.5, 0.5]]))
    assert torch.equal(term.product(), term.B @ torch.tensor([[1.0, 1.0]]))
    ones = replace(term, B=torch.ones(2, 1))
    assert torch.equal(ones.product(), torch.ones(2, 2))


def test_trained_b_is_merged_beside_a_random_a() -> None:
    _, term = merged([torch.tensor([[2.0], [0.0]]), torch.tensor([[0.0], [2.0]])], "B", 3.0)
    assert torch.equal(term.product(), 3.0 * torch.ones(2, 1) @ term.A)


def test_a_step_with_b_frozen_reaches_the_projection_of_the_target_on_its_columns() -> None:
    """H = B_S (B_S' B_S)^-1 B_S', of which the theory needs E[H] = (r / m) I; for B_S = (1, 1), all entries are 1/2."""
    ones = torch.ones(2, 1, dtype=torch.float64)
    target = torch.tensor([[3.0, -1.0], [1.0, 5.0]], dtype=torch.float64)
    reached = ones @ torch.linalg.lstsq(ones, target).solution
    assert torch.allclose(reached, torch.full((2, 2), 0.5, dtype=torch.float64) @ target, atol=1e-12)
    for distribution in ("gaussian", "uniform"):
        mean = torch.zeros(4, 4, dtype=torch.float64)
        for number in range(4000):
            B = drawn_factor(root_key(number), 1, 4, distribution).mT.double()
            mean += B @ torch.linalg.pinv(B) / 4000
        assert torch.allclose(mean, torch.eye(4, dtype=torch.float64) / 4, atol=0.02)


def test_random_factors_have_the_variance_that_is_said() -> None:
    for distribution, variance in (("gaussian", 1 / 64), ("uniform", 1 / (3 * 64))):
        drawn = drawn_factor(root_key(2), 200, 64, distribution)
        assert drawn.shape == (200, 64) and drawn.dtype == torch.float32
        assert float(drawn.double().var()) == pytest.approx(variance, rel=0.05)
    assert float(drawn.abs().max()) <= 1 / 8


@pytest.mark.parametrize("sides", ["A", "B", "random"])
def test_what_is_merged_is_the_mean_of_the_clients_products(sides: str) -> None:
    algorithm = FedRACLoRA(sides=sides)  # type: ignore[arg-type]
    outcome = play(algorithm, cards({"a": 2, "b": 2, "c": 2}), random_training())
    (patch,) = as_adapters(outcome.state.base.patches)
    for name in LAYERS:
        mean = sum(outcome.fitted[client]["lora"][name].product().double() for client in "abc") / 3
        assert torch.allclose(patch[name].product().double(), mean, atol=1e-6)


def test_every_round_trains_one_factor_from_zero_beside_a_new_random_one() -> None:
    algorithm, members = FedRACLoRA(), cards({"a": 2, "b": 2})
    seen: dict[int, LowRank] = {}
    outcome = None
    for number in range(1, 7):

        def entered(name: str, model: object, number: int = number) -> object:
            seen[number] = model["lora"]["first"]  # type: ignore[index]
            return random_training()(name, model)  # type: ignore[arg-type]

        outcome = play(algorithm, members, entered, number=number, state=outcome.state if outcome else None)  # type: ignore[arg-type]
    sides = [algorithm.side(number) for number in seen]
    assert set(sides) == {"A", "B"}
    for number, term in seen.items():
        assert float(term.parameters[algorithm.side(number)].norm()) == 0.0
        other = "B" if algorithm.side(number) == "A" else "A"
        drawn = term.parameters[other]
        assert float(drawn.norm()) > 0
        same = [n for n in seen if n != number and algorithm.side(n) == algorithm.side(number)]
        assert not any(torch.equal(drawn, seen[n].parameters[other]) for n in same)


def test_both_sides_are_drawn_about_equally_often_unless_one_is_fixed() -> None:
    drawn = [FedRACLoRA().side(number) for number in range(1, 1001)]
    assert 440 < drawn.count("A") < 560
    assert {FedRACLoRA(sides="B").side(number) for number in range(1, 50)} == {"B"}
    assert drawn != [FedRACLoRA(seed=1).side(number) for number in range(1, 1001)]


def test_replaying_seeds_and_means_on_a_fresh_base_gives_the_same_weights_to_the_bit() -> None:
    run = world(FedRACLoRA(), ranks=(4, 4, 4), rounds=4)
    log = play_run(run)[-1].progress.state.base
    fresh = base()
    before = {name: fresh.weight(name) for name in fresh.layers}
    fresh.set_log(decode(encode(log)))
    for name in fresh.layers:
        assert torch.equal(fresh.weight(name), run.executor.bases["base"].weight(name))
        assert not torch.equal(fresh.weight(name), before[name])
    fresh.set_log(BaseLog())
    assert all(torch.equal(fresh.weight(name), before[name]) for name in fresh.layers)


def test_down_go_the_mean_of_the_trained_factor_and_eight_bytes_for_the_random_one() -> None:
    algorithm = FedRACLoRA()
    run = world(algorithm, ranks=(4, 4, 4), rounds=3, faults=(Fault("c1", 1, "exception"), Fault("c1", 2, "exception")))
    play_run(run)
    rows = [row for row in run.ledger.rows() if row["direction"] == "down" and row["client"] in ("c0", "c1")]
    card = run.cards["c0"]

    def mean_of(number: int) -> int:
        sent = [algorithm.bytes_of_round(layer, card, number, run.schedule[0]) for layer in card.layers.values()]
        return sum(up for up, _ in sent) + 8

    def booked(client: str, kind: str) -> list[tuple[int, int]]:
        return [(r["round"], r["payload"]) for r in rows if r["client"] == client and r["kind"] == kind]

    assert booked("c0", "base") == [(2, mean_of(1)), (3, mean_of(2))]
    assert booked("c1", "base")[-2:] == [(3, mean_of(1)), (3, mean_of(2))]  # it committed neither before
    assert booked("c0", "setup") == [(1, 8)] and {payload for _, payload in booked("c0", "message")} == {0}


def test_the_byte_formula_is_half_of_both_factors_on_average() -> None:
    card = Card("a", 4, 1, 1.0, {"w": Layer(1024, 768)})
    layer = card.layers["w"]
    assert FedRACLoRA().bytes_up(layer, card) == 4 * (1024 + 768) * 4 // 2
    assert FedRACLoRA(sides="A").bytes_up(layer, card) == 4 * 768 * 4
    assert FedRACLoRA(sides="B").bytes_up(layer, card) == 4 * 1024 * 4
    assert size(merged([torch.zeros(1, 2)], "A", 1.0)[0]).payload == 2 * 4 + 8


def test_who_uploads_the_factor_of_another_round_counts_for_nothing() -> None:
    both = [torch.tensor([[1.0, 0.0]]), torch.ones(2, 1)]
    assert torch.equal(merged(both, "A", 1.0)[1].A, both[0]) and torch.equal(merged(both, "B", 1.0)[1].B, both[1])
    alone = Uploads([Uploaded(Card("1", 1, 1, 1.0, SQUARE), {"w": both[1]}, 1.0)])
    assert FedRACLoRA(sides="A").aggregate(State(Key(1)), alone, at_round(1)).base.version == 0


def test_an_upload_of_other_shapes_is_refused() -> None:
    (card,) = cards({"a": 2})
    with pytest.raises(ModelError, match=r"client a: an upload must be one A \(2, n\), or one B \(m, 2\)"):
        FedRACLoRA().check({"first": torch.zeros(2, 5), "second": torch.zeros(6, 2)}, card)
