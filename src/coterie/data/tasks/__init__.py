"""Classification tasks: labelled texts and a pooled test set, from benchmarks, packages, the hub or own files."""

from coterie.data.tasks.base import Examples, Pool, Task
from coterie.data.tasks.registry import LOADERS, find_loader, load_task, task_options

__all__ = ["LOADERS", "Examples", "Pool", "Task", "find_loader", "load_task", "task_options"]
