"""Memory against the number of clients: 10 and 200 sites that each keep at least 2 MiB between rounds.

    python benchmarks/memory.py --json memory.json

FedPA-LoRA on a small encoder, 10 clients a round, every site with factors of its own from the start; the last round
evaluates every site's model. Each size runs in a process of its own; growth is the peak resident size from there on,
above the resident size once model and data are loaded. Sites' memories live in the run's store on disk, so growth
must not follow the number of clients.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

COHORT, RANK, ROUNDS, SIZES = 10, 28, 8, (10, 200)
MIB = 2**20


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


def measure(clients: int) -> dict[str, float]:
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
    from coterie.wire.ledger import Ledger

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=32,
        num_labels=2,
    )
    network = BertForSequenceClassification(config)
    base = from_network(network, None, "all-linear", root_key(0).fold("head"), attention="eager")
    count, length, key = 8 * clients, 8, root_key(1)
    ids = torch.from_numpy((key.fold("ids").bits(count * length) % 95).astype("int32")) + 5
    labels = torch.from_numpy((key.fold("labels").bits(count) % 2).astype("int64"))
    text = TextSet(ids, torch.arange(count + 1) * length, labels, torch.arange(count), 2)
    sites = {}
    for i in range(clients):
        own = text.select(range(8 * i, 8 * i + 8))
        sites[f"c{i:03d}"] = Site(Card(f"c{i:03d}", RANK, 8, 2.0, base.layers), {"train": own, "test": own})
    setting = Setting(
        algorithm=FedPALoRA(),
        sites=sites,
        rounds=ROUNDS,
        sample=COHORT,
        heads={"base": base.head},
        pooled_test=text.select(range(16)),
        measuring=Measuring(every=ROUNDS, clients_every=ROUNDS, objective_examples=0),
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
            for played in engine.rounds(engine.begin()):
                store.commit(played.progress.round, {})
                engine.ledger.drain()
        kept = [len(store.get(f"records/{name}")) for name in sites]
    return {
        "clients": clients,
        "smallest_state_mib": min(kept) / MIB,
        "states_mib": sum(kept) / MIB,
        "loaded_mib": loaded / MIB,
        "peak_mib": peak.value / MIB,
        "growth_mib": (peak.value - loaded) / MIB,
    }


def main() -> None:
    """Measures each size in its own process and prints the growth between them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        print(json.dumps(measure(options.clients)))
        return
    rows = []
    for clients in SIZES:
        done = subprocess.run(
            [sys.executable, __file__, "--clients", str(clients)], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print("  ".join(f"{name} {value:.1f}" for name, value in rows[-1].items()))
    between = rows[1]["growth_mib"] - rows[0]["growth_mib"]
    print(f"growth above the loaded process between {SIZES[0]} and {SIZES[1]} clients: {between:.1f} MiB")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "between_mib": between}, indent=2))


if __name__ == "__main__":
    main()
