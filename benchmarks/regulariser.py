"""How much FedSEE's extraction depends on what its coefficient of 0.01 multiplies, which the paper does not say (S2).

    python benchmarks/regulariser.py --json regulariser.json

Six tasks of squared losses L_m(B) = h/2 ||B - B*_m||^2, twelve clients whose one block each is the mixture of the
optima by a Dirichlet(0.5) draw, plus noise; 50 steps from even weights, five seeds. `half square` is what the package
does; `off`, negative `entropy` and `proximal` (half the squared distance from the first weights) are the readings
beside it, and `ten times` is half square with 0.1. Told of each, on average over seeds: how far experts end from the
optima, relative to these; the slope of clients' contributions over their mixtures (Figure 9); and the largest
difference of a contribution, brought to sum one, from `half square` (`away`). Where `h` is small, losses say little
and the regulariser most.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from standin import machine, versions
from torch import Tensor

from coterie.algorithms.extraction import Pool, extracted
from coterie.experiments.papers.estimates import mean_absolute_error, slope
from coterie.maths.extraction import Descent
from coterie.maths.keys import Key, root_key

TASKS, CLIENTS, SHAPE, SEEDS, NOISE = 6, 12, (24, 4), 5, 0.1
CURVATURES = (1.0, 1e-4)
FIGURES = ("experts off", "slope", "MAE", "away")


@dataclass(frozen=True)
class Entropy(Descent):
    """Negative entropy: regulariser * sum omega log omega."""

    def pull(self, omega: Tensor) -> Tensor:
        return self.regulariser * (omega.clamp(min=1e-12).log() + 1)


@dataclass(frozen=True)
class Proximal(Descent):
    """Half the squared distance from even weights, with which the first extraction begins."""

    def pull(self, omega: Tensor) -> Tensor:
        return self.regulariser * (omega - 1 / omega.shape[1])


READINGS: dict[str, Descent] = {
    "half square": Descent(),
    "off": Descent(regulariser=0.0),
    "entropy": Entropy(),
    "proximal": Proximal(),
    "ten times": Descent(regulariser=0.1),
}


def found(descent: Descent, key: Key, h: float) -> tuple[float, Tensor, Tensor]:
    """The experts' relative distance from the optima, contributions with columns of sum one, mixtures; (M, N) both."""
    optima = key.fold("optima").normal((TASKS, *SHAPE), dtype=torch.float64)
    squares = key.fold("mixtures").normal((CLIENTS, TASKS), dtype=torch.float64).square()
    alpha = squares / squares.sum(dim=1, keepdim=True)  # Dirichlet(1/2)
    blocks = torch.einsum("nm,mij->nij", alpha, optima)
    blocks += NOISE * key.fold("noise").normal(tuple(blocks.shape), dtype=torch.float64)
    pool = Pool([(f"c{i:02}", {"w": block}) for i, block in enumerate(blocks)], {"w": torch.eye(SHAPE[1])}, 1.0)
    program = extracted(pool, [f"public/{m}" for m in range(TASKS)], {}, CLIENTS, descent, None)
    asked = next(program)
    while True:
        slopes = [{"lora.w.B": h * (one.model["lora"]["w"].B - best)} for one, best in zip(asked, optima, strict=True)]
        try:
            asked = program.send(slopes)
        except StopIteration as stop:
            made = stop.value
            break
    experts = torch.stack([expert["w"] for expert in made.experts])
    C = torch.stack([made.contributions[name] for name, _ in pool.blocks], dim=1)
    return float((experts - optima).norm() / optima.norm()), C / C.sum(dim=0), alpha.T


def measured(h: float) -> dict[str, dict[str, float]]:
    """Every reading's figures, means over seeds."""
    runs = {
        name: [found(one, root_key(seed).fold("regulariser"), h) for seed in range(SEEDS)]
        for name, one in READINGS.items()
    }
    told = {}
    for name, seeds in runs.items():
        pairs = [list(zip(alpha.flatten().tolist(), C.flatten().tolist(), strict=True)) for _, C, alpha in seeds]
        away = [float((C - C0).abs().max()) for (_, C, _), (_, C0, _) in zip(seeds, runs["half square"], strict=True)]
        values = (
            [error for error, _, _ in seeds],
            [slope(one) or 0.0 for one in pairs],
            [mean_absolute_error(one) or 0.0 for one in pairs],
            away,
        )
        told[name] = {figure: sum(listed) / len(listed) for figure, listed in zip(FIGURES, values, strict=True)}
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {f"h = {h:g}": measured(h) for h in CURVATURES}
    for title, readings in results.items():
        print(f"{title:12}{''.join(f'{figure:>12}' for figure in FIGURES)}")
        for name, told in readings.items():
            print(f"{name:12}{''.join(f'{told[figure]:12.3f}' for figure in FIGURES)}")
    if options.json is not None:
        whole = {"machine": machine(), "versions": versions(), "results": results}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
