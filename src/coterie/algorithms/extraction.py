"""Experts out of a pool of clients' blocks, by the server's own data of each task."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.algorithms.contributions import warm_start
from coterie.algorithms.expert_pool import Block, Common, Trained, mean_common
from coterie.algorithms.factors import factor_of_pair
from coterie.errors import ConfigError, nearest
from coterie.maths.extraction import Descent, flat, mixtures, unflat
from coterie.maths.simplex import block_sums
from coterie.protocol import Gradient, LowRank, Model, Uploads

PUBLIC = "public/"
"""What the names of a server's data sets of one task each begin with."""


@dataclass(frozen=True)
class Pool:
    """What a round's uploads give the server: blocks with their client's id, and the one scale of all.

    A: A^global by layer. common: what is shared beside experts, None before anybody has trained it.
    """

    blocks: Sequence[tuple[str, Block]]
    A: Mapping[str, Tensor]
    scale: float
    common: Common | None = None


def first_pool(uploads: Uploads) -> Pool | None:
    """Of the round that trains one adapter: every client's B, and the mean A. None without such uploads."""
    sent = uploads.where(lambda one: not isinstance(one.payload, Trained))
    if not len(sent):
        return None
    A = sent.mean(lambda pair: factor_of_pair(pair, "A"))
    return Pool([(one.card.id, factor_of_pair(one.payload, "B")) for one in sent], A, sent.entries[0].card.scale)


def later_pool(uploads: Uploads, A: Mapping[str, Tensor], experts: int) -> Pool | None:
    """Of later rounds: all trained blocks, and the mean of what is shared. None without uploads over these experts."""
    sent = uploads.where(lambda one: isinstance(one.payload, Trained) and one.payload.fits(experts))
    if not len(sent):
        return None
    card = sent.entries[0].card
    blocks = [(one.card.id, block) for one in sent for block in one.payload.blocks.values()]
    return Pool(blocks, A, card.scale, mean_common(sent, card.rank))


@dataclass(frozen=True)
class Extracted:
    """M experts, and what each client of the pool contributes to them, (M,) fp64."""

    experts: list[Block]
    contributions: dict[str, Tensor]


def extracted(
    pool: Pool,
    tasks: Sequence[str],
    contributions: Mapping[str, Tensor],
    clients: int,
    descent: Descent,
    examples: int | None,
) -> Generator[list[Gradient], list[dict[str, Tensor]], Extracted]:
    """Extract of FedSEE's Algorithm 1 (lines 41-46): one gradient for each task at each step, none of the pool's size.

    What is shared acts beside each expert, W~ with the base. contributions: C as it was, from which weights start.
    examples: of a task's data at each step, drawn anew; None: all.
    """
    shapes = {name: tuple(block.shape) for name, block in pool.blocks[0][1].items()}
    rows = torch.stack([flat(block, list(shapes)) for _, block in pool.blocks])  # (P, D)
    ids = list(dict.fromkeys(name for name, _ in pool.blocks))
    owners = torch.tensor([ids.index(name) for name, _ in pool.blocks])
    start = warm_start(contributions, [name for name, _ in pool.blocks], len(tasks), clients)
    around = {} if pool.common is None else pool.common.terms
    omega = descent.feasible(start, owners, len(ids))  # (M, P)
    for number in range(1, descent.steps + 1):
        asked = []
        for task, row in zip(tasks, mixtures(omega, rows), strict=True):
            expert = {name: LowRank(B, pool.A[name], pool.scale) for name, B in unflat(row, shapes).items()}
            model = Model(lora=expert, **around)  # type: ignore[arg-type]  # a term's name is no field's
            asked.append(Gradient(model, task, wrt=("lora.*.B",), examples=examples))
        found = yield asked
        by_layer = [{name: one[f"lora.{name}.B"] for name in shapes} for one in found]
        slopes = torch.stack([flat(one, list(shapes)) for one in by_layer])
        omega = descent.stepped(number, omega, rows, slopes, owners, len(ids))
    C = block_sums(omega, owners, len(ids))
    experts = [unflat(row, shapes) for row in mixtures(omega, rows)]
    return Extracted(experts, {name: C[:, i].clone() for i, name in enumerate(ids)})


def public_tasks(data: Iterable[str], chosen: Sequence[str] | None) -> tuple[str, ...]:
    """The data sets `public/<task>` of these tasks, or of all that the server has, in the order of their names.

    Raises:
        ConfigError: a task without such a set, or no such set at all.
    """
    held = sorted(name for name in data if name.startswith(PUBLIC))
    wanted = held if chosen is None else sorted(PUBLIC + task.removeprefix(PUBLIC) for task in chosen)
    odd = [name.removeprefix(PUBLIC) for name in wanted if name not in held]
    if odd or not wanted:
        lacking = f"of {odd[0]!r}{nearest(odd[0], [name.removeprefix(PUBLIC) for name in held])}" if odd else "at all"
        raise ConfigError(
            "experts are extracted one for each public task, but the server has no public examples "
            f"{lacking}; set some aside (server_data.public=200), or choose among tasks (options.tasks)"
        )
    return tuple(wanted)
