"""Tasks: labelled texts or images, questions with choices, or prompts with answers, and a pooled test set likewise.

They come from benchmarks, packages, the hub or own files.
"""

from coterie.data.tasks.base import Examples, ExampleSet, Pool, Task
from coterie.data.tasks.language import Instructions, Questions
from coterie.data.tasks.mixture import Part, load_mixture
from coterie.data.tasks.registry import LOADERS, MIXTURE, find_loader, load_task, task_options
from coterie.data.tasks.vision import Images
from coterie.data.tasks.zero_shot import with_zero_shot

__all__ = [
    "LOADERS",
    "MIXTURE",
    "ExampleSet",
    "Examples",
    "Images",
    "Instructions",
    "Part",
    "Pool",
    "Questions",
    "Task",
    "find_loader",
    "load_mixture",
    "load_task",
    "task_options",
    "with_zero_shot",
]
