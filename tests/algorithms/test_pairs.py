"""Methods whose clients are sent a pair and send one back: what follows from that alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import LAYERS, cards, play, random_training

from coterie.algorithms import METHODS
from coterie.algorithms.pairs import PairExchange
from coterie.errors import ModelError
from coterie.protocol import LowRank
from coterie.wire.codec import encode, size

EQUAL = cards({"a": 2, "b": 2})
PAIRS = [name for name, method in METHODS.items() if issubclass(method, PairExchange)]


def test_the_methods_that_exchange_pairs_are_known() -> None:
    assert {"fedit", "flexlora", "flora-na", "lora-fair", "fedex-lora", "fedrot-lora", "hetlora"} <= set(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_a_round_sends_as_many_bytes_each_way_as_a_pair_of_the_clients_rank_has(name: str) -> None:
    method = METHODS[name]()
    outcome = play(method, EQUAL, random_training(), phase="main")
    pair = sum(2 * (layer.d_out + layer.d_in) * 4 for layer in LAYERS.values())
    for member in EQUAL:
        assert sum(method.bytes_up(layer, member) for layer in LAYERS.values()) == pair
        assert sum(method.bytes_down(layer, member) for layer in LAYERS.values()) == pair
        if name not in ("slora", "hetlora"):  # other messages in the first round, or ranks that shrink
            assert size(outcome.bodies[member.id]).payload == size(outcome.payloads[member.id]).payload == pair


def test_a_site_is_evaluated_with_what_it_was_sent_and_the_federation_with_the_servers_pair() -> None:
    method = METHODS["fedit"]()
    outcome = play(method, EQUAL, random_training())
    sent = outcome.downloads["a"]
    assert encode(method.site_model(None, sent)["lora"]) == encode(sent)  # type: ignore[arg-type]
    whole = method.global_model(outcome.state)
    assert whole is not None and encode(whole["lora"]) == encode(outcome.state.lora)


def test_an_upload_that_is_no_pair_of_every_layer_in_the_clients_scale_is_refused() -> None:
    method, member = METHODS["fedit"](), EQUAL[0]
    good = {name: LowRank(torch.zeros(one.d_out, 2), torch.zeros(2, one.d_in), 2.0) for name, one in LAYERS.items()}
    method.check(good, member)
    with pytest.raises(ModelError, match="client a: one term for each of 2 layers expected, not NoneType"):
        method.check(None, member)
    with pytest.raises(ModelError, match=r"client a, layer first: scale 3\.0 where the client's is 2"):
        method.check(good | {"first": replace(good["first"], scale=3.0)}, member)
