"""A proximal term around any method that averages: FedProx.

Li et al., Federated Optimization in Heterogeneous Networks, arXiv 1812.06127, Eq. 2: each client minimises its loss
plus mu / 2 ||w - w_t||^2, with w_t where its training starts. What travels stays as it is.
Deviations: w are the factors B and A that the method trains, without the head. The local problem is worked on for the
experiment's steps or epochs, as for all methods, not until it is solved to a given inexactness gamma.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from coterie.algorithms.base import Program
from coterie.algorithms.wrapped import Wrapped, requests_through
from coterie.errors import ConfigError, ModelError
from coterie.protocol import Adapter, Client, FactorDistance, Fit, LowRank, Traits, Upload, matching

PARTS = frozenset({"B", "A"})


@dataclass(frozen=True)
class Proximal(Wrapped):
    """A method whose local training is held near its start by mu / 2 ||w - w_t||^2 (arXiv 1812.06127).

    mu = 0 is the inner method, to the bit.

    Raises:
        ConfigError: the inner method does not average factors, or mu is no number from 0 on.
    """

    mu: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(f"mu must be a finite number, at least 0, not {self.mu:g}")
        if not self.inner.traits.averages:
            title = self.inner.traits.title
            raise ConfigError(f"{title} does not average factors; choose a method that does, such as fedit")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        facts = self.inner.traits
        return replace(facts, title=f"{facts.title} + FedProx", paper=f"{facts.paper} + arXiv 1812.06127")

    def local(self, client: Client, download: Any) -> Upload | Program:
        program: Upload | Program = requests_through(
            super().local(client, download), lambda request: held(request, self.mu, client.card.id)
        )
        return program


def held(request: Any, mu: float, who: str) -> Any:
    """A Fit with mu / 2 ||w - w_t||^2 of the factors that it trains; other requests, and all with mu = 0, unchanged.

    Raises:
        ModelError: a trained parameter that is no factor of a low-rank term.
    """
    if mu == 0 or not isinstance(request, Fit):
        return request
    trained = matching(list(request.initial.parameters), request.train)
    references: dict[tuple[str, tuple[str, ...]], Adapter] = {}
    for name, layers in request.initial.terms.items():
        for layer, term in layers.items():
            parts = tuple(part for part in term.parameters if f"{name}.{layer}.{part}" in trained)
            if not parts:
                continue
            if not isinstance(term, LowRank) or not PARTS.issuperset(parts):
                raise ModelError(
                    f"client {who}, layer {layer}: {name} trains {', '.join(parts)} of a {type(term).__name__}, but a "
                    "proximal term is for the factors B and A; leave it out with this method"
                )
            references.setdefault((name, parts), {})[layer] = term
    terms = [FactorDistance(reference, mu / 2, parts, name) for (name, parts), reference in references.items()]
    return replace(request, penalties=[*request.penalties, *terms])
