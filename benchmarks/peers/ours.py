"""coterie on the workload: one client after another, `--stack N` together in a step, or `--workers N` processes.

`--dtype auto` takes the plan that `coterie run` would: a probe chooses precision, attention and stacks, before the
clock starts.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version

import torch
from common import Weights, Work, finish, mark, prepared

from coterie.algorithms import FedIT
from coterie.data.sequences import SequenceSet
from coterie.data.text import TextSet
from coterie.engines.in_process import InProcess, Progress
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Volatile
from coterie.maths.keys import root_key
from coterie.models.loading import Base, from_language_network, from_network
from coterie.protocol import Card
from coterie.training.asks import Plan, TrainSettings
from coterie.training.pool import executor_for, spread
from coterie.training.probe import choose_plan
from coterie.wire.ledger import Ledger


def engine(work: Work, stack: int = 1, workers: int = 1, dtype: str = "float32") -> InProcess:
    """The federation, nothing measured in its rounds but losses."""
    asked, lora = work.settings, work.settings["lora"]
    base, text, own = base_of(work), texts(work), asked["examples"]
    sites = {}
    for client in range(asked["clients"]):
        card = Card(f"c{client:05d}", lora["rank"], own, lora["scale"], base.layers)
        sites[card.id] = Site(card, {"train": text.select(range(own * client, own * client + own))})
    rounds = asked["rounds"]
    setting = Setting(
        algorithm=FedIT(),
        sites=sites,
        rounds=rounds,
        seed=asked["seed"],
        sample=asked["cohort"],
        head="frozen" if work.language else "averaged",
        heads={"base": base.head or None},
        measuring=Measuring(every=rounds, clients_every=rounds, objective_examples=0, mismatch=False),
    )
    optimizer = asked["optimizer"]
    train = TrainSettings(
        optimizer=optimizer["name"],
        lr=optimizer["lr"],
        weight_decay=0.0,
        batch_size=asked["batch"],
        steps=asked["steps"],
        clip=None,
    )
    if dtype == "auto":
        plan = spread(choose_plan(base, text, train, rank=lora["rank"]), workers, asked["cohort"])
    else:
        plan = Plan(dtype=dtype, clients_per_step=stack, padding_rank=lora["rank"], workers=workers)  # type: ignore[arg-type]
    return InProcess(setting, executor_for({"base": base}, train, plan), Volatile(), Ledger())


def base_of(work: Work) -> Base:
    """The frozen network with its places for adapters, and a head by the workload's seed where there is one."""
    network, targets = work.network(), work.settings["lora"]["targets"]
    if work.language:
        return from_language_network(network, None, targets, attention="eager")
    return from_network(network, None, targets, root_key(work.settings["seed"]).fold("head"), attention="eager")


def texts(work: Work) -> TextSet | SequenceSet:
    """The examples in the flat form of this package."""
    lengths = work.tables["mask"].sum(dim=1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids, rows = work.tables["ids"][work.tables["mask"].bool()].to(torch.int32), torch.arange(len(lengths))
    if work.language:
        return SequenceSet(ids, offsets, work.tables["prompts"], rows)
    return TextSet(ids, offsets, work.tables["labels"], rows, work.settings["classes"])


def weights_of(progress: Progress) -> Weights:
    """Adapter and head, under the names that all contenders save."""
    pairs = {f"{layer}.{half}": getattr(term, half) for layer, term in progress.state.lora.items() for half in "BA"}
    return pairs | progress.heads.get("base/all", {})


def play(made: InProcess, rounds: int) -> Progress:
    """The first rounds of the federation, from the start."""
    fresh = InProcess(made.setting, made.executor, Volatile(), Ledger())
    progress = fresh.begin()
    for _ in range(rounds):
        progress = fresh.play(progress).progress
    return progress


if __name__ == "__main__":
    work, out, rest = prepared()
    parser = argparse.ArgumentParser()
    parser.add_argument("--stack", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "auto"])
    made = engine(work, **vars(parser.parse_args(rest)))
    play(made, 1)
    mark("ready")
    found = play(made, work.settings["rounds"])
    mark("done")
    made.executor.close()
    finish(out, weights_of(found), coterie=version("coterie"), plan=str(made.executor.plan))
