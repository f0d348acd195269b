"""How far what is deployed lies from the mean of the clients' products, of every registered method, in fp64.

    python benchmarks/exactness.py --json exactness.json

The distance is ||deployed - W||_F / ||W||_F over all layers, W = sum p_i s_i B_i A_i of the pairs that clients trained
on a base, and deployed what the round's global model and its change of that base add to it. Rounds are played by the
engine; training is stood in for by factors drawn at random, of clients that have nothing in common (`random`) or that
share one pair but for a tenth (`similar`); it starts from what the method sends, and leaves frozen what the method
freezes. The largest of the first two main rounds counts. `best` is what no rank-r product goes below, r the largest
rank. A method that declares itself exact must stay below 1e-10: else the exit code is 1.
Weights are by the examples, 10 to 19, of all methods but HetLoRA, which finds its own. What FSLoRA, Fed-PLoRA and Ravan
let a client train is a part of what is deployed, so a distance of theirs is also the part that stays as it was.
FedSLM's is told of groups of compressed models, one group for each rank: what the sites of a group go on with, against
the mean of their own U Sigma_i V. It is the largest of any group, and must stay below 1e-10 too. Between groups nothing
is exact. FedBiOT has adapters in both layers, as in the outer blocks of a model.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from standin import Round, Trained, alike, at_random, base_weight, begun, cards, machine, made, versions, watched
from torch import Tensor

from coterie.algorithms import METHODS, Algorithm
from coterie.engines.traffic import unwrapped
from coterie.errors import ConfigError
from coterie.maths.keys import root_key
from coterie.protocol import Card, Client, InnerCore, Layer, LowRank, Model, Term, as_adapters, map_tensors

LAYERS = {"wide": Layer(160, 192), "tall": Layer(192, 128)}
RANKS = {"r = 4": [4] * 10, "r = 2, 4, 16": [2, 4, 16, 2, 4, 16, 2, 4, 16, 4]}
CLIENTS: dict[str, Trained] = {"random": at_random, "similar": alike}
LIMIT = 1e-10
OPTIONS: dict[str, dict[str, Any]] = {"slora": {"sparse_rounds": 0}, "ravan": {"heads": 4, "head_rank": 16}}
"""SLoRA's second stage, which is the one that deploys factors; heads of Ravan that are orthogonal in these layers."""


@dataclass(frozen=True)
class Row:
    """One method, its distance by ranks and clients; a word in place of a figure where there is none.

    exact: whether it must be below the limit; grouped: that it is told inside groups of one base model.
    """

    method: str
    exact: bool
    grouped: bool
    distance: dict[str, dict[str, float | str]]
    best: dict[str, dict[str, float]]


def measure(name: str) -> Row:
    """All four figures of one method."""
    algorithm = made(name, OPTIONS)
    grouped = algorithm.traits.bases == "compressed"
    distance: dict[str, dict[str, float | str]] = {}
    best: dict[str, dict[str, float]] = {}
    for which, ranks in RANKS.items():
        for clients, trained in CLIENTS.items():
            try:
                found = (inside_groups if grouped else distances)(algorithm, ranks, trained)
            except ConfigError:
                distance.setdefault(which, {})[clients] = "refused"
                continue
            distance.setdefault(which, {})[clients] = found[0] if isinstance(found, tuple) else found
            if isinstance(found, tuple):
                best.setdefault(which, {})[clients] = found[1]
    return Row(name, algorithm.traits.exact or grouped, grouped, distance, best)


def distances(algorithm: Algorithm, ranks: list[int], trained: Trained) -> tuple[float, float] | str:
    """The largest distance of two main rounds, and the least possible one of the same round; why there is none."""
    if algorithm.traits.pools_data:
        return "n/a: pooled data"
    members = cards(ranks, LAYERS)
    engine = watched(algorithm, members, rounds=2, trained=trained, double=True, weights="examples")
    asked = algorithm.in_federation(engine.federation)
    if not any(asked.bytes_up(layer, members[0]) for layer in LAYERS.values()):
        return "n/a: no factors sent"
    list(engine.rounds(begun(engine)))
    rounds = [one for one in engine.seen if one.phase == "main"]
    if algorithm.traits.personal or algorithm.global_model(rounds[-1].after) is None:
        return "n/a: personal"
    found = []
    for one in rounds:
        W, deployed = mean_product(one), product_of(algorithm, one)
        size = norm(W)
        apart = norm({layer: deployed[layer] - W[layer] for layer in W})
        tail = norm({layer: torch.linalg.svdvals(matrix)[max(ranks) :] for layer, matrix in W.items()})
        found.append((apart / size, tail / size))
    return max(found)


def inside_groups(algorithm: Algorithm, ranks: list[int], trained: Trained) -> float:
    """The largest distance of two main rounds and any group of compressed models, a group for each rank."""
    members = [within(card) for card in cards(ranks, LAYERS)]
    engine = watched(algorithm, members, rounds=2, trained=trained, double=True, weights="examples")
    list(engine.rounds(begun(engine)))
    found = []
    for one in (seen for seen in engine.seen if seen.phase == "main"):
        for spec in sorted({card.spec for card in members}):
            group = [entry for entry in one.uploads if entry.card.spec == spec]
            total = math.fsum(entry.weight for entry in group)
            W: dict[str, Tensor] = {}
            for entry in group:
                for layer, product in reconstructed(one.fitted[entry.card.id], entry.card).items():
                    W[layer] = W.get(layer, 0) + entry.weight / total * product
            card = group[0].card
            site = Client(card, {}, (), root_key(0).fold, one.number + 1, "main")
            deployed = reconstructed(algorithm.site_model(site, unwrapped(algorithm.send(one.after, card))), card)
            found.append(norm({layer: deployed[layer] - W[layer] for layer in W}) / norm(W))
    return max(found)


def within(card: Card) -> Card:
    """The client with a base model that was cut to its own rank in all layers."""
    layers = {name: replace(layer, inner=card.rank) for name, layer in card.layers.items()}
    return replace(card, spec=f"rank-{card.rank}", layers=layers)


def reconstructed(model: Model, card: Card) -> dict[str, Tensor]:
    """U Sigma V of every layer in fp64."""
    found = {}
    for layer, term in model["core"].items():
        assert isinstance(term, InnerCore)
        U, V = (factor.double() for factor in base_weight(layer, card.layers[layer]))
        found[layer] = term.between(U, V)
    return found


def mean_product(one: Round) -> dict[str, Tensor]:
    """W of every layer: of all that a client's model adds to the base but what is its own alone."""
    total: dict[str, Tensor] = {}
    for entry in one.uploads:
        for layer, product in added(one.fitted[entry.card.id], "local").items():
            total[layer] = total.get(layer, 0) + entry.weight * product
    return total


def product_of(algorithm: Algorithm, one: Round) -> dict[str, Tensor]:
    """What the new global model and the round's changes of the base add to the base that clients trained on."""
    model = algorithm.global_model(one.after)
    assert model is not None
    total = added(model)
    log = getattr(one.after, "base", None)
    for patch in as_adapters(log.since(one.before.base.version)) if log is not None else []:
        for layer, term in patch.items():
            total[layer] = total.get(layer, 0) + dense(term)
    return total


def added(model: Model, but: str = "") -> dict[str, Tensor]:
    """What a model's terms but those of this name add to each layer, densely."""
    total: dict[str, Tensor] = {}
    for name, layers in model.terms.items():
        for layer, term in layers.items() if name != but else ():
            total[layer] = total.get(layer, 0) + dense(term)
    return total


def dense(term: Term) -> Tensor:
    """s B A in fp64."""
    factors = map_tensors(term, lambda one: one.double() if one.is_floating_point() else one).low_rank()
    assert isinstance(factors, LowRank)
    return float(factors.scale) * (factors.left @ factors.A)


def note(row: Row) -> str:
    """Whether the distance must be nothing."""
    return "" if not row.exact else "  exact inside groups" if row.grouped else "  exact"


def norm(matrices: dict[str, Tensor]) -> float:
    """The Frobenius norm over all layers together."""
    return math.sqrt(math.fsum(float(one.square().sum()) for one in matrices.values()))


def main() -> int:
    """Prints a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--methods", nargs="*", default=sorted(METHODS), help="these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = [(which, clients) for which in RANKS for clients in CLIENTS]
    print(f"{'':22} " + " ".join(f"{which + ', ' + clients:>21}" for which, clients in columns))
    rows, bad = [], []
    for name in options.methods:
        row = measure(name)
        rows.append(row)
        cells = [row.distance[which][clients] for which, clients in columns]
        shown = " ".join(f"{cell if isinstance(cell, str) else format(cell, '.1e'):>21}" for cell in cells)
        print(f"{name:22} {shown}{note(row)}", flush=True)
        if row.exact and not all(cell == "refused" or (isinstance(cell, float) and cell < LIMIT) for cell in cells):
            bad.append(name)
    least = {which: next(row.best[which] for row in rows if which in row.best) for which in RANKS}
    cells = [least[which][clients] for which, clients in columns]
    print(f"{'best of that rank':22} " + " ".join(f"{cell:21.1e}" for cell in cells))
    if options.json:
        told = {"benchmark": "exactness", "dtype": "float64", "limit": LIMIT, "machine": machine()}
        told |= {"versions": versions(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    if bad:
        print(f"declared exact, but {LIMIT:.0e} apart or more: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
