"""A training step on an accelerator: precision, attention, stacks of clients, copies, memory; under five minutes.

    python benchmarks/gpu.py --json gpu.json
    python benchmarks/gpu.py --device cpu --quick         the same in small, to see that it runs

An encoder of MiniLM's shape on 32 texts of 64 tokens and a decoder of SmolLM2-135M's on 8 sequences of 128, random
weights, LoRA of rank 16. For each: a step of one client in fp32 and bf16 with both kinds of attention, and which of
them the probe of a run chooses; in that plan 1 to 16 clients stacked in one step, with tokens a second, the share of a
matrix product's best rate (FLOPs as PyTorch counts those that one step executes) and the peak of memory; and whether
`torch.compile` pays: what it costs, the step afterwards, and after how many steps it would be even. Copies: a batch's
way to the device from plain and from pinned memory. Waits: how often a client's Fit waits for the device. Times are of
the clock with the device's queue emptied before and after. What would begin after --limit seconds is left out and told.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from memory import MIB, Peak
from peak import GOOD, KEY
from standin import counting, machine, versions
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from coterie.data.sequences import DataSet, SequenceSet
from coterie.data.text import TextSet
from coterie.errors import CoterieError
from coterie.models.loading import Base, from_language_network, from_network
from coterie.protocol import Fit, LowRank, Model
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.probe import choose_plan

RANK = 16
WAYS = (("float32", "sdpa"), ("float32", "eager"), ("bfloat16", "sdpa"), ("bfloat16", "eager"))


@dataclass(frozen=True)
class Case:
    """A network of random weights, and a client's batch: b examples of L tokens."""

    decoder: bool
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    b: int
    L: int


CASES = {
    "encoder": Case(False, 6, 384, 12, 1536, 30522, 32, 64),
    "decoder": Case(True, 30, 576, 9, 1536, 49152, 8, 128),
}
SMALL = {
    "encoder": Case(False, 2, 64, 2, 128, 100, 4, 16),
    "decoder": Case(True, 2, 64, 2, 128, 100, 4, 16),
}


class Device:
    """Time and memory of where a step runs."""

    def __init__(self, name: str) -> None:
        self.name, self.cuda = name, name.startswith("cuda")

    def seconds(self, run: Callable[[], Any]) -> float:
        """Of the clock, from an empty queue to an empty queue."""
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Until nothing is in the queue."""
        if self.cuda:
            torch.cuda.synchronize()

    def waits(self, run: Callable[[], Any]) -> int:
        """How often a run waits for the device, as PyTorch tells it; its copies of results at the end are some."""
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message) for one in told)

    def peak(self, run: Callable[[], Any]) -> float:
        """MiB at most during a run: allocated on the device, or resident in this process."""
        gc.collect()
        if not self.cuda:
            with Peak() as watched:
                run()
            return watched.value / MIB
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / MIB


def base_of(case: Case) -> Base:
    """The network with its places for adapters."""
    torch.manual_seed(0)
    common = {
        "vocab_size": case.vocabulary,
        "hidden_size": case.width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "intermediate_size": case.inner,
        "max_position_embeddings": 512,
    }
    if case.decoder:
        decoder = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=True))
        return from_language_network(decoder, None, "all-linear", attention="eager")
    encoder = BertForSequenceClassification(BertConfig(**common, num_labels=2))
    return from_network(encoder, None, ["query", "value"], KEY.fold("head"), attention="eager")


def data_of(case: Case, steps: int) -> DataSet:
    """So many batches of random tokens; of sequences the second half is to be predicted."""
    count = case.b * steps
    drawn = (KEY.fold("ids").bits(count * case.L) % (case.vocabulary - 5)).astype("int32")
    ids, offsets, rows = torch.from_numpy(drawn) + 5, torch.arange(count + 1) * case.L, torch.arange(count)
    if case.decoder:
        return SequenceSet(ids, offsets, torch.full((count,), case.L // 2), rows)
    return TextSet(ids, offsets, rows % 2, rows, 2)


def asks_of(case: Case, base: Base, clients: int, steps: int) -> list[Ask]:
    """A Fit for each client."""
    pairs = {
        name: LowRank(torch.zeros(layer.d_out, RANK), KEY.fold(name).normal((RANK, layer.d_in), 0.02))
        for name, layer in base.layers.items()
    }
    data, fit = data_of(case, steps), Fit(Model(lora=pairs))
    return [Ask(f"c{i}", fit, "base", base.head or None, data, KEY.fold("fit", i)) for i in range(clients)]


class Trainer:
    """Steps of stacked clients on one base."""

    def __init__(self, case: Case, base: Base, plan: Plan, steps: int) -> None:
        self.case, self.base, self.steps = case, base, steps
        settings = TrainSettings(batch_size=case.b, steps=steps)
        self.executor = Executor({"base": base}, settings, plan)

    def run(self, clients: int) -> None:
        """All steps of so many clients."""
        for done in self.executor.answer(asks_of(self.case, self.base, clients, self.steps)):
            if not isinstance(done, Done):
                raise done

    def step(self, device: Device, clients: int, repeats: int = 3) -> float:
        """Seconds of a step: the median of runs, after one."""
        self.run(clients)
        return statistics.median(device.seconds(lambda: self.run(clients)) for _ in range(repeats)) / self.steps

    def flops(self, clients: int) -> float:
        """Of the products that a step executes."""
        with counting() as counter:
            self.run(clients)
        return counter.get_total_flops() / self.steps


def product_rate(device: Device, dtype: torch.dtype, scale: int) -> float:
    """The best FLOPs a second of the good shapes, `scale` times as large in each direction."""
    rates = []
    for m, k, n in [(scale * m, scale * k, scale * n) for m, k, n in GOOD]:
        x = torch.full((m, k), 0.5, dtype=dtype, device=device.name)
        w = torch.full((n, k), 0.5, dtype=dtype, device=device.name)

        def product(x: torch.Tensor = x, w: torch.Tensor = w) -> None:
            for _ in range(5):
                torch.nn.functional.linear(x, w)

        device.seconds(product)
        rates.append(5 * 2 * m * k * n / min(device.seconds(product) for _ in range(3)))
    return max(rates)


def copies(device: Device, size: int) -> dict[str, float]:
    """Microseconds for so many int64 to get to the device, from plain and from pinned memory."""
    plain = torch.zeros(size, dtype=torch.int64)
    pinned = plain.pin_memory()
    for source in (plain, pinned):
        device.seconds(lambda source=source: source.to(device.name, non_blocking=True))
    return {
        name: 1e6 * min(device.seconds(lambda s=source: s.to(device.name, non_blocking=True)) for _ in range(20))
        for name, source in (("plain", plain), ("pinned", pinned))
    }


def compiled(trainer: Trainer, device: Device, plain: float) -> dict[str, Any]:
    """What `torch.compile` costs one client, and gives."""
    try:
        trainer.base.network.compile()
        cost = device.seconds(lambda: trainer.run(1))
        step = trainer.step(device, 1)
    except Exception as error:  # whatever a compiler says of a network
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
    finally:
        trainer.base.network._compiled_call_impl = None
    saved = plain - step
    return {"seconds": cost, "step": step, "even_after": cost / saved if saved > 0 else None}


def measure(name: str, case: Case, device: Device, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """One network."""
    steps, found = 2 if options.quick else 10, dict[str, Any](left_out=[])
    tokens = case.b * case.L
    ways = {}
    for dtype, attention in WAYS:
        plan = Plan(dtype, attention, padding_rank=RANK, device=device.name)  # type: ignore[arg-type]
        try:
            ways[f"{dtype}, {attention}"] = Trainer(case, base_of(case), plan, steps).step(device, 1, 2)
        except CoterieError as error:
            ways[f"{dtype}, {attention}"] = None
            print(f"{name}: {error}")
    base, settings = base_of(case), TrainSettings(batch_size=case.b)
    chosen = choose_plan(base, data_of(case, 4), settings, device=device.name, rank=RANK)
    rate = product_rate(device, getattr(torch, chosen.dtype), 1 if options.quick or not device.cuda else 4)
    print(f"{name}: the probe takes {chosen.dtype}, {chosen.attention}, {chosen.clients_per_step} clients a step")
    for way, taken in ways.items():
        if taken is not None:
            print(f"  {way:18s} {1e3 * taken:8.2f} ms a step, {tokens / taken:10.0f} tokens/s")
    stacks: dict[int, dict[str, float]] = {}
    trainer = Trainer(case, base, replace(chosen, clients_per_step=16), steps)
    for clients in (1, 2) if options.quick else (1, 2, 4, 8, 16):
        if time.perf_counter() > end:
            found["left_out"].append(f"{clients} clients")
            continue
        taken = trainer.step(device, clients)
        row = {
            "step": taken,
            "tokens": clients * tokens / taken,
            "share": trainer.flops(clients) / taken / rate,
            "peak_mib": device.peak(lambda clients=clients: trainer.run(clients)),
        }
        stacks[clients] = row
        print(
            f"  {clients:2d} clients stacked {1e3 * taken:8.2f} ms a step, {row['tokens']:10.0f} tokens/s, "
            f"{row['share']:.1%} of a product's rate, {row['peak_mib']:.0f} MiB at most"
        )
    found |= {"ways": ways, "plan": str(chosen), "product_rate": rate, "stacks": stacks, "compile": None}
    if device.cuda:
        found["waits"] = device.waits(lambda: trainer.run(1))
        print(f"  {steps} steps of a client wait {found['waits']} times for the device")
    if options.compile and time.perf_counter() < end and 1 in stacks:
        found["compile"] = compiled(trainer, device, stacks[1]["step"])
        print(f"  torch.compile: {found['compile']}")
    return found


def main() -> int:
    """Runs all that the time allows, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small networks and few steps")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="by default on a GPU only")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which nothing more begins")
    options = parser.parse_args()
    device = Device(options.device)
    if device.cuda and not torch.cuda.is_available():
        print("there is no GPU that PyTorch can use; take --device cpu --quick to try the command", file=sys.stderr)
        return 2
    options.compile = device.cuda if options.compile is None else options.compile
    torch.set_num_threads(1)
    began = time.perf_counter()
    told: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.cuda else "cpu"}
    told["copies"] = copies(device, 32 * 128) if device.cuda else None
    if told["copies"]:
        plain, pinned = told["copies"]["plain"], told["copies"]["pinned"]
        print(f"{told['device']}: a batch gets there in {plain:.0f} us, {pinned:.0f} from pinned memory")
    cases = SMALL if options.quick else CASES
    told["rows"] = {name: measure(name, case, device, options, began + options.limit) for name, case in cases.items()}
    told["seconds"] = time.perf_counter() - began
    print(f"{told['seconds']:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps(told | {"machine": machine(), "versions": versions()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
