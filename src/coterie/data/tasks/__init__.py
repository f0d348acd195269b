"""Tasks: labelled texts, questions with choices, or prompts with answers, and a pooled test set of the same kind.

They come from benchmarks, packages, the hub or own files.
"""

from coterie.data.tasks.base import Examples, ExampleSet, Pool, Task
from coterie.data.tasks.language import Instructions, Questions
from coterie.data.tasks.registry import LOADERS, find_loader, load_task, task_options

__all__ = [
    "LOADERS",
    "ExampleSet",
    "Examples",
    "Instructions",
    "Pool",
    "Questions",
    "Task",
    "find_loader",
    "load_task",
    "task_options",
]
