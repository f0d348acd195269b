"""The cost of everything around the arithmetic: a round of small clients, ours against a plain PEFT loop.

    python benchmarks/overhead.py --json overhead.json

A two-layer encoder of width 64, batch 4, 20 clients, 10 a round, one thread for everybody. The loop swaps PEFT state
dicts on one model, as most scripts do. Both see the same mini-batches, start and optimiser (SGD), and must end at the
same adapter to 1e-5. Repeats are interleaved; start-up (building models) is apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import BertConfig, BertForSequenceClassification

from coterie.algorithms import FedIT
from coterie.data.batches import plan as plan_batches
from coterie.data.text import TextSet
from coterie.engines.in_process import InProcess
from coterie.engines.setting import Measuring, Setting, Site
from coterie.engines.sites import Volatile
from coterie.maths.keys import root_key
from coterie.models.loading import from_network
from coterie.protocol import Card
from coterie.training.asks import Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.wire.ledger import Ledger

CLIENTS, COHORT, ROUNDS, STEPS, BATCH, LENGTH, RANK, SCALE = 20, 10, 5, 10, 4, 16, 8, 2.0
TRAIN = TrainSettings(optimizer="sgd", lr=0.05, weight_decay=0.0, batch_size=BATCH, steps=STEPS, clip=None)
SEED = 3

Weights = dict[str, torch.Tensor]


def network() -> BertForSequenceClassification:
    """The workload's model, the same for both."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
        num_labels=2,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config).eval()


def data() -> TextSet:
    """64 sequences for each client, of 16 random tokens with random labels, in one storage as in any run."""
    key, count = root_key(SEED).fold("data"), 64 * CLIENTS
    ids = torch.from_numpy((key.fold("ids").bits(count * LENGTH) % 195).astype("int32")) + 5
    labels = torch.from_numpy((key.fold("labels").bits(count) % 2).astype("int64"))
    return TextSet(ids, torch.arange(count + 1) * LENGTH, labels, torch.arange(count), 2)


def ours(clients_per_step: int) -> tuple[Callable[[], Weights], InProcess]:
    """A function that plays the federation, and its engine."""
    base = from_network(network(), None, ["query", "value"], root_key(SEED).fold("head"), attention="eager")
    text = data()
    sites = {}
    for i in range(CLIENTS):
        card = Card(f"c{i:02d}", RANK, 64, SCALE, base.layers)
        sites[card.id] = Site(card, {"train": text.select(range(64 * i, 64 * i + 64))})
    setting = Setting(
        algorithm=FedIT(),
        sites=sites,
        rounds=ROUNDS,
        seed=SEED,
        sample=COHORT,
        heads={"base": base.head},
        measuring=Measuring(every=ROUNDS, clients_every=ROUNDS, objective_examples=0, mismatch=False),
    )
    executor = Executor({"base": base}, TRAIN, Plan(clients_per_step=clients_per_step, padding_rank=RANK))
    engine = InProcess(setting, executor, Volatile(), Ledger())

    def play() -> Weights:
        fresh = InProcess(setting, executor, Volatile(), Ledger())
        *_, last = fresh.rounds(fresh.begin())
        found = {
            f"{layer}.{part}": getattr(term, part) for layer, term in last.progress.state.lora.items() for part in "BA"
        }
        return found | last.progress.heads["base/all"]

    return play, engine


def peft_loop(engine: InProcess) -> Callable[[], Weights]:
    """The same federation as a script over one PEFT model."""
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=RANK,
        lora_alpha=RANK * SCALE,
        target_modules=["query", "value"],
        lora_dropout=0.0,
    )
    model = get_peft_model(network(), config).eval()
    start = engine.begin()

    def play() -> Weights:
        current = _state_dict(start.state.lora, start.heads["base/all"])
        for number in range(1, ROUNDS + 1):
            cohort = engine._cohort(number, engine.schedule[number - 1])
            collected = []
            for name in cohort:
                set_peft_model_state_dict(model, current)
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=TRAIN.lr)
                train = engine.setting.sites[name].data["train"]
                key = engine.root.fold("request", number, name).fold("Fit", 0).fold("batches")
                for batch in plan_batches(train.lengths, BATCH, steps=STEPS, key=key):
                    inputs = train.batch(batch.indices, batch.pad_to)
                    optimizer.zero_grad()
                    model(**inputs).loss.backward()
                    optimizer.step()
                collected.append({k: v.detach().clone() for k, v in get_peft_model_state_dict(model).items()})
            current = {k: torch.stack([one[k] for one in collected]).mean(dim=0) for k in collected[0]}
        return {_own_name(k): v for k, v in current.items()}

    return play


def _state_dict(lora: object, head: Weights) -> Weights:
    prefix = "base_model.model."
    pairs = {"B": "lora_B", "A": "lora_A"}
    found = {
        f"{prefix}{layer}.{pairs[part]}.weight": getattr(term, part).clone()
        for layer, term in lora.items()  # type: ignore[attr-defined]
        for part in "BA"
    }
    return found | {prefix + name: value.clone() for name, value in head.items()}


def _own_name(name: str) -> str:
    short = name.removeprefix("base_model.model.")
    return short.replace(".lora_A.weight", ".A").replace(".lora_B.weight", ".B")


def main() -> None:
    """Runs both, interleaved, and prints best, median and ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stacked, engine = ours(COHORT)
    sequential, _ = ours(1)
    contenders = {
        "coterie, stacked": stacked,
        "coterie, sequential": sequential,
        "PEFT loop": peft_loop(engine),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    results: dict[str, Weights] = {}
    for repeat in range(options.repeats + 1):  # the first is a warm-up
        for name, play in contenders.items():
            began = time.perf_counter()
            results[name] = play()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    reference = results["PEFT loop"]
    apart = {
        name: max(float((found[k] - reference[k]).abs().max()) for k in reference) for name, found in results.items()
    }
    rows = {
        name: {"best": min(s), "median": statistics.median(s), "seconds": s, "apart": apart[name]}
        for name, s in seconds.items()
    }
    loop = rows["PEFT loop"]
    for name, row in rows.items():
        row["speedup_best"] = loop["best"] / row["best"]  # type: ignore[operator]
        row["speedup_median"] = loop["median"] / row["median"]  # type: ignore[operator]
        print(
            f"{name:22s} best {row['best']:.3f} s  median {row['median']:.3f} s  "
            f"{row['speedup_median']:.2f}x the loop  largest difference {row['apart']:.1e}"
        )
    if max(apart.values()) > 1e-5:
        raise SystemExit("the contenders do not agree to 1e-5: the figures are void")
    if options.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        workload = {"clients": CLIENTS, "cohort": COHORT, "rounds": ROUNDS, "steps": STEPS, "batch": BATCH}
        options.json.write_text(json.dumps({"workload": workload, "versions": versions, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
