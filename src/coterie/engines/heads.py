"""Which head a client uses, and under what name the engine keeps those of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.engines.setting import Setting
from coterie.protocol import SiteRecord
from coterie.training.asks import Head


def head_of(setting: Setting, state: Any, heads: Mapping[str, Head], name: str, record: SiteRecord) -> Head | None:
    """The head that this client uses now, by the experiment's policy."""
    card = setting.sites[name].card
    initial = setting.initial_head(card.spec)
    if setting.head == "local":
        return record.head if record.head is not None else initial
    if setting.head == "frozen":
        return initial
    group = record.head_group or setting.algorithm.head_group(state, card)
    choices = setting.algorithm.head_choices(state, card)
    if choices:
        return chosen_heads(setting, heads, card.spec, choices).get(group)
    owner = setting.head_owner(card.spec)
    return heads.get(head_name(owner, group), heads.get(head_name(owner, "all"), initial))


def chosen_heads(setting: Setting, heads: Mapping[str, Head], spec: str, choices: Sequence[str]) -> dict[str, Head]:
    """The heads between which a client chooses; a group that nobody has joined yet has the initial one."""
    initial, owner = setting.initial_head(spec), setting.head_owner(spec)
    found = {group: heads.get(head_name(owner, group), initial) for group in choices}
    return {group: head for group, head in found.items() if head is not None}


def head_name(spec: str, group: str) -> str:
    """Under what name the engine keeps the head of a group of clients; spec: see `Setting.head_owner`."""
    return f"{spec}/{group}"
