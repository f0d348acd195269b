"""FedSRD: send the important entries of each update, reconstruct the products, send the new product back in turns.

FedSRD and FedSRD-e, arXiv 2510.04601, with the pruning and the aggregation of its released code.
Clients start from the global (B, A) and upload dB_i, dA_i without their least important entries: entry (k, j) of dA
counts |dA_kj| ||B_i's column k||, entry (i, k) of dB |dB_ik| ||A's row k||. The server forms
W = sum p_i (B + dB_i)(A + dA_i), in FedSRD cut to rank r, and moves one factor towards it: dB = (W - B A) A^+, or
dA = B^+ (W - B A), of which a random part is sent.
Up: the kept entries of dB_i and dA_i and where they stand, at most (1 - pruning) r (m + n) scalars a layer, the fewer
the more a few entries stand out. Down: (1 - down_pruning) r m or r n by turns, likewise, of the factor that the round
before changed; once, the seed of A. Positions are int32, or one bit for each entry where that is shorter.
Deviations: B is moved first, since B = 0 gives dA = 0 (the released code loses its first round so; first="A" does).
The dB importance takes the global A, as the code does, or each client's own (`symmetric`). The random part has an
exact size and is seeded. Pseudo-inverses run in fp64, cut off where the code's fp32 is; where layers have few entries,
what is kept of B is nearly singular and steps in A grow large (prune less there, or use AdamW). Deltas reach clients
with their next download, and who missed a round gets the whole factors that changed. Weights are uniform, as the
released scripts set them. One scale and one rank are required of all clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import (
    Factor,
    check_factor,
    factor_of_pair,
    factor_shape,
    initial_pair,
    kept_factors,
    lacking,
    require_common_scale,
    require_equal_ranks,
    with_factor,
)
from coterie.algorithms.rolora import factor_of
from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.maths.lowrank import Factors, best_rank, stack_factors
from coterie.maths.sparsify import (
    at_least_quantile,
    importance_of_A,
    importance_of_B,
    kept_count,
    pruning_ratio,
    random_count,
    random_mask,
    same_mass,
)
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
    LowRank,
    Model,
    Once,
    Phase,
    Server,
    Sparse,
    Traits,
    Upload,
    Uploads,
    message,
)
from coterie.protocol.sparse import sparse_bytes


@message
class State:
    """The global pair and the seed of its A; the last delta and its factor; who answered when, and what changed."""

    lora: Adapter
    init_key: Key
    factor: str
    delta: dict[str, Sparse]
    changed: dict[str, int]
    answered: dict[str, int]


@message
class Download:
    """By factor and layer, the last delta or, for who missed rounds, whole factors; the seed of A, see `Once`."""

    deltas: dict[str, dict[str, Sparse]]
    factors: dict[str, dict[str, Tensor]]
    init_key: Any


@message
class Deltas:
    """What is kept of a client's dB and dA, by layer."""

    B: dict[str, Sparse]
    A: dict[str, Sparse]


@dataclass(frozen=True)
class FedSRD(Algorithm):
    """Sparsify, reconstruct, decompose (arXiv 2510.04601).

    pruning: the share of entries that a client leaves out, and up to `most` more by growth log(kurtosis).
    down_pruning: the share that the server leaves out. first: the factor that the first round moves.
    """

    pruning: float = 0.85
    growth: float = 0.1
    most: float = 0.11
    down_pruning: float = 0.9
    first: Factor = "B"
    symmetric: bool = False

    traits = Traits(
        title="FedSRD",
        paper="arXiv 2510.04601",
        up="parts of dB, dA: at most (1 - pruning) r (m + n), and positions",
        down="a part of dB or dA by turns: (1 - down_pruning) r m, r n, and positions",
        ranks="equal",
        weights="uniform",
        common_scale=True,
        zero_weight=True,
        keeps_memory=True,
        adaptive_size=True,
    )

    def __post_init__(self) -> None:
        if not 0 <= self.pruning < 1 or not 0 <= self.down_pruning < 1 or self.growth < 0 or self.most < 0:
            raise ValueError(
                f"pruning ({self.pruning:g}) and down_pruning ({self.down_pruning:g}) must lie in [0, 1), growth "
                f"({self.growth:g}) and most ({self.most:g}) must not be negative"
            )
        if self.pruning + self.most > 1:
            raise ValueError(f"pruning + most must not exceed 1, not {self.pruning:g} + {self.most:g}")

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, self.traits.title)
        require_common_scale(federation, self.traits.title)
        key = server.key("init")
        return State(initial_pair(federation, key), key, "", {}, {"B": 0, "A": 0}, {})

    def send(self, state: State, card: Card) -> Download:
        due = lacking(state.changed, state.answered, card)
        if due == [state.factor] and state.changed[state.factor] == state.answered.get(card.id, 1):
            part = {name: delta for name, delta in state.delta.items() if name in card.layers}
            return Download({state.factor: part}, {}, Once(state.init_key))
        return Download({}, {f: factor_of_pair(state.lora, f, card.layers) for f in due}, Once(state.init_key))

    def local(self, client: Client, download: Download) -> Program:
        start = current_pair(client, download)
        client.memory["factors"] = start
        fitted = yield Fit(Model(lora=start))
        kept = {name: self.sparsified(term, start[name]) for name, term in fitted.model["lora"].items()}
        return Upload(Deltas({name: pair[0] for name, pair in kept.items()}, {n: pair[1] for n, pair in kept.items()}))

    def sparsified(self, own: LowRank, start: LowRank) -> tuple[Sparse, Sparse]:
        """What is kept of dB and of dA."""
        dB, dA = own.B - start.B, own.A - start.A
        beside = own.A if self.symmetric else start.A
        return self.kept(dB, importance_of_B(dB, beside)), self.kept(dA, importance_of_A(dA, own.B))

    def kept(self, delta: Tensor, importance: Tensor) -> Sparse:
        """The entries that count most, scaled up to the L1 norm of the whole."""
        mask = at_least_quantile(importance, pruning_ratio(importance, self.pruning, self.growth, self.most))
        return Sparse.at(same_mass(delta, mask), mask)

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        moved, key = self.moved(server.round), server.key("mask")
        delta = {}
        for name, old in state.lora.items():
            held = [(weight, one) for _, one, weight in uploads.items() if name in one.B and weight > 0]
            if held:
                step = self.step(old, [(w, one.B[name].dense(), one.A[name].dense()) for w, one in held], moved)
                mask = random_mask(tuple(step.shape), self.down_pruning, key.fold(name))
                delta[name] = Sparse.at(step * (mask.numel() / int(mask.sum())), mask)  # 1 / keep
        lora = {name: added(state.lora[name], moved, one) for name, one in delta.items()}
        changed = state.changed | {moved: server.round}
        answered = state.answered | dict.fromkeys((entry.card.id for entry in uploads), server.round)
        return State(state.lora | lora, state.init_key, moved, delta, changed, answered)

    def step(self, old: LowRank, deltas: list[tuple[float, Tensor, Tensor]], moved: Factor) -> Tensor:
        """dB = (W - B A) A^+, or dA = B^+ (W - B A), of clients' (weight, dB_i, dA_i) and in their dtype."""
        B, A, total = old.B.double(), old.A.double(), sum(weight for weight, _, _ in deltas)
        products = [(B + dB.double(), A + dA.double()) for _, dB, dA in deltas]
        new = self.reconstructed(products, [weight / total for weight, _, _ in deltas], old.rank)
        left, right = torch.cat([new[0], -B], dim=-1), torch.cat([new[1], A], dim=-2)  # W - B A
        step = left @ (right @ inverse(A)) if moved == "B" else (inverse(B) @ left) @ right
        return step.to(deltas[0][1].dtype)

    def reconstructed(self, products: list[Factors], weights: list[float], rank: int) -> Factors:
        """The mean of the products, cut to rank r, as factors."""
        best = best_rank(products, weights, rank, method="exact")
        return best.B, best.A

    def moved(self, number: int) -> Factor:
        """The factor that the server moves in this round."""
        return factor_of(number if self.first == "B" else number + 1)

    def check(self, payload: Any, card: Card) -> None:
        known = isinstance(payload, Deltas) and isinstance(payload.B, dict) and isinstance(payload.A, dict)
        if not known or not all(isinstance(one, Sparse) for one in (*payload.B.values(), *payload.A.values())):
            raise ModelError(f"client {card.id}: an upload must be one sparse dB and dA for each adapted layer")
        check_factor(payload.B, card, "B")
        check_factor(payload.A, card, "A")

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=current_pair(client, download))

    def global_model(self, state: State) -> Model:
        return Model(lora=state.lora)

    def bytes_up(self, layer: Layer, card: Card) -> int:
        sizes = [math.prod(factor_shape(layer, card.rank, factor)) for factor in ("B", "A")]
        return sum(sparse_bytes(kept_count(size, self.pruning), size) for size in sizes)  # at most

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return sum(self.delta_bytes(layer, card, factor) for factor in ("B", "A")) // 2

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        down = self.delta_bytes(layer, card, self.moved(number - 1)) if number > 1 else 0
        return self.bytes_up(layer, card), down

    def delta_bytes(self, layer: Layer, card: Card, factor: str) -> int:
        """Payload bytes of what is sent of this factor's delta."""
        entries = math.prod(factor_shape(layer, card.rank, factor))
        return sparse_bytes(random_count(entries, self.down_pruning), entries)


@dataclass(frozen=True)
class FedSRDe(FedSRD):
    """The same without the cut to rank r, which spares the server its SVDs."""

    traits = replace(FedSRD.traits, title="FedSRD-e")

    def reconstructed(self, products: list[Factors], weights: list[float], rank: int) -> Factors:
        return stack_factors(products, weights)


def current_pair(client: Client, download: Download) -> Adapter:
    """The global pair: what the client had in its last round, or drew, brought up to date by what it was sent."""
    pair = kept_factors(client, download.init_key)
    for factor, deltas in download.deltas.items():
        pair = pair | {name: added(pair[name], factor, delta) for name, delta in deltas.items()}
    for factor, values in download.factors.items():
        pair = with_factor(pair, factor, values)
    return pair


def inverse(factor: Tensor) -> Tensor:
    """The pseudo-inverse of a factor in fp64, cut off where fp32 is: what one factor's rounding left in the other."""
    made: Tensor = torch.linalg.pinv(factor, rtol=max(factor.shape) * torch.finfo(torch.float32).eps)
    return made


def added(term: LowRank, factor: str, delta: Sparse) -> LowRank:
    """The term with the delta added to one factor; the same to the bit for server and client."""
    return replace(term, **{factor: term.parameters[factor] + delta.dense()})
