"""FedSEE, Appendix B.2, one seed: a common start, experts, clients' adapters and routers, each kept as it is trained.

Whatever is trained is on disk as soon as it is there, so a computation that was killed goes on with what is missing,
and ends with the same bits: what is trained depends on its own key alone, not on what is trained beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.factors import initial_adapter, initial_routers
from coterie.data.sequences import DataSet
from coterie.errors import CheckpointError
from coterie.experiments.bases import tokens
from coterie.experiments.build import Built, build
from coterie.experiments.client_bases import SERVER
from coterie.experiments.config import Config
from coterie.maths.keys import root_key
from coterie.protocol import Adapter, BaseLog, Evaluate, Fit, LowRank, Model, Request, Routed, Score, UsageDivergence
from coterie.training.asks import Ask, Done
from coterie.training.executor import Executor
from coterie.training.usage import mean_usage
from coterie.wire.codec import decode, encode

TARGETS = ("uniform", "mixture")
"""What a router's mean usage is drawn to: 1 / M of each expert, or the client's mixture."""
ROUTER = ("experts.*.router", "experts.*.bias")


@dataclass(frozen=True)
class Recipe:
    """What the settings of a run do not say.

    init_steps: of the initialisation round. router_steps, router_lr (as a factor of the experts' rate), beta (of the
    KL term): of the routers. compared: the layers of which B is compared, as a shell pattern. margin: how many points
    an expert must be above always answering the most frequent class.
    """

    init_steps: int
    router_steps: int
    router_lr: float
    beta: float
    compared: str
    margin: float


@dataclass(frozen=True)
class Federation:
    """One seed made ready: data, base and executor, the tasks in order, and the clients' realised mixtures (N, M)."""

    config: Config
    built: Built
    tasks: list[str]
    alpha: Tensor

    @property
    def clients(self) -> list[str]:
        """The ids, in the order of alpha."""
        return list(self.built.setting.sites)

    def data(self, client: str, name: str) -> DataSet:
        """A client's data set."""
        return self.built.setting.sites[client].data[name]

    def ask(self, name: str, request: Request, data: DataSet, purpose: tuple[str, ...] = ()) -> Ask:
        """A request with the key of its own name, or of `purpose`; the head is the base's and stays so."""
        key = root_key(self.config.seed).fold("fedsee-geometry", *(purpose or (name,)))
        return Ask(name, request, SERVER, self.built.base.head, data, key)

    def scores(self, wanted: Sequence[tuple[Model, DataSet]]) -> list[Score]:
        """Loss and accuracy of each model on its data."""
        asks = [self.ask("score", Evaluate(model, "test"), data) for model, data in wanted]
        found = [answered(done).answer for done in self.built.executor.answer(asks)]
        return [score for score in found if isinstance(score, Score)]


@dataclass(frozen=True)
class Trained:
    """The common A by layer, and pairs with it by layer: an expert for each task, an adapter for each client."""

    A: dict[str, Tensor]
    experts: list[Adapter]
    clients: list[Adapter]


class Shelf:
    """Models on disk, by name; `advance` is told how many are there more."""

    def __init__(self, folder: Path, advance: Callable[[int], None]) -> None:
        self.folder, self.advance = folder, advance
        folder.mkdir(parents=True, exist_ok=True)

    def trained(self, executor: Executor, asks: Mapping[str, Ask]) -> dict[str, Model]:
        """The models of these Fits; those that are not there are trained, as many at once as the plan says."""
        missing = [name for name in asks if not self._place(name).is_file()]
        self.advance(len(asks) - len(missing))
        size = max(1, executor.plan.clients_per_step)
        for start in range(0, len(missing), size):
            part = missing[start : start + size]
            for name, done in zip(part, executor.answer([asks[name] for name in part]), strict=True):
                self._write(name, encode(answered(done).answer.model))  # type: ignore[union-attr]  # of a Fit
            self.advance(len(part))
        return {name: decode(self._place(name).read_bytes()) for name in asks}

    def _place(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _write(self, name: str, data: bytes) -> None:
        place = self._place(name)
        part = place.with_name(f".{place.name}")
        try:
            part.write_bytes(data)
            os.replace(part, place)
        except OSError as error:
            raise CheckpointError(f"{place}: cannot be written ({error.strerror or error})") from error


def answered(done: Done | Exception) -> Done:
    """The answer; raises what came in its place."""
    if isinstance(done, Exception):
        raise done
    return done


def federation(config: Config) -> Federation:
    """Data and base of one seed; mixtures are those that the clients' examples realise."""
    built = build(config)
    tasks: list[str] = built.partition["mixture"]["groups"]
    held = [client["mixture"]["realised"] for client in built.partition["clients"]]
    alpha = torch.tensor([[own.get(task, 0.0) for task in tasks] for own in held], dtype=torch.float64)
    return Federation(config, built, tasks, alpha)


def train(of: Federation, recipe: Recipe, shelf: Shelf) -> Trained:
    """The initialisation round, what it leaves in the base, then B of every expert and client on one clock."""
    built, config = of.built, of.config
    layers, rank = built.base.layers, next(iter(built.setting.sites.values())).card.rank
    scale = next(iter(built.setting.sites.values())).card.scale
    first = initial_adapter(layers, rank, scale, root_key(config.seed).fold("fedsee-geometry", "init"))
    start = Fit(Model(lora=first), head=False, steps=recipe.init_steps)
    asks = {f"init-{name}": of.ask(f"init-{name}", start, of.data(name, "train")) for name in of.clients}
    pairs = [model["lora"] for model in shelf.trained(built.executor, asks).values()]
    A = {name: torch.stack([pair[name].A for pair in pairs]).mean(dim=0) for name in layers}
    B = {name: torch.stack([pair[name].B for pair in pairs]).mean(dim=0) for name in layers}
    built.executor.set_base(BaseLog().add({name: LowRank(B[name], A[name], scale) for name in layers}), SERVER)
    fresh = Fit(
        Model(lora={name: LowRank(torch.zeros_like(B[name]), A[name], scale) for name in layers}),
        train=("lora.*.B",),
        head=False,
        steps=config.train.steps,
        epochs=config.train.epochs,
    )
    held = {f"expert-{task}": built.setting.server_data[f"pooled/{task}"] for task in of.tasks}
    held |= {f"client-{name}": of.data(name, "train") for name in of.clients}
    models = shelf.trained(built.executor, {name: of.ask(name, fresh, data) for name, data in held.items()})
    adapters = [model["lora"] for model in models.values()]
    return Trained(A, adapters[: len(of.tasks)], adapters[len(of.tasks) :])


def routers(of: Federation, trained: Trained, recipe: Recipe, shelf: Shelf) -> dict[str, list[Model]]:
    """By target, every client's model of all experts with a router, of which the router alone was trained.

    A client's two routers begin alike and see the same mini-batches.
    """
    layers, M = of.built.base.layers, len(of.tasks)
    scale = next(iter(trained.experts[0].values())).scale
    found: dict[str, list[Model]] = {}
    for target in TARGETS:
        asks = {}
        for name, alpha in zip(of.clients, of.alpha.float(), strict=True):
            drawn = initial_routers(layers, M, root_key(of.config.seed).fold("fedsee-geometry", "router", name))
            terms = {
                layer: Routed(
                    tuple(expert[layer].B for expert in trained.experts),
                    (trained.A[layer],),
                    drawn[layer],
                    scale,
                    torch.zeros(M),
                )
                for layer in layers
            }
            wanted = alpha if target == "mixture" else torch.full_like(alpha, 1 / M)
            fit = Fit(
                Model(experts=terms),
                train=ROUTER,
                head=False,
                penalties=(UsageDivergence(wanted, recipe.beta),),
                steps=recipe.router_steps,
                lr_scale=dict.fromkeys(ROUTER, recipe.router_lr),
            )
            called = f"router-{target}-{name}"
            asks[called] = of.ask(called, fit, of.data(name, "train"), ("router", name))
        found[target] = list(shelf.trained(of.built.executor, asks).values())
    return found


def static(trained: Trained, weights: Tensor) -> Model:
    """All experts in one constant combination, weights (M,)."""
    return Model(
        lora={
            layer: LowRank(
                torch.einsum("m,mlr->lr", weights.float(), torch.stack([one[layer].B for one in trained.experts])),
                A,
                trained.experts[0][layer].scale,
            )
            for layer, A in trained.A.items()
        }
    )


def usage(of: Federation, model: Model, client: str) -> Tensor:
    """pbar_i (M,): routing weights over the client's validation examples and their tokens, mean over layers."""
    base, size = of.built.base, of.built.plan.eval_batch_size
    by_layer = mean_usage(base, model, base.head, of.data(client, "validation"), size)
    return torch.stack(list(by_layer.values())).mean(dim=0)


def expert_scores(of: Federation, trained: Trained) -> list[tuple[float, float]]:
    """Of every task: its expert's accuracy on the task's test, and that of always answering the most frequent class."""
    task, base = of.built.task, of.built.base
    everything = tokens(task, task.test, base, of.config.model.max_length)
    labels, groups = np.asarray(task.test.labels), np.asarray(task.test.groups)
    own = [np.flatnonzero(groups == name) for name in of.tasks]
    most = [float(np.bincount(labels[places]).max()) / len(places) for places in own]
    scores = of.scores(
        [(Model(lora=expert), everything.select(places)) for expert, places in zip(trained.experts, own, strict=True)]
    )
    return [(score.accuracy, majority) for score, majority in zip(scores, most, strict=True)]
