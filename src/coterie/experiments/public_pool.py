"""The pool: a part of every client's training examples, given away, which all parties then hold (FedMKT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coterie.data.images import Picture
from coterie.data.sequences import DataSet, SequenceSet
from coterie.data.tasks import Images, Instructions, Questions, Task
from coterie.errors import DataError
from coterie.experiments.bases import to_train_on
from coterie.maths.keys import Key

POOL = "pool"
"""The name of the pool in one's own tokens; in those of another base model, `pool/<spec>`."""


def giving(share: dict[str, np.ndarray], fraction: float, key: Key, name: str) -> dict[str, np.ndarray]:
    """A client's sets after it has given this part of its training examples to the pool: `pool` and what is left.

    Raises:
        DataError: nothing would be given, or nothing left.
    """
    train = share["train"]
    count = round(fraction * len(train))
    if not 0 < count < len(train):
        raise DataError(
            f"client {name}: server_data.pool={fraction:g} takes {count} of its {len(train)} training examples; give "
            "clients more of them, or choose another part"
        )
    order = key.permutation(len(train))
    return share | {POOL: np.sort(train[order[:count]]), "train": np.sort(train[order[count:]])}


def pools_of(trains: Mapping[str, DataSet], shares: Sequence[Mapping[str, np.ndarray]], key: Key) -> dict[str, DataSet]:
    """The pool in the tokens of each base model, by spec, in one order; trains: all training examples so."""
    given = np.concatenate([share[POOL] for share in shares])
    indices = np.sort(given)[key.permutation(len(given))]
    return {spec: to_train_on(train.select(indices)) for spec, train in trains.items()}


def held_as(spec: str, pools: Mapping[str, DataSet]) -> dict[str, DataSet]:
    """The data sets by name of a party with this base model."""
    return {POOL: pools[spec]} | {f"{POOL}/{other}": pool for other, pool in pools.items() if other != spec}


def pool_size(pool: DataSet) -> tuple[int, int]:
    """How many examples, and how many labels."""
    return len(pool), int(pool.labelled.sum()) if isinstance(pool, SequenceSet) else len(pool)


def given_bytes(task: Task, shares: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, int]:
    """The bytes of what each client gives: texts in UTF-8, images as the files, or the pixels, that they are."""
    train = task.train
    pictures: Sequence[Picture] = getattr(train, "pictures", None) or ()
    texts = train.told() if isinstance(train, Questions | Instructions) else train.contents()
    if isinstance(train, Images):
        texts = [("", "")] * len(train)

    def size(index: int) -> int:
        return sum(len(text.encode()) for text in texts[index]) + (_size(pictures[index]) if len(pictures) else 0)

    return {name: sum(size(index) for index in share[POOL].tolist()) for name, share in shares.items()}


def _size(picture: Picture) -> int:
    return len(picture) if isinstance(picture, bytes) else int(picture.nbytes)
