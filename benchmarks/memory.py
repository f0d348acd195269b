"""Memory against the number of clients: few sites that keep much, and ten thousand that keep little.

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --many --json memory-many.json

FedPA-LoRA on a small encoder, every site with factors of its own from the start. Few: 10 and 200 sites of at least
2 MiB each, 10 a round; the last round evaluates every site's model. Many: 100 and 10,000 sites of some KiB, 40 a
round, with a checkpoint after each as in a run; CPU seconds are those of a round, first and last apart. Each size runs
in processes of its own, the two sizes in turn; growth is the peak resident size from there on, above the resident size
once model and data are loaded, and of the tries the median counts: memory comes in pages of 2 MiB. Sites' memories live
in the run's store on disk, so growth must not follow the number of clients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Kind:
    """A federation: its encoder, ranks, cohort and rounds, and with how many clients it is measured."""

    sizes: tuple[int, int]
    cohort: int
    rounds: int
    rank: int
    width: int
    layers: int
    targets: str | list[str]
    tested: bool


FEW = Kind((10, 200), cohort=10, rounds=8, rank=28, width=256, layers=4, targets="all-linear", tested=True)
MANY = Kind((100, 10_000), cohort=40, rounds=8, rank=4, width=64, layers=2, targets=["query", "value"], tested=False)


def resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident size while it watches, sampled every 2 ms."""

    def __init__(self) -> None:
        self.value = resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.value = max(self.value, resident())
            time.sleep(0.002)


def measure(kind: Kind, clients: int) -> dict[str, float]:
    """One federation in this process."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from coterie.algorithms import FedPALoRA
    from coterie.algorithms.factors import initial_factors
    from coterie.data.text import TextSet
    from coterie.engines.checkpoints import CheckpointStore
    from coterie.engines.in_process import InProcess
    from coterie.engines.setting import Measuring, Setting, Site
    from coterie.engines.sites import save_record
    from coterie.maths.keys import root_key
    from coterie.models.loading import from_network
    from coterie.protocol import Card, SiteRecord
    from coterie.training.asks import Plan, TrainSettings
    from coterie.training.executor import Executor
    from coterie.wire.codec import encode
    from coterie.wire.ledger import Ledger

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=kind.width,
        num_hidden_layers=kind.layers,
        num_attention_heads=4,
        intermediate_size=4 * kind.width,
        max_position_embeddings=32,
        num_labels=2,
    )
    network = BertForSequenceClassification(config)
    base = from_network(network, None, kind.targets, root_key(0).fold("head"), attention="eager")
    count, length, key = 8 * clients, 8, root_key(1)
    ids = torch.from_numpy((key.fold("ids").bits(count * length) % 95).astype("int32")) + 5
    labels = torch.from_numpy((key.fold("labels").bits(count) % 2).astype("int64"))
    text = TextSet(ids, torch.arange(count + 1) * length, labels, torch.arange(count), 2)
    sites = {}
    for i in range(clients):
        own = text.select(range(8 * i, 8 * i + 8))
        card = Card(f"c{i:05d}", kind.rank, 8, 2.0, base.layers)
        sites[card.id] = Site(card, {"train": own, "test": own} if kind.tested else {"train": own})
    setting = Setting(
        algorithm=FedPALoRA(),
        sites=sites,
        rounds=kind.rounds,
        sample=kind.cohort,
        heads={"base": base.head},
        pooled_test=text.select(range(16)) if kind.tested else None,
        measuring=Measuring(every=kind.rounds, clients_every=kind.rounds, objective_examples=0),
    )
    train = TrainSettings(optimizer="sgd", lr=1e-3, batch_size=4, steps=1)
    executor = Executor({"base": base}, train, Plan(clients_per_step=1))
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        engine = InProcess(setting, executor, store, Ledger())
        loaded = resident()
        with Peak() as peak:
            for name, site in sites.items():
                own_factors = initial_factors(site.card, root_key(2).fold(name))
                save_record(store, name, SiteRecord(memory={"factors": own_factors}))
            store.commit(0, {})
            progress, spent = engine.begin(), []
            while not progress.finished:
                began = time.process_time()
                progress = engine.play(progress).progress
                engine.ledger.drain()
                store.put("progress", encode(progress, dense=True))
                store.put("ledger", engine.ledger.state_text().encode())
                store.commit(progress.round, {})
                spent.append(time.process_time() - began)
        kept = [len(store.get(f"records/{name}")) for name in sites]
    return {
        "clients": clients,
        "smallest_state_mib": min(kept) / MIB,
        "states_mib": sum(kept) / MIB,
        "loaded_mib": loaded / MIB,
        "peak_mib": peak.value / MIB,
        "growth_mib": (peak.value - loaded) / MIB,
        "round_cpu_s": statistics.median(spent[1:-1]),
    }


def main() -> None:
    """Measures each size in its own process and prints the growth between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--many", action="store_true", help="ten thousand clients against a hundred")
    parser.add_argument("--tries", type=int, default=3, help="processes for each size")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kind = MANY if options.many else FEW
    if options.clients:
        print(json.dumps(measure(kind, options.clients)))
        return
    tries: dict[int, list[dict[str, float]]] = {clients: [] for clients in kind.sizes}
    for _ in range(options.tries):
        for clients, found in tries.items():
            command = [sys.executable, __file__, "--clients", str(clients), *(["--many"] if options.many else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print("  ".join(f"{name} {value:.3g}" for name, value in found[-1].items()))
    rows = [{name: statistics.median(one[name] for one in found) for name in found[0]} for found in tries.values()]
    between = rows[1]["growth_mib"] - rows[0]["growth_mib"]
    few, many = kind.sizes
    times = rows[1]["growth_mib"] / rows[0]["growth_mib"]
    print(f"growth above the loaded process between {few} and {many} clients: {between:.1f} MiB ({times:.2f} times)")
    if options.json:
        told = {"rows": rows, "between_mib": between, "tries": list(tries.values())}
        options.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
