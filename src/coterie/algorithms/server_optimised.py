"""Server optimisers around any method that averages: FedAvgM, FedAdagrad, FedAdam, FedYogi.

Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295, Algorithm 2; FedAvgM: Hsu et al., arXiv 1909.06335.
The difference between the averaged factors of two rounds is taken as the mean update Delta_t of x_t (`maths.
server_optim`). What travels stays as it is: the optimiser's moments are the server's.
Deviations: the paper averages a whole model uniformly; here the factors are averaged as the method and the
experiment's weights say, factor by factor (B and A each have their own moments). The head is averaged as without a
server optimiser. A factor that the method left as it was, to the bit, takes no step and its moments wait, so that
what is frozen (FFA-LoRA's A, each round's other factor of an alternating method) stays frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.wrapped import Wrapped, result_through
from coterie.errors import ConfigError, RunError
from coterie.maths.server_optim import Moments, ServerOptimizer, step
from coterie.protocol import Adapter, Federation, LowRank, Model, Server, Traits, Uploads, message

TITLES = {"sgd": "FedAvgM", "adagrad": "FedAdagrad", "adam": "FedAdam", "yogi": "FedYogi"}


@message
class State:
    """The inner method's state, and the moments of each averaged factor by its full name (lora.<layer>.B)."""

    inner: Any
    m: dict[str, Tensor]
    v: dict[str, Tensor]

    @property
    def base(self) -> Any:
        """The inner method's log of the base, which the engine looks for; None where it has none."""
        return getattr(self.inner, "base", None)


@dataclass(frozen=True)
class ServerOptimised(Wrapped):
    """A method whose averaged factors take an optimiser's step in place of the mean (arXiv 2003.00295).

    Raises:
        ConfigError: the inner method does not average, or patches the base with what averaging loses.
    """

    optimizer: ServerOptimizer

    def __post_init__(self) -> None:
        facts = self.inner.traits
        if not facts.averages:
            raise ConfigError(f"{facts.title} does not average factors; choose a method that does, such as fedit")
        if facts.changes_base:
            raise ConfigError(
                f"{facts.title} corrects the base for its average, which must then stand as it is; choose a method "
                "that only averages, such as fedit"
            )

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        facts = self.inner.traits
        title = f"{facts.title} + {TITLES[self.optimizer.name]}"
        named = replace(facts, title=title, paper=f"{facts.paper} + arXiv 2003.00295")
        if (self.optimizer.name, self.optimizer.lr, self.optimizer.beta1) == ("sgd", 1.0, 0.0):
            return named  # the inner method, to the bit
        return replace(named, exact=False, best_rank=False, one_client=False, equal_clients=False)

    def inner_state(self, state: State) -> Any:
        return state.inner

    def start(self, federation: Federation, server: Server) -> Any:
        def begun(inner: Any) -> State:
            self._averaged(inner)
            return State(inner, {}, {})

        return result_through(self.inner.start(federation, server), begun)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> Any:
        return result_through(super().aggregate(state, uploads, server), lambda made: self._stepped(state, made))

    def finish(self, state: State, server: Server) -> Any:
        return result_through(super().finish(state, server), lambda inner: replace(state, inner=inner))

    def _stepped(self, state: State, made: Any) -> State:
        """The inner method's new state with x_t + (step on Delta_t) where it has x_t + Delta_t."""
        before = self._averaged(state.inner)
        # Where scales differ, the mean may be written in another client's scale than last round.
        after = {
            layer: term.rescaled(float(before[layer].scale)) if layer in before else term
            for layer, term in self._averaged(made).items()
        }
        old, mean = Model(lora=before).parameters, Model(lora=after).parameters
        delta = self._delta(old, mean)
        moved, moments = step(Moments(state.m, state.v), delta, self.optimizer)
        # Not x_t + step: written like this, a step of exactly Delta_t gives the mean to the bit.
        values = {name: mean[name] - (delta[name] - change) for name, change in moved.items()}
        lora = Model(lora=after).with_parameters(values)["lora"]
        return State(replace(made, lora=lora), dict(moments.m), dict(moments.v))

    def _delta(self, old: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Delta_t of every factor that the round changed."""
        delta = {}
        for name, value in mean.items():
            if name not in old or torch.equal(value, old[name]):
                continue
            if value.shape != old[name].shape:
                raise RunError(
                    f"{self.traits.title}: {name} was {tuple(old[name].shape)} and is {tuple(value.shape)}; a server "
                    "optimiser needs factors that keep their shapes, so leave it out with this method"
                )
            delta[name] = value - old[name]
        return delta

    def _averaged(self, inner: Any) -> Adapter:
        """The averaged factors in the inner method's state."""
        lora = getattr(inner, "lora", None)
        if not isinstance(lora, Mapping) or not all(isinstance(term, LowRank) for term in lora.values()):
            raise RunError(
                f"{self.inner.traits.title} declares that it averages, but its state ({type(inner).__name__}) has no "
                "low-rank factors `lora`; leave the server optimiser out"
            )
        return dict(lora)
