"""The facts of every method, from its traits and byte formulas, for the command line and the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coterie.algorithms import Algorithm
from coterie.protocol import Card, Federation, Layer, Traits

LAYER, RANK, CLIENTS, TASKS, CLASSES, POOL = Layer(768, 768), 8, 10, 6, 4, (100, 200)
"""What sizes are told for: one layer, of ten clients with one rank, in fp32; public data of six tasks; four classes; a
pool of a hundred examples with two labels each."""


@dataclass(frozen=True)
class Facts:
    """One method in words; `up` and `down` are what travels, `bytes_up` and `bytes_down` its size for `LAYER`."""

    name: str
    title: str
    paper: str
    ranks: str
    model: str
    deployed: str
    linear: str
    up: str
    down: str
    bytes_up: int
    bytes_down: int


def catalogue(methods: Mapping[str, type[Algorithm]]) -> list[Facts]:
    """The facts of all methods, in the order of their names."""
    return [facts(name, kind) for name, kind in sorted(methods.items())]


def facts(name: str, kind: type[Algorithm]) -> Facts:
    """The facts of one method with its default options."""
    traits = kind.traits
    layers = {"layer": LAYER}
    cards = tuple(
        Card(f"{number:02d}", RANK, 1, 1.0, layers, RANK, width=LAYER.d_out, classes=CLASSES, pool=POOL)
        for number in range(CLIENTS)
    )
    public = tuple(f"public/{number}" for number in range(TASKS)) if traits.server_data else ()
    federation = Federation(cards, rounds=10, server_data=public)
    method = kind().in_federation(federation)
    up, down = method.bytes_apart(cards[0], federation)
    of_layer = method.bytes_up(LAYER, cards[0])
    return Facts(
        name=name,
        title=traits.title,
        paper=traits.paper,
        ranks=traits.ranks,
        model="reference" if traits.pools_data else "personal" if traits.personal else "global",
        deployed=deployed(traits, of_layer),
        linear="yes" if traits.linear_upload else "no",
        up=traits.up,
        down=traits.down,
        bytes_up=of_layer + up,
        bytes_down=method.bytes_down(LAYER, cards[0]) + down,
    )


def deployed(traits: Traits, of_layer: int) -> str:
    """How what the server deploys stands to the weighted sum of the clients' products, in words.

    of_layer: the bytes that a client sends of a layer; where it sends none, there is nothing to deploy.
    """
    if traits.pools_data:
        return "trained on all data"
    if traits.server_trains:
        return "trained at the server"
    if not of_layer:
        return "nothing"
    if traits.exact:
        return "equal"
    return "best of its rank" if traits.best_rank else "approximate"
