"""Passes that begin where the lowest adapter sits: what the frozen blocks below it give is stored for each example.

Base weights below all adapters never change, and a base's own dropout is off. So these blocks give an example the same
hidden states in every step, round, client and method. They are computed once, of the example alone and without padding,
so that they depend neither on its company in a batch nor on the order of examples, and are put into each batch with
zeros where it is padded. Embeddings are computed as ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.assets import cache_root
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models.loading import Base
from coterie.training.asks import Plan
from coterie.training.lower_store import LowerStore
from coterie.training.recompute import repeated_layers

MIB = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Pass = Callable[..., Any]
"""A network's own forward."""


@dataclass(frozen=True)
class Lower:
    """The blocks that end before the first adapted layer begins, in order; width: d of the states that leave the last.

    spare: None where a block gives its states alone, else how many None follow them in a tuple.
    """

    blocks: tuple[nn.Module, ...]
    width: int
    spare: int | None

    def output(self, states: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """States (b, L, d) as one of these blocks gives them back."""
        return states if self.spare is None else (states, *(None,) * self.spare)


@dataclass(frozen=True)
class Row:
    """One example of a batch: its place there, how many of its tokens are no padding (None: all), and a key of them."""

    place: int
    length: int | None
    key: bytes


class StoredLower:
    """The states that leave the lower blocks of an executor's bases, kept within the plan's budgets.

    folder: of what is on disk, by default in the user's cache.
    """

    def __init__(self, plan: Plan, folder: Path | None = None) -> None:
        self.plan = plan
        memory = plan.lower_memory * MIB // plan.workers  # each worker process has a store
        self.store = LowerStore(folder or cache_root() / "lower", memory, plan.lower_disk * MIB)
        self._lower: dict[int, tuple[Lower | None, str]] = {}

    @contextmanager
    def used(self, base: Base) -> Iterator[None]:
        """For passes inside: of the lower blocks only what is not stored yet is computed."""
        network = base.network
        run: Pass = network.forward

        def forward(**inputs: Tensor) -> Any:
            return self._passed(base, run, inputs)

        with _replaced(network, forward):
            yield
        self.store.flush(MIB)

    def _passed(self, base: Base, run: Pass, inputs: Mapping[str, Tensor]) -> Any:
        rows = rows_of(inputs)
        if id(base) not in self._lower:
            with base.slots.everywhere():
                found = lower_of(base, run, alone(inputs, rows[0]))
            self._lower[id(base)] = found, "" if found is None else _kind(base, found, self.plan)
        lower, kind = self._lower[id(base)]
        if lower is None:
            return run(**inputs)
        states: dict[bytes, Tensor] = {}
        for row in rows:
            if row.key not in states:
                kept = self.store.get(kind, row.key)
                if kept is None:
                    with base.slots.everywhere():
                        kept = lower_states(lower, run, alone(inputs, row))
                    self.store.put(kind, row.key, kept)
                states[row.key] = kept
        with passed_over(lower, [states[row.key] for row in rows]):
            return run(**inputs)


def stored_lower(plan: Plan) -> StoredLower | None:
    """What an executor of this plan keeps; None where the plan gives no room."""
    return StoredLower(plan) if plan.lower_memory or plan.lower_disk else None


@torch.no_grad()
def lower_of(base: Base, run: Pass, inputs: Mapping[str, Tensor]) -> Lower | None:
    """Which blocks are lower ones, by a pass over one example that ends at the first adapted layer.

    None where an adapter sits in the first block or before it, and for blocks that run more than once or give back more
    than states (1, L, d).
    """
    try:
        blocks = repeated_layers(base.network)
    except ModelError:
        return None
    ended: list[tuple[nn.Module, Any]] = []
    hooks = [block.register_forward_hook(lambda block, _, given: ended.append((block, given))) for block in blocks]
    slots = base.slots
    places = [*slots.layers.values(), *slots.heads.values(), *([] if slots.output is None else [slots.output])]
    hooks += [place.register_forward_pre_hook(_end) for place in places]
    try:
        run(**inputs)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    spares = {_spare(given) for _, given in ended}
    if len(spares) != 1 or len({id(block) for block, _ in ended}) < len(ended):
        return None
    (spare,) = spares
    states = ended[-1][1] if spare is None else ended[-1][1][0]
    if not isinstance(states, Tensor) or states.dim() != 3 or len(states) != 1:
        return None
    return Lower(tuple(block for block, _ in ended), states.shape[-1], spare)


@torch.no_grad()
def lower_states(lower: Lower, run: Pass, inputs: Mapping[str, Tensor]) -> Tensor:
    """What leaves the lower blocks of one example without padding, (L, d) on the CPU; nothing above them runs."""
    seen: list[Any] = []

    def note(_: nn.Module, __: Any, given: Any) -> None:
        seen.append(given)
        raise _Reached

    hook = lower.blocks[-1].register_forward_hook(note)
    try:
        run(**inputs)
    except _Reached:
        pass
    finally:
        hook.remove()
    states: Tensor = seen[0] if lower.spare is None else seen[0][0]
    return states[0].cpu().contiguous()


@contextmanager
def passed_over(lower: Lower, states: Sequence[Tensor]) -> Iterator[None]:
    """For a pass inside: lower blocks compute nothing, and the last gives the states (Lᵢ, d) of the batch's rows."""

    def passing(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return lower.output(hidden_states)

    def giving(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        padded = states[0].new_zeros(len(states), hidden_states.shape[1], lower.width)
        for row, own in zip(padded, states, strict=True):
            row[: len(own)] = own
        return lower.output(padded.to(hidden_states.device))

    with ExitStack() as stack:
        for block in lower.blocks[:-1]:
            stack.enter_context(_replaced(block, passing))
        stack.enter_context(_replaced(lower.blocks[-1], giving))
        yield


def rows_of(inputs: Mapping[str, Tensor]) -> list[Row]:
    """The examples of a batch, by what they hold whatever the padding.

    A key is two sums, modulo 2^64, of all numbers of an example, each times a random odd number of its input and place:
    two examples share one by chance less than once in 10^20 pairs.

    Raises:
        ModelError: padding that is not on the right.
    """
    mask = _told(inputs)
    count = len(next(iter(inputs.values())))
    parts = []
    for name, value in inputs.items():
        if value.dim() == 4 and name == "attention_mask":  # which follows from the positions
            continue
        # So that a zero counts too, and an input that is there is not like one that is missing.
        numbers = _as_integers(value).reshape(count, -1) + 1
        if mask is not None and value.shape == mask.shape:
            numbers = numbers * mask.long()
        factors = _factors(name, 1 << (numbers.shape[1] - 1).bit_length(), str(value.device))
        parts.append((numbers[:, None] * factors[:, : numbers.shape[1]]).sum(dim=-1))
    sums = torch.stack(parts).sum(dim=0)
    if mask is None:
        return [Row(place, None, own.tobytes()) for place, own in enumerate(sums.cpu().numpy())]
    wrong = (mask[:, 1:] > mask[:, :-1]).sum(dim=1)
    told = torch.cat([sums, mask.long().sum(dim=1, keepdim=True), wrong[:, None]], dim=1).cpu()
    if int(told[:, 3].sum()):
        raise ModelError("stored activations are of examples padded on the right; take execution.lower=off")
    lengths = told[:, 2].tolist()
    return [
        Row(place, length, own.tobytes())
        for place, (length, own) in enumerate(zip(lengths, told[:, :2].contiguous().numpy(), strict=True))
    ]


def alone(inputs: Mapping[str, Tensor], row: Row) -> dict[str, Tensor]:
    """The inputs of one example of a batch, as a batch of its own without padding."""
    mask = _told(inputs)
    own = {name: value[row.place : row.place + 1] for name, value in inputs.items()}
    for name, value in inputs.items():
        if mask is not None and value.shape == mask.shape:
            own[name] = own[name][:, : row.length]
        elif mask is not None and name == "attention_mask":
            own[name] = own[name][:, :, : row.length, : row.length]
    return own


def _told(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Which places of a batch hold a token, (b, L), where it says so: one that does sees itself."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.dim() != 4:
        return mask
    own = mask[:, 0].diagonal(dim1=1, dim2=2)
    return (own >= 0).long() if own.is_floating_point() else own.long()


class _Reached(Exception):
    """Ends a pass that has gone far enough."""


def _end(*_: Any) -> None:
    raise _Reached


def _spare(given: Any) -> int | None:
    """See `Lower`; -1 where a block gives back something else besides."""
    if isinstance(given, Tensor):
        return None
    sound = isinstance(given, tuple) and len(given) > 0 and all(one is None for one in given[1:])
    return len(given) - 1 if sound else -1


@contextmanager
def _replaced(module: nn.Module, forward: Pass) -> Iterator[None]:
    """For calls inside: the module computes this instead."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _kind(base: Base, lower: Lower, plan: Plan) -> str:
    """The name of all that decides the states beside the example; whatever may change their last bits is in it."""
    config = getattr(base.network, "config", None)
    device = torch.cuda.get_device_name(base.device) if base.device.type == "cuda" else str(base.device)
    parts = [
        base.digest,
        type(base.network).__name__,
        "" if config is None else config.to_json_string(),
        f"{len(lower.blocks)} blocks, {'attention of coterie' if base.packs else 'as the network comes'}",
        f"{plan.dtype} {plan.attention} {plan.threads} threads",
        f"{device} {torch.backends.cpu.get_cpu_capability()}",
        f"torch {torch.__version__}, transformers {version('transformers')}",
    ]
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(f"{len(part)}:{part}".encode())
    return hashed.hexdigest()


def _as_integers(value: Tensor) -> Tensor:
    """The bits of any tensor as int64."""
    if value.is_floating_point():
        value = value.contiguous().view(_INTEGERS[value.itemsize])
    return value.long()


@cache
def _factors(name: str, count: int, device: str) -> Tensor:
    """Two rows of `count` random odd numbers, (2, count) int64; those of fewer are their beginning."""
    key = root_key(0).fold("lower", name)
    rows = [torch.from_numpy(key.fold(i).bits(count).view("int64").copy()) | 1 for i in range(2)]
    return torch.stack(rows).to(device)
