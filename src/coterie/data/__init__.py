"""Tasks, who holds which example, tokens, mini-batches, and how well predictions agree with labels."""

from coterie.data.batches import Batch, evaluation_batches, plan
from coterie.data.choices import CHOICE_TASKS, ChoiceExample, ChoiceTask, load_choices
from coterie.data.metrics import METRICS, scores
from coterie.data.partition import (
    PARTITIONERS,
    Partition,
    dirichlet,
    iid,
    make_partition,
    manifest,
    natural,
    partition_options,
    quantity,
    shards,
    split,
    statistics,
)
from coterie.data.pictures import partition_svg
from coterie.data.tasks import LOADERS, Examples, Task, find_loader, load_task, task_options
from coterie.data.text import TextSet, tokenise

__all__ = [
    "CHOICE_TASKS",
    "LOADERS",
    "METRICS",
    "PARTITIONERS",
    "Batch",
    "ChoiceExample",
    "ChoiceTask",
    "Examples",
    "Partition",
    "Task",
    "TextSet",
    "dirichlet",
    "evaluation_batches",
    "find_loader",
    "iid",
    "load_choices",
    "load_task",
    "make_partition",
    "manifest",
    "natural",
    "partition_options",
    "partition_svg",
    "plan",
    "quantity",
    "scores",
    "shards",
    "split",
    "statistics",
    "task_options",
    "tokenise",
]
