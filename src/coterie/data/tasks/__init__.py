"""Tasks: labelled texts, questions with choices, or prompts with answers, and a pooled test set of the same kind.

They come from benchmarks, packages, the hub or own files.
"""

from coterie.data.tasks.base import Examples, ExampleSet, Pool, Task
from coterie.data.tasks.language import Instructions, Questions
from coterie.data.tasks.mixture import Part, load_mixture
from coterie.data.tasks.registry import LOADERS, MIXTURE, find_loader, load_task, task_options

__all__ = [
    "LOADERS",
    "MIXTURE",
    "ExampleSet",
    "Examples",
    "Instructions",
    "Part",
    "Pool",
    "Questions",
    "Task",
    "find_loader",
    "load_mixture",
    "load_task",
    "task_options",
]
