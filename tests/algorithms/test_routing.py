"""Experts and a router: where outputs point, what is uploaded of it, whose counts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance.harness import LAYERS, cards

from coterie.algorithms.routing import Download, Trained, check_expert, first_routers, router_bytes, trained_by
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import Adapter, Layer, LowRank, Routed, Uploads
from coterie.protocol.messages import Uploaded
from coterie.wire.codec import size

ONE, TWO, THREE = cards({"a": 2, "b": 2, "c": 2})


def expert(number: int) -> Adapter:
    key = root_key(number)
    return {
        name: LowRank(key.fold(name).normal((layer.d_out, 2)), key.fold(name, "A").normal((2, layer.d_in)), 2.0)
        for name, layer in LAYERS.items()
    }


def download(experts: int, own: int) -> Download:
    return Download([expert(i) for i in range(experts)], first_routers(LAYERS, experts, root_key(9)), own)


@pytest.mark.parametrize(
    ("experts", "own", "places"), [(1, 0, [0]), (2, 1, [0, 1, 1]), (3, 0, [0, 1, 2, 0, 0]), (3, 2, [0, 1, 2, 2, 2])]
)
def test_every_expert_has_an_output_and_the_own_one_all_others(experts: int, own: int, places: list[int]) -> None:
    for name, one in download(experts, own).terms().items():
        assert one.outputs is not None and one.outputs.tolist() == places
        assert one.top == experts and one.router.shape == (len(places), LAYERS[name].d_in)


def test_a_token_uses_between_one_expert_and_all_of_them() -> None:
    """With a router that asks for the own expert alone the product is that expert's; else all top M may differ."""
    sent = download(2, 1)
    router = {name: torch.zeros_like(one) for name, one in sent.router.items()}
    for one in router.values():
        one[1:] = 50.0  # both outputs that point to the own expert, for inputs of ones
    term = replace(sent, router=router).terms()["first"]
    x = torch.ones(1, LAYERS["first"].d_in)
    own = expert(1)["first"]
    torch.testing.assert_close(term.apply(x), x @ own.product().mT, rtol=1e-4, atol=1e-4)
    both = sent.terms()["first"].apply(x)
    assert float((both - x @ own.product().mT).norm()) > 1e-2


def test_what_is_uploaded_is_the_own_expert_and_the_routers() -> None:
    sent = download(3, 1)
    made = Trained.of(sent.terms(), 1)
    for name in LAYERS:
        assert torch.equal(made.expert[name].B, expert(1)[name].B) and made.expert[name].scale == 2.0
        assert torch.equal(made.router[name], sent.router[name])
    routers = sum(router_bytes(layer, 3) for layer in LAYERS.values())
    assert size(made.router).payload == routers == sum(5 * layer.d_in * 4 for layer in LAYERS.values())
    assert router_bytes(Layer(8, 1024), 4) == 7 * 1024 * 4


def test_only_those_named_who_count_and_trained_the_right_number_of_outputs_are_taken() -> None:
    right, wrong = Trained.of(download(2, 0).terms(), 0), Trained.of(download(3, 0).terms(), 0)
    router = download(2, 0).router
    sent = [Uploaded(ONE, right, 0.5), Uploaded(TWO, wrong, 0.3), Uploaded(THREE, right, 0.2)]
    assert [one.card.id for one in trained_by({"a", "b"}, Uploads(sent), router)] == ["a"]
    assert [one.weight for one in trained_by({"a", "b", "c"}, Uploads(sent), router)] == pytest.approx([5 / 7, 2 / 7])
    late = [Uploaded(ONE, expert(0), 1.0), Uploaded(TWO, right, 0.0), Uploaded(THREE, right, 1.0)]
    assert [one.card.id for one in trained_by({"a", "b"}, Uploads(late), router)] == []


def test_a_first_upload_is_an_adapter_and_a_later_one_has_routers_of_one_width() -> None:
    good = Trained.of(download(2, 0).terms(), 0)
    check_expert(expert(0), ONE)
    check_expert(good, ONE)
    widths = good.router | {"first": torch.zeros(5, LAYERS["first"].d_in)}
    for router in ({"first": good.router["first"]}, widths, {name: one[:, :-1] for name, one in good.router.items()}):
        with pytest.raises(ModelError, match=r"client a: routers \(2M - 1, n\)"):
            check_expert(replace(good, router=router), ONE)
    with pytest.raises(ModelError, match="client a: one term for each of 2 layers"):
        check_expert(replace(good, expert={}), ONE)
    odd: dict[str, Routed] = download(2, 0).terms()
    with pytest.raises(ModelError, match="client a, layer first: low-rank factors expected, not Routed"):
        check_expert(odd, ONE)
