"""FedSLM: compressed models train cores, groups of one size average them, their fusion teaches the full model.

FedSLM, arXiv 2607.29071, implements Algorithm 1. The base is cut to smaller models W ~ U V along one decomposition; a
client of a smaller model trains a core Sigma, W_eff = U Sigma V, in the layers that `trained` names, a client of the
full model ordinary LoRA factors. Each group averages its own by examples, every round. After the last round the groups'
weights are rebuilt at full rank and averaged, W_g = sum_g n_g / n W_g, and W_g, frozen, teaches the model that all were
cut from on the server's unlabeled examples.
Up and down: Sigma, k^2 scalars a trained layer; of a full model B, A, r (m + n). Once: U, V, k (m + n) a layer.
Deviations: stage 2 and the teaching come once, after the last round, as the text says and the algorithm's indentation
does not. The group of full models counts in W_g with W + s Bbar Abar, where the paper is silent (L3), and only in
layers that others hold compressed. A layer that is compressed and never trained counts as truncated, as Eq. 9 says;
fuse=trained_only takes the server's weights for it there (L4). U and V are sent once with the model, though the paper's
threat model says that they never leave their owner (L15). The loss of the teaching is that of Appendix B, which differs
from Eqs. 10-11; form=confidence takes these (L8). The student trains LoRA on all adapted layers, as Appendix B says,
from one start for all students, or with student=full their weights (L11); a classifier's head is the federation's,
averaged over all groups, and stays then. Of open answers, which have no options, the students learn the teacher's
distributions token by token along the answers that the examples have (L9), so that these are known to the server after
all. A group keeps its state in rounds in which none of its clients answers; n_g counts the clients that ever answered,
so that a group of which nobody did is left out. Dropout acts on LoRA factors alone. Unequal ranks and scales among full
models are met as FedIT meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from coterie.algorithms.base import BYTES, Algorithm, Program
from coterie.algorithms.factors import check_adapter, cut_for, pair_bytes
from coterie.algorithms.fedslm_fusion import Fuse, Groups, check_cores, factored, fused, trained_cores
from coterie.algorithms.fedslm_students import UNLABELED, Students
from coterie.errors import ConfigError
from coterie.protocol import (
    Adapter,
    Card,
    Client,
    Dense,
    Federation,
    Fit,
    InnerCore,
    Layer,
    Model,
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)


@message
class State:
    """The groups, all adapted layers; after stage 2 W_g - W by layer, and the students by name, the first deployed.

    losses: of each student's training, its mean over the steps.
    """

    groups: Groups
    layers: dict[str, Layer]
    weak: dict[str, Dense]
    students: dict[str, Model]
    losses: dict[str, float]


@dataclass(frozen=True)
class FedSLM(Students, Algorithm):
    """Heterogeneous compressed clients and weak-to-strong elicitation (arXiv 2607.29071).

    trained: names or name endings of the compressed layers that get a core; None: gate_proj, up_proj and down_proj
    where there are such, else all. fuse: see `Fuse`. The rest: see `Students`.
    """

    trained: tuple[str, ...] | None = None
    fuse: Fuse = "literal"

    traits = Traits(
        title="FedSLM",
        paper="arXiv 2607.29071",
        up="Sigma: k^2; of full models B, A: r (m + n)",
        down="mean Sigma: k^2; of full models mean B, A: r (m + n)",
        ranks="unequal",
        bases="compressed",
        head="averaged",
        personal=True,
        server_data="unlabeled",
    )

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds), Phase("elicitation", 1, clients="none")]

    def start(self, federation: Federation, server: Server) -> State:
        if UNLABELED not in federation.server_data:
            raise ConfigError(
                "FedSLM's server teaches on unlabeled examples; set some aside: server_data.unlabeled=200"
            )
        groups = Groups.begun(federation.cards, self.trained, server.key("init"))
        return State(groups, federation.layers, {}, {}, {})

    def send(self, state: State, card: Card) -> dict[str, Tensor] | Adapter:
        if card.spec in state.groups.cores:
            return state.groups.cores[card.spec]
        return cut_for(state.groups.full[card.spec], card)

    def local(self, client: Client, download: Any) -> Program:
        model = self.site_model(client, download)
        fitted = yield Fit(model, train=("core.*",) if "core" in model else ("lora.*",))  # line 14
        if "core" not in model:
            return Upload(fitted.model["lora"])
        return Upload({name: term.core for name, term in fitted.model["core"].items()})

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> State | Program:
        if server.phase == "elicitation":
            return self.elicited(state, server)
        return replace(state, groups=state.groups.averaged(uploads))  # stage 1, line 18, Eq. 7

    def elicited(self, state: State, server: Server) -> Program:
        """=> State: stage 2 (lines 19-21, Eqs. 8-9), then step 4 (lines 23-27, Eq. 10)."""
        weak = yield from fused(state.groups, state.layers, self.fuse)
        taught = yield from self.taught(Model(delta=weak), state.layers, server.key("student"))
        students = {name: fitted.model for name, fitted in taught.items()}
        return replace(state, weak=weak, students=students, losses={n: one.mean_loss for n, one in taught.items()})

    def check(self, payload: Any, card: Card) -> None:
        if factored(card):
            check_cores(payload, card, trained_cores(card, self.trained))
        else:
            check_adapter(payload, card)

    def site_model(self, client: Client, download: Any) -> Model:
        if factored(client.card):
            return Model(core={name: InnerCore(core) for name, core in download.items()})
        return Model(lora=download)

    def global_model(self, state: State) -> Model | None:
        return next(iter(state.students.values()), None)

    def further_global_models(self, state: State) -> Mapping[str, Model]:
        return {"weak": Model(delta=state.weak)} | dict(list(state.students.items())[1:])

    def bytes_up(self, layer: Layer, card: Card) -> int:
        return pair_bytes(layer, card.rank) if layer.inner is None else layer.inner**2 * BYTES

    def bytes_down(self, layer: Layer, card: Card) -> int:
        return self.bytes_up(layer, card)

    def bytes_of_round(self, layer: Layer, card: Card, number: int, phase: Phase) -> tuple[int, int]:
        return (0, 0) if phase.clients == "none" else super().bytes_of_round(layer, card, number, phase)

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Any]) -> dict[str, Any]:
        return {"students": state.losses} if state.losses else {}
