"""What travels in a round, of every registered method: its formula, the ledger's books, the tensors that arrived.

    python benchmarks/bytes.py --json bytes.json

One layer of 1024 x 1024, ten clients of rank 4, fp32. Rounds are played by the engine in strict mode, so all messages
really become bytes; training is stood in for. For each client and round three figures must be equal to the byte: the
method's `bytes_of_round` and `bytes_apart`, what the ledger booked as messages, and the bytes of the tensors that were
read back (where how much travels depends on the training, the formula is the most that it can be; in the main rounds
told here it is reached, but by what is sparse). Beside them stands the comparison table of the methods' specification.
Changes of the base, set-up (once a client) and other phases than the main one are shown apart. Exit code 1 where
figures that must be equal are not.

Methods that need another world have it. FedSLM's clients have the layer whole, or cut to 0.4 or 0.6, and `once` is its
two factors. FedBiOT's server has four such layers, a block each; its clients have three of them, the adapter in the
outer two, and `once` is the emulator's factors in the third. FedMKT's parties share a pool of a hundred examples with
two labels each. FedProto's features have 1024 entries, and every client has examples of all four classes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from standin import CLASSES, POOL, Round, begun, cards, machine, made, versions, watched, with_bases

from coterie.algorithms import METHODS, Algorithm
from coterie.engines.traffic import separated
from coterie.maths.blocks import block_of, kept_blocks, outer_layers
from coterie.protocol import Card, Federation, Layer, Phase
from coterie.protocol.messages import leaves

LAYER, CLIENTS, RANK, ROUNDS = Layer(1024, 1024), 10, 4, 4
FACTOR = RANK * 1024 * 4
"""Bytes of one factor, B (1024, 4) or A (4, 1024)."""

OPTIONS: dict[str, dict[str, Any]] = {
    "fedbiot": {"outer": 1},
    "fedlease": {"experts": 4},
    "fedsee": {"steps": 2},
    "slora": {"sparse_rounds": 2},
}
"""An adapter in the first and the last block; M = 4 experts, the most that it looks for; a short extraction; as many
sparse rounds as there are LoRA rounds to compare with."""

BLOCKS = 4
"""Of a model that is emulated."""

LESS, MORE = 4 * 204**2, 4 * 307**2
"""Bytes of a core in the layer cut to 0.4 and to 0.6."""

MIXED = (3 * LESS + 4 * MORE + 3 * 2 * FACTOR) // CLIENTS
"""Of three clients with the one, four with the other, and three with the full model."""

SAID = POOL[1] * 128 * (4 + 4) + POOL[0] * 4
"""Bytes of 128 logits and ids of each label of the pool, and of each example's loss."""


@dataclass(frozen=True)
class Told:
    """A row of the specification's table: bytes a round, and what a changed base adds to the download; or why not."""

    up: int | None
    down: int | None
    base: int = 0
    why: str = ""


PAIR = Told(2 * FACTOR, 2 * FACTOR)
ONE = Told(FACTOR, FACTOR)
NOT_THERE = "no row of the table"
TABLE: dict[str, Told] = {
    "centralised": Told(None, None, why=f"{NOT_THERE}: the data are pooled, nothing is sent in a round"),
    "centralised-per-task": Told(None, None, why=f"{NOT_THERE}: the data are pooled, nothing is sent in a round"),
    "fed-plora": PAIR,
    "fed-rac-lora": Told(FACTOR, 0, base=FACTOR + 8, why="the mean goes down as a change of the base, with a seed"),
    "fedbiot": Told(2 * 2 * FACTOR, 2 * 2 * FACTOR, why="of two adapter layers, the table has no figure"),
    "feddpa-f": PAIR,
    "feddpa-t": PAIR,
    "fedex-lora": Told(2 * FACTOR, 2 * FACTOR, base=CLIENTS * 2 * FACTOR),
    "fedex-lora-truncated": Told(None, None, why=f"{NOT_THERE}: FedEx-LoRA's, with a residual of rank r"),
    "fedit": PAIR,
    "fedlease": Told(2 * FACTOR + 7 * 4096, 4 * 2 * FACTOR + 7 * 4096),
    "fedmkt": Told(SAID, SAID, why="as in section 7.2, the table has no figure"),
    "fedpa-factors": PAIR,
    "fedpa-lora": PAIR,
    "fedpa-lora-direction": PAIR,
    "fedpa-lora-gradient": PAIR,
    "fedpa-lora-loss": PAIR,
    "fedpa-overwritten": PAIR,
    "fedproto": Told(CLASSES * 4096, CLASSES * 4096, why="beside all layers"),
    "fedrot-lora": PAIR,
    "fedrot-lora-soft": PAIR,
    "fedsa-lora": ONE,
    "fedsee": Told(3 * FACTOR + 24_600, 8 * FACTOR + 24_600),
    "fedslm": Told(MIXED, MIXED, why=f"of 3 clients at 0.4 ({LESS:,}), 4 at 0.6 ({MORE:,}), 3 full"),
    "fedsrd": Told(None, None, why="the table says sparse, without a figure"),
    "fedsrd-e": Told(None, None, why="the table says sparse, without a figure"),
    "ffa-lora": ONE,
    "flexlora": PAIR,
    "flexlora-adaptive": PAIR,
    "flora": Told(2 * FACTOR, 0, base=CLIENTS * 2 * FACTOR),
    "flora-adaptive": Told(2 * FACTOR, 0, base=CLIENTS * 2 * FACTOR),
    "flora-na": PAIR,
    "fslora": PAIR,
    "hetlora": PAIR,
    "ifca": Told(2 * FACTOR, 2 * 2 * FACTOR),
    "local-only": Told(None, None, why=f"{NOT_THERE}: nothing is sent"),
    "lora-fair": PAIR,
    "lora-fair-closed": PAIR,
    "ravan": Told(2 * 64**2 * 4, 4 * 64**2 * 4),
    "rolora": ONE,
    "sefora": Told(RANK * 4096 + (RANK + 2) * 4096, 2 * FACTOR),
    "sefora-ho": Told(RANK * 4096 + (RANK + 2) * 4096, 2 * FACTOR),
    "sefora-plus": Told(None, None, why=f"{NOT_THERE}: ours; SeFoRA's with s = r + 2 and k = s + 2"),
    "sketch-pa": Told(None, None, why=f"{NOT_THERE}: ours; sketches of 3R columns and 6R rows, FedPA-LoRA's download"),
    "slora": PAIR,
}
"""Bytes of a main round. Of IFCA K = 2, of FedLEASE M = 4, of FedSEE M = 6 and L = 1, of Ravan h_i = 2 of h = 4 heads
of width 64 at rank 4."""


Way = tuple[float, float]
"""Bytes up and down."""


@dataclass(frozen=True)
class Row:
    """One method: bytes of a client's round, mean over clients and the last two main rounds (both turns of a pair).

    at_most: the formula bounds what travels. base: what a round's change of the base adds to the download. setup:
    once a client. before, after: messages of the rounds before and after the main ones. verdict: "same" as the table,
    or why not. wrong: figures that must be equal and are not.
    """

    method: str
    formula: Way
    ledger: Way
    tensors: Way
    at_most: bool
    base: float
    setup: float
    before: Way | None
    after: Way | None
    table: Told
    verdict: str
    wrong: list[str]


def measure(name: str) -> Row:
    """Plays a whole run of one method."""
    algorithm = made(name, OPTIONS)
    members, server = world(algorithm)
    engine = watched(algorithm, members, rounds=ROUNDS, server=server)
    list(engine.rounds(begun(engine)))
    booked = engine.ledger.drain()

    def payload(number: int, kind: str, way: str, client: str) -> int:
        wanted = {"round": number, "kind": kind, "direction": way, "client": client}
        return sum(row["payload"] for row in booked if wanted.items() <= row.items())

    asked, names = algorithm.in_federation(engine.federation), sorted(engine.cards)
    phases = [phase.name for phase in engine.schedule]
    first, last = phases.index("main") + 1, len(phases) - phases[::-1].index("main")
    figures: dict[int, dict[str, list[Way]]] = {}
    wrong = []
    for one in engine.seen:
        for client in names:
            up, down = (payload(one.number, "message", way, client) for way in ("up", "down"))
            found: dict[str, Way] = {
                "formula": formula(asked, engine.federation, engine.cards[client], one.number, engine.schedule),
                "ledger": (up, down),
                "tensors": arrived(one, client, separated(algorithm.send(one.before, engine.cards[client]))[1]),
            }
            for figure, way in found.items():
                figures.setdefault(one.number, {}).setdefault(figure, []).append(way)
            most = found["formula"]
            less = asked.traits.adaptive_size and up <= most[0] and down <= most[1]
            if found["ledger"] != found["tensors"] or not (found["ledger"] == most or less):
                wrong.append(f"round {one.number}, {client}: {found}")

    def mean(figure: str, *rounds: int) -> Way:
        ways = [way for number in rounds for way in figures.get(number, {}).get(figure, [])]
        return (sum(up for up, _ in ways) / len(ways), sum(down for _, down in ways) / len(ways)) if ways else (0, 0)

    row = Row(
        method=name,
        formula=mean("formula", last - 1, last),
        ledger=mean("ledger", last - 1, last),
        tensors=mean("tensors", last - 1, last),
        at_most=asked.traits.adaptive_size,
        base=sum(payload(last, "base", "down", client) for client in names) / CLIENTS,
        setup=sum(row["payload"] for row in booked if row["kind"] == "setup") / CLIENTS,
        before=mean("ledger", first - 1) if first > 1 else None,
        after=mean("ledger", last + 1) if last < len(phases) else None,
        table=TABLE[name],
        verdict="",
        wrong=wrong,
    )
    return replace(row, verdict=verdict(row))


def world(algorithm: Algorithm) -> tuple[list[Card], Card | None]:
    """The clients, and the server where its model is another than theirs or what theirs are cut from."""
    emulation = algorithm.emulation()
    if emulation is None:
        return with_bases(algorithm, cards([RANK] * CLIENTS, {"w": LAYER})), None
    drop, outer = emulation
    middle = kept_blocks(BLOCKS - 2 * outer, drop)
    kept = {*range(outer), *(outer + i for i in middle), *range(BLOCKS - outer, BLOCKS)}
    whole = {f"blocks.{i}.w": LAYER for i in range(BLOCKS)}
    members = cards([RANK] * CLIENTS, {name: layer for name, layer in whole.items() if block_of(name) in kept})
    server = replace(members[0], id="server", layers=whole)
    return [replace(card, spec="emulator") for card in members], server


def formula(asked: Algorithm, federation: Federation, card: Card, number: int, schedule: Sequence[Phase]) -> Way:
    """What the method says of a client's round, over all layers that it trains; of an emulated model the outer ones."""
    phase, emulation = schedule[number - 1], asked.emulation()
    trained = set(card.layers) if emulation is None else outer_layers(card.layers, emulation[1])
    ways = [asked.bytes_of_round(card.layers[name], card, number, phase) for name in sorted(trained)]
    up, down = asked.bytes_apart(card, federation)
    return sum(up for up, _ in ways) + (up if phase.uploads else 0), sum(down for _, down in ways) + down


def arrived(one: Round, client: str, once: dict[str, Any]) -> Way:
    """Bytes of the tensors of both messages as they were read back, without what is sent `once`, which is set-up."""
    payload = next(entry.payload for entry in one.uploads if entry.card.id == client)
    up, down, held = (
        sum(leaf.nbytes for _, leaf in leaves(message) if isinstance(leaf, torch.Tensor))
        for message in (payload, one.downloads[client], once)
    )
    return up, down - held


def verdict(row: Row) -> str:
    """How the row compares with the specification's table, and, where that has a figure, with the method's formula."""
    told = row.table
    if told.up is None:
        return told.why
    if row.formula != row.ledger:
        return f"DIFFERENT from the formula's {row.formula[0]:,.0f} up, {row.formula[1]:,.0f} down"
    found = (*row.ledger, row.base)
    if found == (told.up, told.down, told.base):
        return f"same; {told.why}" if told.why else "same"
    return f"DIFFERENT from the table's {told.up:,} up, {told.down:,} down, {told.base:,} base"


def text(row: Row) -> str:
    """One row as a line, and what is wrong with it in more."""
    up, down = (f"{amount:>10,.0f}" for amount in row.ledger)
    apart = f"{row.base:>9,.0f} {row.setup:>9,.0f}"
    notes = [row.verdict]
    if row.at_most:
        notes.append(f"formula: {row.formula[0]:,.0f} up at most")
    if row.before is not None:
        notes.append(f"first phase: {row.before[0]:,.0f} up, {row.before[1]:,.0f} down")
    if row.after is not None:
        notes.append(f"last phase: {row.after[0]:,.0f} up, {row.after[1]:,.0f} down")
    equal = "NO" if row.wrong else "yes"
    line = f"{row.method:22} {up} {down} {apart}  {equal:5} {'; '.join(notes)}"
    return "\n".join([line, *(f"    {told}" for told in row.wrong[:4])])


def main() -> int:
    """Prints a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--methods", nargs="*", default=sorted(METHODS), help="these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one layer {LAYER.d_out} x {LAYER.d_in}, rank {RANK}, {CLIENTS} clients; bytes of a client's round")
    print(f"{'':22} {'up':>10} {'down':>10} {'base':>9} {'once':>9}  equal beside the specification's table")
    rows = []
    for name in options.methods:
        rows.append(measure(name))
        print(text(rows[-1]), flush=True)
    if options.json:
        told = {"benchmark": "bytes", "machine": machine(), "versions": versions(), "rows": [asdict(r) for r in rows]}
        options.json.write_text(json.dumps(told, indent=2) + "\n")
    bad = [row.method for row in rows if row.wrong or row.verdict.startswith("DIFFERENT")]
    if bad:
        print(f"figures that must be equal are not: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
