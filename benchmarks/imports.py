"""How long the package takes to import, beside PyTorch alone.

    python benchmarks/imports.py --json imports.json

Fresh processes in turn, each with compiled files and warm caches: `import torch`; `import coterie`, which loads nothing
until a name is used; every public name of coterie, with all that it needs; and what a worker process loads. Seconds are
those of the clock inside the process, its own start not counted; CPU seconds beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from standin import machine, versions

WANTED = 1.5
"""Seconds that all public names may take beyond `import torch`."""

STATEMENTS = {
    "torch": "import torch",
    "coterie": "import coterie",
    "all public names": "import coterie; [getattr(coterie, name) for name in coterie.__all__]",
    "a worker": "import coterie.training.pool_worker",
}


def once(statement: str) -> tuple[float, float]:
    """Seconds of the clock and of the processor that a statement takes in a fresh process."""
    script = (
        "import time; wall, cpu = time.perf_counter(), time.process_time()\n"
        f"{statement}\n"
        "print(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    wall, cpu = told.split()[-2:]
    return float(wall), float(cpu)


def measure(repeats: int) -> dict[str, Any]:
    """Medians by statement, and how much more than torch each takes: the median of differences within a turn."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STATEMENTS}
    for repeat in range(repeats + 1):
        for name, statement in STATEMENTS.items():
            taken = once(statement)
            if repeat:  # the first turn fills the system's caches
                found[name].append(taken)
    rows = {}
    for name, taken in found.items():
        pairs = list(zip(taken, found["torch"], strict=True))
        rows[name] = {
            "seconds": statistics.median(wall for wall, _ in taken),
            "cpu": statistics.median(cpu for _, cpu in taken),
            "more": statistics.median(own[0] - torch[0] for own, torch in pairs),
            "more_cpu": statistics.median(own[1] - torch[1] for own, torch in pairs),
            "all": taken,
        }
    return rows


def main() -> None:
    """Measures, prints a line for each and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = measure(options.repeats)
    for name, row in rows.items():
        print(f"{name:17s} {row['seconds']:.2f} s, {row['more']:+.2f} beside torch; CPU {row['cpu']:.2f} s")
    if options.json:
        figures = {"rows": rows, "machine": machine(), "versions": versions()}
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
