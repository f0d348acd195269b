"""The pool: clients give a part of their examples away, every party holds all, in its own tokens and in others'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training.decoders import decoder, tokeniser, tokens

from coterie.data.tasks import load_task
from coterie.data.vocabulary import token_strings
from coterie.errors import DataError
from coterie.experiments.public_pool import given_bytes, giving, held_as, pool_size, pools_of
from coterie.maths.keys import root_key

KEY = root_key(8)


def test_a_client_keeps_what_it_does_not_give_and_nothing_is_in_both() -> None:
    share = {"train": np.arange(10, 30), "test": np.arange(3)}
    found = giving(share, 0.2, KEY, "a")
    assert len(found["pool"]) == 4 and np.array_equal(found["test"], share["test"])
    assert sorted([*found["pool"], *found["train"]]) == list(range(10, 30))
    assert np.array_equal(giving(share, 0.2, KEY, "a")["pool"], found["pool"])


def test_a_client_with_too_few_examples_to_give_is_named() -> None:
    with pytest.raises(DataError, match=r"client a: server_data\.pool=0\.1 takes 0 of its 3 training examples"):
        giving({"train": np.arange(3)}, 0.1, KEY, "a")


def test_all_parties_hold_the_same_examples_in_one_order() -> None:
    trains = {"few": tokens(decoder(270), 30, "t"), "many": tokens(decoder(319), 30, "t")}
    pools = pools_of(trains, [{"pool": np.array([3, 8])}, {"pool": np.array([20, 11, 5])}], KEY)
    texts = {}
    for spec, pool in pools.items():
        strings = token_strings(tokeniser(270 if spec == "few" else 319), 319)
        spans = zip(pool.offsets[pool.rows], pool.offsets[pool.rows + 1], strict=True)
        texts[spec] = ["".join(strings[i] for i in pool.ids[a:b].tolist()) for a, b in spans]
    assert texts["few"] == texts["many"] and len(texts["few"]) == 5
    held = held_as("few", pools)
    assert set(held) == {"pool", "pool/many"} and held["pool"] is pools["few"]
    assert pool_size(pools["few"])[1] > pool_size(pools["many"])[1] and pool_size(pools["few"])[0] == 5


def test_what_is_given_is_counted_in_bytes_of_text(reviews_csv: Path) -> None:
    task = load_task("file", seed_key=KEY, path=str(reviews_csv))
    texts = [first + second for first, second in task.train.contents()]
    found = given_bytes(task, {"a": {"pool": np.array([0, 2])}, "b": {"pool": np.array([1])}})
    assert found == {"a": len((texts[0] + texts[2]).encode()), "b": len(texts[1].encode())}
