"""A small federation in memory: a random two-layer encoder, and a task that token identities decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from coterie.algorithms import Algorithm
from coterie.data.text import TextSet
from coterie.engines.in_process import InProcess, Played
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Store, Volatile
from coterie.maths.keys import Key, root_key
from coterie.models.loading import Base, from_network
from coterie.protocol import Card, Model, map_tensors
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.wire.ledger import Ledger

TARGETS = ["query", "value"]
FAST = TrainSettings(optimizer="sgd", lr=0.1, batch_size=4, steps=3, weight_decay=0.0, clip=None)


def base(seed: int = 0) -> Base:
    """A random encoder of two layers and width 32 with a head for two classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BertForSequenceClassification(
            BertConfig(
                vocab_size=60,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=32,
                num_labels=2,
                initializer_range=0.2,
            )
        )
    return from_network(network, None, TARGETS, root_key(seed).fold("head"), attention="eager")


@cache
def text(count: int, seed: int = 0, share: float = 0.5) -> TextSet:
    """Sequences of 4 to 12 tokens; class 1 holds tokens of the upper half more often."""
    key = root_key(seed).fold("text", count)
    lengths = 4 + (key.fold("lengths").bits(count) % 9).astype("int64")
    labels = (key.fold("labels").unit(count) < share).astype("int64")
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = torch.from_numpy(lengths).cumsum(0)
    total = int(offsets[-1])
    own = torch.repeat_interleave(torch.from_numpy(labels), torch.from_numpy(lengths))
    lower = torch.from_numpy(key.fold("a").unit(total) < 0.9)
    token = 5 + (torch.from_numpy(key.fold("b").unit(total)) * 25).long()
    ids = torch.where(lower == (own == 0), token, token + 25)
    return TextSet(ids.to(torch.int32), offsets, torch.from_numpy(labels), torch.arange(count), 2)


def joined(sets: Sequence[TextSet]) -> TextSet:
    """All examples of whole sets of `text`, in one."""
    lengths = torch.cat([one.lengths for one in sets])
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    labels = torch.cat([one.labels for one in sets])
    return TextSet(torch.cat([one.ids for one in sets]), offsets, labels, torch.arange(len(labels)), 2)


def pooled(chosen: dict[str, Site]) -> dict[str, TextSet]:
    """What the server of a reference is given: all training data, and those of each group."""
    groups = sorted({site.card.group for site in chosen.values()})
    members = {group: [site for site in chosen.values() if site.card.group == group] for group in groups}
    named = {"pooled": list(chosen.values())} | {f"pooled/{group}": of for group, of in members.items()}
    return {name: joined([site.data["train"] for site in of]) for name, of in named.items()}  # type: ignore[misc]


def sites(
    ranks: Sequence[int], layers: dict[str, Any], scale: float = 2.0, groups: Sequence[str] = ("all",), **fields: Any
) -> dict[str, Site]:
    """One site for each rank, with 20 to 32 training examples; groups are dealt out in turn."""
    made = {}
    for index, rank in enumerate(ranks):
        count = 20 + 4 * (index % 4)
        train = text(count, seed=index + 1, share=(0.2, 0.5, 0.8)[index % 3])
        own = {"group": groups[index % len(groups)], "width": 32, "classes": 2}
        card = Card(f"c{index}", rank, count, scale, layers, **(own | fields))
        made[card.id] = Site(card, {"train": train, "test": text(12, seed=100 + index)})
    return made


def world(
    algorithm: Algorithm,
    ranks: Sequence[int] = (2, 4, 16),
    *,
    plan: Plan | None = None,
    train: TrainSettings = FAST,
    store: Store | None = None,
    ledger: Ledger | None = None,
    seed: int = 7,
    rounds: int = 3,
    network: Base | None = None,
    server_data: dict[str, TextSet] | None = None,
    card: dict[str, Any] | None = None,
    **fields: Any,
) -> InProcess:
    """An engine ready to begin."""
    frozen = network or base()
    chosen = sites(ranks, frozen.layers, **(card or {}))
    shared = {"pool": text(16, seed=50)} if algorithm.traits.shares_data else {}
    if shared:
        chosen = {
            name: Site(replace(site.card, pool=(16, 16)), {**site.data, **shared}) for name, site in chosen.items()
        }
    setting = Setting(
        algorithm=algorithm,
        sites=chosen,
        rounds=rounds,
        seed=seed,
        heads={"base": frozen.head},
        pooled_test=text(40, seed=999),
        server_data=server_data or (pooled(chosen) if algorithm.traits.pools_data else shared),
        **{"measuring": Measuring(objective_examples=8), **fields},
    )
    executor = Executor({"base": frozen}, train, plan or Plan())
    return InProcess(setting, executor, store or Volatile(), ledger or Ledger())


def play(engine: InProcess) -> list[Played]:
    """The whole run."""
    return list(engine.rounds(engine.begin()))


def with_sites(engine: InProcess, chosen: dict[str, Site]) -> InProcess:
    """The same engine over other sites."""
    return InProcess(replace(engine.setting, sites=chosen), engine.executor, engine.store, engine.ledger)


def dense(model: Model | None) -> dict[str, torch.Tensor]:
    """What a model adds to each layer, in fp64."""
    found: dict[str, torch.Tensor] = {}
    for layers in (model.terms if model is not None else {}).values():
        for name, term in layers.items():
            product = map_tensors(term, lambda tensor: tensor.double()).dense()
            found[name] = found[name] + product if name in found else product
    return found


def key(*parts: str | int) -> Key:
    return root_key(1).fold(*parts)
