"""Tasks, who holds which example, tokens, and mini-batches."""

from coterie.data.batches import Batch, evaluation_batches, plan
from coterie.data.partition import (
    PARTITIONERS,
    Partition,
    dirichlet,
    iid,
    make_partition,
    manifest,
    split,
    statistics,
)
from coterie.data.tasks import LOADERS, Examples, Task, load_task
from coterie.data.text import TextSet, tokenise

__all__ = [
    "LOADERS",
    "PARTITIONERS",
    "Batch",
    "Examples",
    "Partition",
    "Task",
    "TextSet",
    "dirichlet",
    "evaluation_batches",
    "iid",
    "load_task",
    "make_partition",
    "manifest",
    "plan",
    "split",
    "statistics",
    "tokenise",
]
