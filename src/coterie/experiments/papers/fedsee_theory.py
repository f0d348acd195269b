"""The figures of FedSEE's Appendix B.1, each from a synthetic federation: rows, their columns, and a value for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.maths.keys import Key
from coterie.theory.fedsee.counting import task_count
from coterie.theory.fedsee.extraction import (
    extract,
    extract_balanced,
    mixtures,
    population_losses,
    public_losses,
    simplex_least_squares,
)
from coterie.theory.fedsee.geometry import barycentres, diameter, squared_norm
from coterie.theory.fedsee.pool_only import cluster_centres, identity_error, successive_projection, vertex_set_error
from coterie.theory.fedsee.recovery import recovery_bound, theorem_2
from coterie.theory.fedsee.routing import static_excess
from coterie.theory.fedsee.synthetic import (
    World,
    anchored,
    complementary,
    experts_on_eigendirections,
    interior,
    public_sets,
    uploads,
    world,
)

Panels = Mapping[str, Mapping[str, float]]
"""The places on the x axis by panel and column."""

Values = dict[str, dict[str, float | None]]
"""By row and column."""


@dataclass(frozen=True)
class Sizes:
    """The federation's sizes; n_i, n_m: examples of a client and of a public set, where a panel does not vary them;
    plenty_i, plenty_m: where it varies the other. n_floor: N where n_i varies without anchors."""

    M: int
    l: int  # noqa: E741
    r: int
    d: int
    condition: float
    diam: float
    sigma: float
    N: int
    n_floor: int
    epsilon: float
    impurity: float
    n_i: int
    n_m: int
    plenty_i: int
    plenty_m: int
    few: int
    many: int

    def world(self, key: Key, condition: float | None = None) -> World:
        return world(
            key.fold("world"),
            M=self.M,
            l=self.l,
            r=self.r,
            d=self.d,
            condition=self.condition if condition is None else condition,
            diam=self.diam,
            sigma=self.sigma,
        )


def barycentric(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Theorem 1: the mean over clients of the distance from the barycentre, and how it falls."""
    of = sizes.world(key)
    alpha = anchored(key.fold("mixtures"), sizes.N, sizes.M, sizes.epsilon)
    found: dict[str, float | None] = {}
    ratios: dict[str, float | None] = {}
    rates: dict[str, float | None] = {}
    before: tuple[float, float] | None = None
    for column, n in panels["barycentres"].items():
        off = uploads(key.fold("uploads", int(n)), alpha, of, int(n)) - barycentres(alpha, of.Theta)
        error = float(off.flatten(1).norm(dim=1).mean())
        found[column] = error
        if before is not None:
            ratios[column], rates[column] = before[1] / error, math.sqrt(n / before[0])
        before = n, error
    return {"barycentre": found, "barycentre-ratio": ratios, "barycentre-rate": rates}


def anchor_impurity(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Table 3: recovery error against epsilon, the largest over tasks."""
    of = sizes.world(key)
    made: Values = {row: {} for row in ("exact", "few", "many", "bound", "line", "line-alone")}
    slope = alone_slope = None
    for column, epsilon in panels["impurity"].items():
        alpha = anchored(key.fold("mixtures"), sizes.N, sizes.M, epsilon)
        exact = theorem_2(alpha, of.Theta, of.Phi)
        made["exact"][column] = exact.measured
        made["bound"][column] = recovery_bound(epsilon, of.Theta, of.Phi)
        for row, n in (("few", sizes.few), ("many", sizes.many)):
            made[row][column] = _recovered(key, sizes, of, alpha, n, sizes.plenty_m)
        if epsilon > 0:
            slope = exact.measured / epsilon if slope is None else slope
            made["line"][column] = abs(exact.measured / (slope * epsilon) - 1)
            alone = theorem_2(alpha[: sizes.M], of.Theta, of.Phi).measured
            alone_slope = alone / epsilon if alone_slope is None else alone_slope
            made["line-alone"][column] = abs(alone / (alone_slope * epsilon) - 1)
    return made


def sampling(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Proposition 3 at epsilon = 0: the error as public sets grow, and as clients' data grow."""
    of = sizes.world(key)
    alpha = anchored(key.fold("mixtures"), sizes.N, sizes.M, 0.0)
    made: Values = {"public": {}, "local": {}, "local-ratio": {}, "local-rate": {}}
    for column, n in panels["public"].items():
        made["public"][column] = _recovered(key, sizes, of, alpha, sizes.plenty_i, int(n))
    before: tuple[float, float] | None = None
    for column, n in panels["local"].items():
        error = _recovered(key, sizes, of, alpha, int(n), sizes.plenty_m)
        made["local"][column] = error
        if before is not None:
            made["local-ratio"][column], made["local-rate"][column] = before[1] / error, math.sqrt(n / before[0])
        before = n, error
    return made


def conditioning(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Theorem 2's condition number: impurity that is spread evenly, and impurity that other clients offset."""
    rows = ("spread", "spread-off", "eigen", "eigen-off", "facing", "facing-bound", "facing-weight")
    made: Values = {row: {} for row in rows}
    alpha = anchored(key.fold("mixtures"), sizes.N, sizes.M, sizes.impurity)
    for column, condition in panels["spread"].items():
        plain = sizes.world(key, condition)
        for row, of in (("spread", plain), ("eigen", experts_on_eigendirections(plain))):
            found = extract(barycentres(alpha, of.Theta), population_losses(of.Theta, of.Phi))
            made[row][column] = identity_error(found.experts, of.Theta)
            made[f"{row}-off"][column] = 1 - float(found.omega.diagonal().min())
    for column, condition in panels["facing"].items():
        Theta, Phi, alpha = complementary(condition, sizes.impurity, sizes.diam)
        found = extract(barycentres(alpha, Theta), population_losses(Theta, Phi))
        made["facing"][column] = identity_error(found.experts, Theta)
        made["facing-bound"][column] = recovery_bound(sizes.impurity, Theta, Phi)
        made["facing-weight"][column] = float(found.omega[0].max())
    return made


def identifiability(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Table 4: three estimators, and the balanced program, with anchors and at gamma = 1."""
    of = sizes.world(key)
    rows = ("supervised", "spa", "clustering", "balanced", "half-diameter")
    made: Values = {row: {} for row in rows}
    losses = public_losses(public_sets(key.fold("public"), of, sizes.n_m))
    for which, alpha in (
        ("anchors", anchored(key.fold("mixtures"), sizes.N, sizes.M, sizes.epsilon)),
        ("inner", interior(key.fold("mixtures"), sizes.N, sizes.M, 1.0)),
    ):
        pool = uploads(key.fold("pool", which), alpha, of, sizes.n_i)
        pool = pool[torch.from_numpy(key.fold("order", which).permutation(sizes.N))]  # anchors come first in alpha
        estimates = {
            "supervised": extract(pool, losses).experts,
            "spa": pool[successive_projection(pool, sizes.M)],
            "clustering": cluster_centres(pool, sizes.M),
            "balanced": extract_balanced(pool, losses).experts,
        }
        for row, found in estimates.items():
            made[row][f"{which}-set"] = vertex_set_error(found, of.Theta)
            made[row][f"{which}-id"] = identity_error(found, of.Theta)
        for column in (f"{which}-set", f"{which}-id"):
            made["half-diameter"][column] = diameter(of.Theta) / 2
    return made


def floors(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """The error without anchors, which neither data nor clients lower, beside the error with them."""
    of = sizes.world(key)
    made: Values = {"unanchored": {}, "anchored": {}, "unanchored-clients": {}}
    with_anchors = anchored(key.fold("mixtures"), sizes.n_floor, sizes.M, 0.0)
    without = interior(key.fold("mixtures"), sizes.n_floor, sizes.M, 1.0)
    for column, n in panels["floor"].items():
        made["unanchored"][column] = _recovered(key.fold("without"), sizes, of, without, int(n), sizes.n_m)
        made["anchored"][column] = _recovered(key, sizes, of, with_anchors, int(n), sizes.plenty_m)
    for column, N in panels["floor-clients"].items():
        alpha = interior(key.fold("mixtures"), int(N), sizes.M, 1.0)
        made["unanchored-clients"][column] = _recovered(key.fold("N", int(N)), sizes, of, alpha, sizes.n_i, sizes.n_m)
    (summary,) = panels["summary"]
    for row in ("unanchored", "unanchored-clients"):
        values = [value for value in made[row].values() if value is not None]
        made[f"{row}-flatness"] = {summary: max(values) / min(values)}
    slope = _slope(list(panels["floor"].values()), [value or math.nan for value in made["anchored"].values()])
    made["anchored-slope"] = {summary: slope}
    made["anchored-departure"] = {summary: abs(slope + 0.5)}
    return made


def routing(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Corollary 5 with constant routers: a client's excess risk between the uniform mixture and a vertex."""
    of = sizes.world(key)
    u = torch.full((sizes.M,), 1 / sizes.M, dtype=torch.float64)
    vertex = torch.eye(sizes.M, dtype=torch.float64)[0]

    def cost(alpha: Tensor) -> float:
        return float(static_excess(u[None], alpha[None], of.Theta, of.Phi))

    costs: dict[str, float | None] = {}
    departures, apart = [0.0], []
    Q = 2 * torch.einsum("mlr,klr->mk", of.Theta @ of.Phi, of.Theta)
    for column, tau in panels["routing"].items():
        alpha = (1 - tau) * u + tau * vertex
        costs[column] = cost(alpha)
        if tau > 0:
            departures.append(abs(cost(alpha) / (tau**2 * cost(vertex)) - 1))
        apart.append(float((simplex_least_squares(Q, Q @ alpha) - alpha).abs().max()))
    (summary,) = panels["summary"]
    return {
        "balanced-cost": costs,
        "quadratic": {summary: max(departures)},
        "best-constant": {summary: max(apart)},
    }


def pipeline(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """Experts from Eq. 8 and mixtures from Eq. 57, and what clients that are no anchors lose by constant routing."""
    of = sizes.world(key)
    alpha = anchored(key.fold("mixtures"), sizes.N, sizes.M, sizes.epsilon)
    pool = uploads(key.fold("pool"), alpha, of, sizes.n_i)
    losses = public_losses(public_sets(key.fold("public"), of, sizes.n_m))
    experts = extract(pool, losses).experts
    coupled = extract_balanced(pool, losses)
    estimated = mixtures(pool, experts, of.Phi)
    proxy = coupled.omega.T / coupled.omega.sum(dim=0)[:, None]
    mixed = slice(sizes.M, None)

    def excess(weights: Tensor, among: Tensor) -> float:
        off = squared_norm(barycentres(weights, among) - barycentres(alpha, of.Theta), of.Phi)
        return float(off[mixed].mean())

    (column,) = panels["pipeline"]
    return {
        "mixture-error": {column: float((estimated - alpha)[mixed].abs().sum(dim=1).mean())},
        "calibrated": {column: excess(estimated, experts)},
        "load-balanced": {column: excess(torch.full_like(alpha, 1 / sizes.M), experts)},
        "proxy-error": {column: float((proxy - alpha)[mixed].abs().sum(dim=1).mean())},
        "proxy-calibrated": {column: excess(proxy, experts)},
    }


def solver(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """FISTA beside SLSQP where the optimum is no vertex: weights and objective, on `complementary` at Phi's condition
    256. Without scipy, which has SLSQP, nothing of it is told."""
    Theta, Phi, alpha = complementary(256.0, sizes.impurity, sizes.diam)
    pool = barycentres(alpha, Theta)
    weights = extract(pool, population_losses(Theta, Phi)).omega[0]

    def objective(w: Tensor) -> float:
        return float(squared_norm(torch.einsum("n,nlr->lr", w, pool) - Theta[0], Phi))

    other = _slsqp(objective, len(pool))
    (column,) = panels["solver"]
    return {
        "fista": {column: objective(weights)},
        "slsqp": {column: None if other is None else objective(other)},
        "at-the-anchor": {column: objective(torch.eye(len(pool), dtype=torch.float64)[0])},
        "weights-apart": {column: None if other is None else float((weights - other).abs().max())},
    }


def counting(key: Key, sizes: Sizes, panels: Panels) -> Values:
    """`task_count` on halves of n_i examples and public sets of n_m: by the anchors' impurity, and without anchors."""
    of = sizes.world(key)
    public = list(
        zip(
            public_sets(key.fold("public", 0), of, sizes.n_m // 2),
            public_sets(key.fold("public", 1), of, sizes.n_m // 2),
            strict=True,
        )
    )
    made: Values = {"counted": {}, "counted-pool": {}, "counted-public": {}, "true-tasks": {}}
    for column, gamma in panels["counting"].items():
        alpha = (
            interior(key.fold("mixtures"), sizes.N, sizes.M, gamma)
            if gamma > 0
            else anchored(key.fold("mixtures"), sizes.N, sizes.M, sizes.epsilon)
        )
        first, second = (uploads(key.fold("half", half), alpha, of, sizes.n_i // 2) for half in (0, 1))
        count = task_count(first, second, public)
        made["counted"][column] = float(count.tasks)
        made["counted-pool"][column] = float(count.from_pool)
        made["counted-public"][column] = float(count.distinct or 0)
        made["true-tasks"][column] = float(sizes.M)
    return made


COMPUTED: dict[str, Callable[[Key, Sizes, Panels], Values]] = {
    "barycentric": barycentric,
    "anchor_impurity": anchor_impurity,
    "sampling": sampling,
    "conditioning": conditioning,
    "identifiability": identifiability,
    "floors": floors,
    "routing": routing,
    "pipeline": pipeline,
    "solver": solver,
    "counting": counting,
}
"""Every computation; each fills rows of one panel or a few."""


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """The sizes that a scale's config names, all of them."""
    return Sizes(**config)


def _recovered(key: Key, sizes: Sizes, of: World, alpha: Tensor, n_i: int, n_m: int) -> float:
    """The largest error over tasks of experts from finite uploads and finite public sets."""
    pool = uploads(key.fold("uploads", n_i), alpha, of, n_i)
    losses = public_losses(public_sets(key.fold("public", n_m), of, n_m))
    return identity_error(extract(pool, losses).experts, of.Theta)


def _slope(sizes: list[float], errors: list[float]) -> float:
    """The least-squares slope of log error over log size."""
    x, y = torch.tensor(sizes, dtype=torch.float64).log(), torch.tensor(errors, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def _slsqp(objective: Callable[[Tensor], float], size: int) -> Tensor | None:
    try:
        from scipy.optimize import minimize  # type: ignore[import-untyped]
    except ImportError:
        return None
    found = minimize(
        lambda w: objective(torch.from_numpy(w)),
        [1 / size] * size,
        method="SLSQP",
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    return torch.from_numpy(found.x)
