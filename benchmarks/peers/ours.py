"""coterie on the workload: one client after another, `--stack N` together in a step, or `--workers N` processes."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from typing import Any

import torch
from common import Weights, Work, finish, mark, prepared
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from coterie.algorithms import FedIT
from coterie.data.text import TextSet
from coterie.engines.in_process import InProcess, Progress
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Volatile
from coterie.maths.keys import root_key
from coterie.models.loading import from_network
from coterie.protocol import Card
from coterie.training.asks import Plan, TrainSettings
from coterie.training.pool import executor_for
from coterie.wire.ledger import Ledger


def engine(work: Work, stack: int = 1, workers: int = 1) -> InProcess:
    """The federation, nothing measured in its rounds but losses."""
    asked, lora = work.settings, work.settings["lora"]
    logging.disable_progress_bar()
    network: Any = AutoModelForSequenceClassification.from_pretrained(work.folder / "model", dtype=torch.float32)
    base = from_network(network, None, lora["targets"], root_key(asked["seed"]).fold("head"), attention="eager")
    text, own = texts(work), asked["examples"]
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
        heads={"base": base.head},
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
    plan = Plan(clients_per_step=stack, padding_rank=lora["rank"], workers=workers)
    return InProcess(setting, executor_for({"base": base}, train, plan), Volatile(), Ledger())


def texts(work: Work) -> TextSet:
    """The examples in the flat form of this package."""
    lengths = work.tables["mask"].sum(dim=1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = work.tables["ids"][work.tables["mask"].bool()].to(torch.int32)
    return TextSet(ids, offsets, work.tables["labels"], torch.arange(len(lengths)), work.settings["classes"])


def weights_of(progress: Progress) -> Weights:
    """Adapter and head, under the names that all contenders save."""
    pairs = {f"{layer}.{half}": getattr(term, half) for layer, term in progress.state.lora.items() for half in "BA"}
    return pairs | progress.heads["base/all"]


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
    made = engine(work, **vars(parser.parse_args(rest)))
    play(made, 1)
    mark("ready")
    found = play(made, work.settings["rounds"])
    mark("done")
    made.executor.close()
    finish(out, weights_of(found), coterie=version("coterie"))
