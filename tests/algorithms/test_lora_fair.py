"""LoRA-FAIR and its closed form: N5 through the server, A untouched, limits, the cosine that it raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import cards, deployed, gap, play, random_training, server
from engines.world import play as play_run
from engines.world import world

from algorithms.fixtures import T1_WEIGHTS, t1, term, uploads
from coterie.algorithms import FedIT, LoRAFAIR, LoRAFAIRClosed
from coterie.algorithms.lora_fair import State
from coterie.protocol import Federation, LowRank, Model, Seen

MEMBERS = cards({"a": 1, "b": 2, "c": 4})
BOTH = [LoRAFAIR, LoRAFAIRClosed]


def corrected(algorithm: LoRAFAIR, sent: Any) -> LowRank:
    zero = torch.zeros(2, 1, dtype=torch.float64)
    made: LowRank = algorithm.aggregate(State({"w": LowRank(zero, zero.mT)}), sent, server()).lora["w"]
    return made


def test_n5_b_turns_towards_0_9_0_1_while_a_stays_the_mean() -> None:
    sent = uploads(t1(), T1_WEIGHTS)
    cosine = corrected(LoRAFAIR(lam=1e-9), sent)
    assert torch.allclose(cosine.B.flatten(), torch.tensor([0.768293, 0.085366]).double(), atol=1e-6)
    closed = corrected(LoRAFAIRClosed(lam=0.0), sent)
    assert torch.allclose(closed.B.flatten(), torch.tensor([0.9, 0.1]).double())
    for made in (cosine, closed):
        assert torch.equal(made.A, torch.tensor([[0.75, 0.25]]).double())


@pytest.mark.parametrize("kind", BOTH)
def test_a_large_lam_is_fedit(kind: type[LoRAFAIR]) -> None:
    fair, fedit = (deployed(a, play(a, MEMBERS, random_training())) for a in (kind(lam=1e12), FedIT()))
    assert fair is not None and fedit is not None and gap(fair, fedit) < 1e-6


@pytest.mark.parametrize("kind", BOTH)
def test_only_b_is_corrected_and_it_brings_the_product_nearer_in_angle(kind: type[LoRAFAIR]) -> None:
    members = cards({"a": 2, "b": 2, "c": 2})
    fair, fedit = (play(a, members, random_training()) for a in (kind(), FedIT()))
    federation = Federation(tuple(members), 1)
    seen = {name: Seen(1 / 3, model, None) for name, model in fair.fitted.items()}
    cosine = {
        type(a): LoRAFAIR().measures(s, federation, seen)["cosine"]
        for a, s in ((kind(), fair.state), (FedIT(), fedit.state))
    }
    assert cosine[kind] > cosine[FedIT] + 0.01
    for name, one in fair.state.lora.items():
        assert torch.equal(one.A, fedit.state.lora[name].A) and not torch.equal(one.B, fedit.state.lora[name].B)


@pytest.mark.parametrize("kind", BOTH)
def test_unequal_scales_count_in_the_products(kind: type[LoRAFAIR]) -> None:
    """A client of scale 3 with B / 3 is a client of scale 1 with B."""
    plain = t1()
    other = plain | {"2": term([[0], [1 / 3]], [[0, 1]], scale=3.0)}
    made = [corrected(kind(), uploads(terms, T1_WEIGHTS)) for terms in (plain, other)]
    assert torch.allclose(made[0].product(), made[1].product())


def test_a_real_run_shows_its_cosine_which_is_not_below_fedits() -> None:
    fair, fedit = (play_run(world(a, ranks=(4, 4, 4), rounds=1))[0] for a in (LoRAFAIR(), FedIT()))
    seen = fair.metrics["measures"]["cosine"]
    assert 0 < seen <= 1
    assert fair.metrics["mismatch"]["relative"] <= fedit.metrics["mismatch"]["relative"] * (1 + 1e-3)


def test_nobody_seen_means_no_cosine() -> None:
    state = play(LoRAFAIR(), MEMBERS, random_training()).state
    assert LoRAFAIR().measures(state, Federation(tuple(MEMBERS), 1), {}) == {}
    empty = {"a": Seen(1.0, None, None)}
    assert LoRAFAIR().measures(state, Federation(tuple(MEMBERS), 1), empty) == {}
    small = {"a": Seen(1.0, Model(lora={}), None)}
    assert LoRAFAIR().measures(state, Federation(tuple(MEMBERS), 1), small) == {}


@pytest.mark.parametrize("kind", BOTH)
def test_a_lam_below_zero_is_refused(kind: type[LoRAFAIR]) -> None:
    with pytest.raises(ValueError, match="lam must be at least 0, not -1"):
        kind(lam=-1.0)


def test_up_and_down_are_fedits() -> None:
    for card in MEMBERS:
        for layer in card.layers.values():
            assert LoRAFAIR().bytes_up(layer, card) == FedIT().bytes_up(layer, card)
            assert LoRAFAIR().bytes_down(layer, card) == FedIT().bytes_down(layer, card)
