"""Tasks, who holds which example, tokens, mini-batches, and how well predictions agree with labels."""

from coterie.data.batches import Batch, evaluation_batches, plan
from coterie.data.holdings import manifest, statistics
from coterie.data.images import ImageSet, image_set
from coterie.data.metrics import METRICS, scores
from coterie.data.mixtures import mixture
from coterie.data.partition import (
    PARTITIONERS,
    Partition,
    dirichlet,
    iid,
    make_partition,
    natural,
    partition_options,
    quantity,
    shards,
    split,
)
from coterie.data.pictures import partition_svg
from coterie.data.tasks import (
    LOADERS,
    Examples,
    Images,
    Instructions,
    Part,
    Questions,
    Task,
    find_loader,
    load_mixture,
    load_task,
    task_options,
)
from coterie.data.text import TextSet, tokenise

__all__ = [
    "LOADERS",
    "METRICS",
    "PARTITIONERS",
    "Batch",
    "Examples",
    "ImageSet",
    "Images",
    "Instructions",
    "Part",
    "Partition",
    "Questions",
    "Task",
    "TextSet",
    "dirichlet",
    "evaluation_batches",
    "find_loader",
    "iid",
    "image_set",
    "load_mixture",
    "load_task",
    "make_partition",
    "manifest",
    "mixture",
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
