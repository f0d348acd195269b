"""FLoRA with rank updates: FLoRA without one, shrunk pairs in the stack, ranks that stay at the site."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.harness import LAYERS, Outcome, best, cards, dense, deployed, gap, ideal, play, random_training

from algorithms.test_rank_update import decaying
from coterie.algorithms import FLoRA, FLoRAAdaptive
from coterie.algorithms.rank_update import ranks_of
from coterie.protocol import Federation, Seen, as_adapters

MEMBERS = cards({"a": 2, "b": 4})


def following(method: FLoRAAdaptive, before: Outcome | None, number: int, training: Any) -> Outcome:
    last: dict[str, Any] = {} if before is None else {"state": before.state, "memories": before.memories}
    return play(method, MEMBERS, training, number=number, **last)


def first_ranks(models: dict[str, Any]) -> dict[str, int]:
    return {name: ranks_of(one)["first"] for name, one in models.items()}


def test_without_an_update_it_is_flora_to_the_bit() -> None:
    mine, plain = (play(method, MEMBERS, random_training()) for method in (FLoRAAdaptive(), FLoRA()))
    for one, two in zip(as_adapters(mine.state.base.since(0)), as_adapters(plain.state.base.since(0)), strict=True):
        for name in LAYERS:
            assert torch.equal(one[name].B, two[name].B) and torch.equal(one[name].A, two[name].A)


def test_ranks_shrink_in_an_update_round_stay_and_grow_again_at_the_next() -> None:
    method, outcome, seen = FLoRAAdaptive(update_every=2), None, []
    for number, share in ((1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1), (5, 0.9), (6, 0.1)):
        outcome = following(method, outcome, number, decaying(share))
        entered = first_ranks({name: model["lora"] for name, model in outcome.fitted.items()})
        seen.append((entered, first_ranks(outcome.payloads)))
    full, one = {"a": 2, "b": 4}, {"a": 1, "b": 1}
    assert seen == [(full, full), (full, full), (full, one), (one, one), (full, full), (full, full)]


def test_what_is_merged_is_the_mean_of_the_shrunk_products() -> None:
    method = FLoRAAdaptive(update_every=1)
    second = following(method, following(method, None, 1, random_training()), 2, decaying(0.1))
    made = deployed(method, second)
    assert made is not None
    each = [best(ideal(second, {name: 1.0}), 1) for name in ("a", "b")]
    assert gap(made, {layer: (each[0][layer] + each[1][layer]) / 2 for layer in LAYERS}) < 1e-5
    assert gap(made, ideal(second, {"a": 1.0, "b": 1.0})) > 1e-3
    (patch,) = as_adapters(second.state.base.since(1))
    assert ranks_of(patch) == dict.fromkeys(LAYERS, 2)


def test_the_rank_is_kept_at_the_site_and_the_server_learns_none() -> None:
    method = FLoRAAdaptive(update_every=1)
    second = following(method, following(method, None, 1, random_training()), 2, decaying(0.1))
    assert all(memory["ranks"] == dict.fromkeys(LAYERS, 1) for memory in second.memories.values())
    assert set(vars(second.state)) == {"base", "round"} and second.downloads == {"a": None, "b": None}


def test_fresh_factors_of_a_lower_rank_are_the_first_rows_of_the_full_ones() -> None:
    method = FLoRAAdaptive(update_every=2)
    started: dict[str, Any] = {}

    def watch(name: str, model: Any) -> Any:
        started[name] = model["lora"]
        return random_training()(name, model)

    outcome = following(method, following(method, None, 1, random_training()), 3, decaying(0.1))
    following(method, outcome, 4, watch)
    short = dict(started)
    following(method, None, 4, watch)
    for name in LAYERS:
        assert short["b"][name].rank == 1 and started["b"][name].rank == 4
        assert torch.equal(short["b"][name].A, started["b"][name].A[:1]) and not short["b"][name].B.any()


def test_the_average_rank_is_that_of_what_was_sent() -> None:
    method = FLoRAAdaptive(update_every=1)
    second = following(method, following(method, None, 1, random_training()), 2, decaying(0.1))
    seen = {name: Seen(0.5, model, None) for name, model in second.fitted.items()}
    federation = Federation(tuple(MEMBERS), 1)
    assert method.measures(second.state, federation, seen) == {"average_rank": 1.0}
    assert FLoRAAdaptive(update_every=None).measures(second.state, federation, seen) == {"average_rank": 3.0}
    assert method.measures(second.state, federation, {}) == {"average_rank": 0.0}


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_shrinking_keeps_more_than_tau_of_the_energy(share: float) -> None:
    method = FLoRAAdaptive(update_every=1, tau=0.8)
    second = following(method, following(method, None, 1, random_training()), 2, decaying(share))
    for name, payload in second.payloads.items():
        for layer, term in payload.items():
            whole = dense(second.fitted[name]["lora"][layer])
            assert float(dense(term).square().sum()) > 0.8 * float(whole.square().sum())
