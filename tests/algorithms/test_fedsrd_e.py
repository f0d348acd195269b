"""FedSRD-e: FedSRD to the bit where the mean product has rank r, and nearer to it where it has more."""

from __future__ import annotations

from typing import Any

import torch
from conformance.harness import cards, equal_training, ideal, play, random_training

from algorithms.fixtures import T1_WEIGHTS, t1
from coterie.algorithms import FedSRD, FedSRDe
from coterie.wire.codec import encode

WHOLE: dict[str, Any] = {"pruning": 0.0, "growth": 0.0, "down_pruning": 0.0}
MEMBERS = cards({"a": 2, "b": 2, "c": 2})


def test_the_mean_of_the_products_is_kept_as_it_is() -> None:
    """On T1 at rank 1, where FedSRD loses the smaller direction."""
    pairs = [(one.B, one.A) for one in t1().values()]
    B, A = FedSRDe().reconstructed(pairs, list(T1_WEIGHTS.values()), 1)
    torch.testing.assert_close(B @ A, torch.diag(torch.tensor([0.75, 0.25])).double(), rtol=0, atol=1e-12)
    B, A = FedSRD().reconstructed(pairs, list(T1_WEIGHTS.values()), 1)
    torch.testing.assert_close(B @ A, torch.diag(torch.tensor([0.75, 0.0])).double(), rtol=0, atol=1e-12)


def test_where_all_clients_agree_there_is_nothing_to_cut_and_it_is_fedsrd() -> None:
    mine, theirs = (play(made(**WHOLE), MEMBERS, equal_training()).state.lora for made in (FedSRDe, FedSRD))
    for name, one in mine.items():
        torch.testing.assert_close(one.B, theirs[name].B, rtol=1e-5, atol=1e-5)


def test_where_clients_differ_its_step_comes_nearer_to_the_mean_product() -> None:
    """Both are least squares in B; FedSRD's is towards a matrix that is not the mean."""
    apart = {}
    for made in (FedSRDe, FedSRD):
        outcome = play(made(**WHOLE), MEMBERS, random_training())
        mean = ideal(outcome, dict.fromkeys("abc", 1.0))
        apart[made] = sum(float((one.product() - mean[name]).norm()) for name, one in outcome.state.lora.items())
    assert apart[FedSRDe] < 0.99 * apart[FedSRD]


def test_clients_send_the_same_bytes_as_in_fedsrd() -> None:
    first, second = (play(made(), MEMBERS, random_training()) for made in (FedSRDe, FedSRD))
    assert encode(first.payloads) == encode(second.payloads)
    layer = MEMBERS[0].layers["first"]
    assert FedSRDe().bytes_up(layer, MEMBERS[0]) == FedSRD().bytes_up(layer, MEMBERS[0])
