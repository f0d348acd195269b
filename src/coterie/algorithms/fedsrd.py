"""FedSRD: send the important entries of each update, reconstruct the products, send the new product back in turns.

FedSRD, arXiv 2510.04601, with the pruning and the aggregation of its released code.
Clients start from the global (B, A) and upload dB_i, dA_i without their least important entries: entry (k, j) of dA
counts |dA_kj| ||B_i's column k||, entry (i, k) of dB |dB_ik| ||A's row k||. The server forms
W = sum p_i (B + dB_i)(A + dA_i), cut to rank r, and moves one factor towards it: dB = (W - B A) A^+, or
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

from dataclasses import dataclass
from typing import Any

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.factors import Factor, initial_pair, require_common_scale, require_equal_ranks
from coterie.algorithms.pruning import Deltas, Pruning, added, check_deltas
from coterie.algorithms.turns import Changed, Turns, current_pair, factor_in_turn, lacking_factors
from coterie.maths.concurrency import mapped
from coterie.maths.factor_step import factor_step
from coterie.maths.keys import Key
from coterie.maths.lowrank import best_rank
from coterie.maths.sparsify import importance_of_A, importance_of_B
from coterie.maths.stacking import Factors
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Federation,
    Fit,
    Layer,
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


@message
class State:
    """The global pair and the seed of its A; the last step and its factor; who lacks what."""

    lora: Adapter
    init_key: Key
    factor: str
    delta: dict[str, Sparse]
    turns: Turns


@message
class Download(Changed):
    """The last step by factor and layer or, for who missed rounds, the whole factors that changed."""

    deltas: dict[str, dict[str, Sparse]]


@dataclass(frozen=True)
class FedSRD(Pruning, Algorithm):
    """Sparsify, reconstruct, decompose (arXiv 2510.04601).

    first: the factor that the first round moves. symmetric: see above.
    """

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

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, self.traits.title)
        require_common_scale(federation, self.traits.title)
        key = server.key("init")
        return State(initial_pair(federation, key), key, "", {}, Turns.none())

    def send(self, state: State, card: Card) -> Download:
        turns, seed = state.turns, Once(state.init_key)
        if turns.lacking(card) == [state.factor] and turns.changed[state.factor] == turns.seen_by(card):
            step = {name: delta for name, delta in state.delta.items() if name in card.layers}
            return Download({}, seed, {state.factor: step})
        return Download(lacking_factors(state.lora, turns, card), seed, {})

    def local(self, client: Client, download: Download) -> Program:
        start = stepped_pair(client, download)
        client.memory["factors"] = start
        fitted = yield Fit(Model(lora=start))
        dB, dA = {}, {}  # sparsify: the entries that count most, at the L1 norm of all
        for name, own in fitted.model["lora"].items():
            beside = own.A if self.symmetric else start[name].A
            change_B, change_A = own.B - start[name].B, own.A - start[name].A
            dB[name] = self.kept(change_B, importance_of_B(change_B, beside))
            dA[name] = self.kept(change_A, importance_of_A(change_A, own.B))
        return Upload(Deltas(dB, dA))

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State:
        moved, key = factor_in_turn(server.round, self.first), server.key("mask")

        def of_layer(name: str) -> Sparse | None:
            old = state.lora[name]
            held = [(w, one.added_to(old, name)) for _, one, w in uploads.items() if w > 0 and name in one.B]
            if not held:
                return None
            total = sum(weight for weight, _ in held)
            W = self.reconstructed([pair for _, pair in held], [weight / total for weight, _ in held], old.rank)
            step = factor_step(old.B, old.A, W, moved)  # decompose: dB = (W - B A) A^+, or dA = B^+ (W - B A)
            return self.drawn(step.to(old.B.dtype), key.fold(name))

        made = zip(state.lora, mapped(of_layer, state.lora), strict=True)
        delta = {name: one for name, one in made if one is not None}
        lora = {name: added(state.lora[name], moved, one) for name, one in delta.items()}
        turns = state.turns.after(server.round, moved, uploads)
        return State(state.lora | lora, state.init_key, moved, delta, turns)

    def reconstructed(self, pairs: list[Factors], weights: list[float], rank: int) -> Factors:
        """W: the mean of the products, cut to rank r, as factors."""
        best = best_rank(pairs, weights, rank, method="exact")
        return best.B, best.A

    def check(self, payload: Any, card: Card) -> None:
        check_deltas(payload, card)

    def site_model(self, client: Client, download: Download) -> Model:
        return Model(lora=stepped_pair(client, download))

    def global_model(self, state: State) -> Model:
        return Model(lora=state.lora)

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        down = self.step_bytes(layer, card, factor_in_turn(number - 1, self.first)) if number > 1 else 0
        return self.bytes_up(layer, card), down


def stepped_pair(client: Client, download: Download) -> Adapter:
    """The global pair at this site, brought up to date by the step that it was sent, or by whole factors."""
    pair = current_pair(client, download)
    for factor, deltas in download.deltas.items():
        pair = pair | {name: added(pair[name], factor, delta) for name, delta in deltas.items()}
    return pair
