"""Messages, what is once in a download, and weighted uploads."""

from __future__ import annotations

import pytest
import torch
from algorithms.fixtures import card, t1, t2, uploads

from coterie.engines.traffic import Traffic, joined, separated, unwrapped
from coterie.maths.keys import Key
from coterie.protocol import Card, Once, Uploads, copied, map_tensors, message, messages
from coterie.protocol.messages import Uploaded, leaves, weighted_sum
from coterie.wire.ledger import Ledger


@message
class Pair:
    first: object
    second: object


def test_leaves_come_with_their_paths() -> None:
    assert [path for path, _ in leaves(Pair({"a": 1}, [2, (3,)]))] == ["first.a", "second.0", "second.1.0"]


def test_copies_share_nothing_and_lie_as_if_read_from_bytes() -> None:
    source = torch.arange(12.0).reshape(3, 4).T[:, 1:]
    made = copied(Pair(source, 1)).first
    assert torch.equal(made, source) and made.is_contiguous() and made.data_ptr() % 64 == 0
    assert made.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def test_a_key_is_a_leaf() -> None:
    assert map_tensors(Pair(Key(5), torch.ones(1)), lambda tensor: tensor + 1).first == Key(5)


def test_once_is_booked_as_set_up_and_only_the_first_time() -> None:
    ledger = Ledger()
    content = Pair(Once(torch.zeros(3)), torch.zeros(2))
    traffic = Traffic(ledger, 1, "main", strict=True)
    arrived, held = traffic.download("c", content, ())
    again, _ = traffic.download("c", content, held)
    assert torch.equal(arrived.first, again.first) and arrived.first.tolist() == [0.0] * 3
    booked = [(row["kind"], row["payload"]) for row in ledger.rows()]
    assert booked == [("setup", 12), ("message", 8), ("message", 8)]


def test_other_content_is_sent_again() -> None:
    ledger = Ledger()
    traffic = Traffic(ledger, 1, "main", strict=False)
    _, held = traffic.download("c", Once(torch.zeros(3)), ())
    arrived, held = traffic.download("c", Once(torch.ones(3)), held)
    assert arrived.tolist() == [1.0] * 3 and len(held) == 2
    assert [row["kind"] for row in ledger.rows()] == ["setup", "message", "setup", "message"]


def test_separating_and_joining_is_the_identity() -> None:
    content = {"a": [Once(1), Once("x")], "b": (Once(None),)}
    body, parts = separated(content)
    assert joined(body, parts) == unwrapped(content) == {"a": [1, "x"], "b": (None,)}


def test_uploads_come_in_id_order_with_weights_of_sum_one() -> None:
    made = uploads({"2": t1()["2"], "1": t1()["1"]}, {"1": 3.0, "2": 1.0})
    assert [(entry.card.id, entry.weight) for entry in made] == [("1", 0.75), ("2", 0.25)]
    assert abs(sum(weight for _, _, weight in made.items()) - 1) < 1e-12


def test_the_mean_is_weighted_summed_in_fp64_and_cast_back() -> None:
    big = [Uploaded(card(str(i), 1), torch.tensor([1e8 + i]), 1.0) for i in range(4)]
    mean = Uploads(big).mean()
    assert mean.dtype == torch.float32 and float(mean) == float(torch.tensor(1e8 + 1.5, dtype=torch.float64).float())


def test_a_weighted_sum_is_the_same_in_however_many_blocks_and_in_the_dtype_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [(0.1 * i, torch.randn(5, 3, generator=torch.Generator().manual_seed(i))) for i in range(7)]
    plain = sum(weight * value.double() for weight, value in values)
    for block in (1, 30, 2**18):
        monkeypatch.setattr(messages, "BLOCK", block)
        torch.testing.assert_close(weighted_sum(values, torch.float64), plain, atol=1e-15, rtol=1e-15)
        assert torch.equal(weighted_sum(values), plain.float())


def test_a_key_that_only_some_have_is_averaged_over_those_and_none_is_lost_because_the_first_lacks_it() -> None:
    sent = {"a": {"x": 1.0}, "b": {"x": 2.0, "y": 10.0}, "c": {"x": 3.0, "y": 20.0, "z": 5.0}}
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    found = Uploads(
        [Uploaded(card(name, 1), {k: torch.tensor(v) for k, v in sent[name].items()}, weights[name]) for name in sent]
    ).mean()
    assert {key: float(value) for key, value in found.items()} == pytest.approx({"x": 1.7, "y": 14.0, "z": 5.0})
    one = torch.ones(1)
    alone = Uploads([Uploaded(card("a", 1), {"x": one}, 1.0), Uploaded(card("b", 1), {"x": one, "y": one}, 0.0)]).mean()
    assert set(alone) == {"x"}


def test_a_subset_is_renormalised() -> None:
    made = uploads(t1(), {"1": 3.0, "2": 1.0}).where(lambda entry: entry.card.id == "2")
    assert [entry.weight for entry in made] == [1.0]
    assert [entry.weight for entry in uploads(t2(), {"1": 3.0, "2": 1.0}).uniform()] == [0.5, 0.5]


def test_weights_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        uploads(t1(), {"1": -1.0, "2": 2.0})
    with pytest.raises(ValueError, match="positive sum"):
        uploads(t1(), {"1": 0.0, "2": 0.0})


def test_the_reference_rank_is_the_own_rank_unless_given() -> None:
    assert card("a", 4).down_rank == 4 and card("a", 4, reference_rank=2).down_rank == 2
    assert isinstance(card("a", 4), Card)
