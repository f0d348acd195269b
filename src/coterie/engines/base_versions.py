"""The base's log in a run's state: carried on from round to round and stored patch by patch, each of them once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from coterie.engines.sites import Store
from coterie.protocol import BaseLog
from coterie.wire.codec import decode, encode


def base_of(state: Any) -> BaseLog:
    """The log of a method that changes the base, an empty one of others."""
    log = getattr(state, "base", None)
    return log if isinstance(log, BaseLog) else BaseLog()


def extends(new: BaseLog, old: BaseLog) -> bool:
    """Whether the new log starts with all patches of the old one."""
    return new.version >= old.version and all(
        later is earlier or encode(later) == encode(earlier)
        for later, earlier in zip(new.patches, old.patches, strict=False)
    )


def carried(state: Any, old: BaseLog, across: Callable[[Any], Any]) -> Any:
    """`across(state)`, but for the patches of `old`, which never change and are taken over as they are."""
    log = base_of(state)
    if not log.version:
        return across(state)
    patches = (*old.patches, *across(log.since(old.version)))
    return replace(across(replace(state, base=BaseLog())), base=BaseLog(patches))


def store_state(store: Store, state: Any) -> Any:
    """Stages the patches that the store lacks; returns the state without any, to be stored itself."""
    log = base_of(state)
    if not log.version:
        return state
    for version, patch in enumerate(log.patches):
        if _name(version) not in store:
            store.put(_name(version), encode(patch))
    return replace(state, base=BaseLog())


def stored_state(store: Store, state: Any) -> Any:
    """A state as it was before `store_state`.

    Raises:
        WireError: a stored patch cannot be read.
    """
    names = list(takewhile(lambda name: name in store, map(_name, count())))
    if not names:
        return state
    return replace(state, base=BaseLog(tuple(decode(store.get(name)) for name in names)))


def _name(version: int) -> str:
    """Under what name the patch after this version is stored."""
    return f"base/{version:05d}"
