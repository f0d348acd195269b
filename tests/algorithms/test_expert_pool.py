"""What travels between FedSEE's server and its clients: checks, and the model that it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, Outcome, cards, play_phases, random_training

from coterie.algorithms import FedSEE
from coterie.algorithms.expert_pool import Download, routed_model
from coterie.errors import ModelError
from coterie.maths.keys import root_key

QUICK = FedSEE(steps=5, examples=8)


def rounds() -> list[Outcome]:
    return play_phases(QUICK, cards(dict.fromkeys("abc", 2)), random_training, 2)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (lambda sent: replace(sent, blocks={}), "1 to 1 blocks of 3 experts expected, not of"),
        (lambda sent: replace(sent, blocks={3: next(iter(sent.blocks.values()))}), "not of .3."),
        (lambda sent: replace(sent, blocks=dict.fromkeys((0, 1), next(iter(sent.blocks.values())))), "not of .0, 1."),
        (lambda sent: replace(sent, blocks={0: {"first": torch.zeros(7, 2)}}), "the block of expert 0 must be"),
        (lambda sent: replace(sent, common=replace(sent.common, shared={})), "one term for each of 2 layers"),
        (lambda sent: replace(sent, common=replace(sent.common, router={})), "routers of every layer"),
        (
            lambda sent: replace(sent, common=replace(sent.common, bias=dict.fromkeys(LAYERS, torch.zeros(4)))),
            "routers of every layer",
        ),
    ],
)
def test_an_upload_that_does_not_fit_is_named(spoilt: Any, said: str) -> None:
    card, sent = cards({"a": 2})[0], rounds()[1].payloads["a"]
    QUICK.check(sent, card)
    with pytest.raises(ModelError, match=f"client a: .*{said}"):
        QUICK.check(spoilt(sent), card)


def test_a_client_may_send_as_many_blocks_as_its_card_says_before_the_method_does() -> None:
    card, sent = cards({"a": 2})[0], rounds()[1].payloads["a"]
    two = replace(sent, blocks=dict.fromkeys((0, 1), next(iter(sent.blocks.values()))))
    QUICK.check(two, replace(card, trained_experts=2))
    for algorithm, most in ((replace(QUICK, training=2), 1), (QUICK, 0)):
        with pytest.raises(ModelError, match=f"client a: 1 to {most} blocks of 3 experts expected, not of .0, 1."):
            algorithm.check(two, replace(card, trained_experts=most))


def test_a_fixed_mixture_is_what_a_router_blind_to_its_input_makes() -> None:
    """p(x) = softmax(b) for every x: the routed term is the static adapter sum_m p_m B_m A^global."""
    download: Download = rounds()[2].downloads["a"]
    assert download.common is not None
    blind = replace(download.common, router={name: torch.zeros_like(r) for name, r in download.common.router.items()})
    card = cards({"a": 2})[0]
    x = root_key(3).normal((5, LAYERS["first"].d_in))
    term = routed_model(card, download, blind)["experts"]["first"]
    p = blind.bias["first"].softmax(dim=0)
    mixed = sum(p[m] * download.experts[m]["first"] for m in range(3))
    assert torch.allclose(term.apply(x), card.scale * x @ (mixed @ download.A["first"]).T, atol=1e-5)  # type: ignore[operator]
