"""FedSEE: the server extracts an expert for each public task from clients' mixed updates; clients route over them.

FedSEE (Federated Supervised Expert Extraction), Algorithm 1. A first round trains one adapter from one start; the mean
of its A stays for good. Then every client trains a few experts' B, a shared adapter that always acts and a router for
each layer; the server finds each task's expert as the convex combination of all uploaded B that its public examples
like best, and what a client contributes to the experts decides which ones it trains and how much it is to use them.
Up: B of L_i experts at most, the shared pair, the routers: L_i m r + r (m + n) + M (n + 1) scalars a layer; first B,
A, r (m + n). Down: U_i experts, shared pair, routers: U_i m r + r (m + n) + M (n + 1), without the last two before
anybody has trained them; once, A^global, r n. Which experts, and the target, M numbers, travel as plain numbers.
Deviations: what the paper leaves open is decided so. The regularisation coefficient multiplies half the squared norm
of the weights (S2); Sinkhorn scales each client's weights as a block (S3), which are at least 1e-12 before (S4), and
ends on the experts' sums (S5). Weights start from C (S6), made feasible once. A client of which no expert reaches tau
trains its first (S7). Of clients that sent nothing C stays; contributions of the others are brought to the same sum
(S8). There is a router for each adapted layer, which sees tokens, and its use is averaged over those that are no
padding (S9, S10); it begins as a linear layer does, with a bias of zero. A step of the extraction sees 64 examples of
each task, drawn anew, without dropout (S11, S12), and clips an expert's gradient over all its layers together. Decay
and clipping are joint (S15), lower experts come first among equals (S16), and mean use counts as 1e-8 at least (S17).
Clients are sent the experts that they route to, not all M. Query and value projections keep their bias, which Table 8
leaves out. The paper's heads are frozen; here the experiment decides, and the server has no other head than its own:
experts are extracted with the initial one where heads are local, and where heads are averaged, sites are scored with
that of the round before. A client that is away is scored with its old router, shared pair and blocks beside new
experts, and all are scored with the untrained start in the first round. Uploads of the other phase are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Program
from coterie.algorithms.contributions import assigned, calibrating, concentration, smoothed
from coterie.algorithms.expert_pool import (
    Block,
    Common,
    Download,
    Start,
    Trained,
    check_trained,
    routed_model,
    starting_common,
    trained_parts,
)
from coterie.algorithms.expert_sizes import ExpertSizes
from coterie.algorithms.extraction import PUBLIC, extracted, first_pool, later_pool, public_tasks
from coterie.algorithms.factors import (
    check_adapter,
    initial_factors,
    require_common_scale,
    require_equal_layers,
    require_equal_ranks,
)
from coterie.maths.extraction import Descent
from coterie.maths.keys import Key
from coterie.protocol import (
    Card,
    Client,
    Federation,
    Fit,
    Model,
    Once,
    Phase,
    Server,
    Traits,
    Upload,
    Uploads,
    message,
)

ROUTERS = ("experts.*.router", "experts.*.bias")


@message
class State:
    """A^global by layer and the M experts, both empty before the first extraction; what is shared, None before it is.

    contributions: the smoothed columns (M,) of C by client, of so many `clients` in all.
    """

    init_key: Key
    tasks: tuple[str, ...]
    clients: int
    A: dict[str, Tensor]
    experts: list[Block]
    common: Common | None
    contributions: dict[str, Tensor]


@dataclass(frozen=True)
class FedSEE(ExpertSizes, Algorithm):
    """Supervised expert extraction with mixture-aware routing (FedSEE, Algorithm 1).

    Which experts there are, and who holds and trains how many: see ExpertSizes. calibration, beta: what the mean use of
    experts is drawn to, and by which weight. alike: whether all draw the first A of the shared adapter alike.
    balanced: all clients contribute equally much to the experts together; else each expert takes what suits it
    (Theorem 2). steps, lr, regulariser, examples: of the extraction; without steps, experts are what contributions so
    far make. smoothing: lambda, the share of new contributions. tau: from which share of what it contributes to the
    experts that it routes to a client trains one. router_lr: in learning rates. init_epochs: E_init (None: as in every
    round).
    """

    calibration: Literal["mixture", "uniform", "none"] = "mixture"
    beta: float = 1e-3
    alike: bool = False
    balanced: bool = True
    steps: int = 50
    lr: float = 0.1
    regulariser: float = 0.01
    examples: int | None = 64
    smoothing: float = 0.9
    tau: float = 0.05
    router_lr: float = 10.0
    init_epochs: int | None = None

    traits = Traits(
        title="FedSEE",
        paper="FedSEE",
        up="B of L_i experts at most, shared B, A, router: L_i m r + r (m + n) + M (n + 1); first B, A",
        down="U_i experts, shared B, A, router: U_i m r + r (m + n) + M (n + 1); once A^global, r n",
        ranks="equal",
        weights="uniform",
        evaluated="before aggregation",
        common_scale=True,
        adaptive_size=True,
        personal=True,
        keeps_memory=True,
        server_data="public",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.smoothing <= 1 and 0 <= self.tau < 1 and self.beta >= 0 and self.steps >= 0):
            raise ValueError(
                f"smoothing ({self.smoothing:g}) must be in (0, 1], tau ({self.tau:g}) in [0, 1), beta ({self.beta:g}) "
                f"and steps ({self.steps}) at least 0"
            )
        if self.examples is not None and self.examples < 1:
            raise ValueError(f"examples must be at least 1, or null for all, not {self.examples}")

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("init", 1, clients="all"), Phase("main", rounds)]

    def start(self, federation: Federation, server: Server) -> State:
        require_equal_ranks(federation, "FedSEE")
        require_common_scale(federation, "FedSEE")
        require_equal_layers(federation, "FedSEE")
        tasks = public_tasks(server.data, self.tasks)
        for card in federation.cards:
            self.capacity(card, len(tasks))
        return State(server.key("init"), tasks, len(federation.cards), {}, [], None, {})

    def send(self, state: State, card: Card) -> Start | Download:
        if not state.A:
            return Start(Once(state.init_key))  # line 5
        M = len(state.tasks)
        column = state.contributions.get(card.id, torch.ones(M))
        held = self.capacity(card, M)
        assignment = assigned(column, held.inference, held.training, self.tau)  # line 14
        experts = {m: state.experts[m] for m in assignment.inference}  # line 12
        shared_key = Once(state.init_key) if self.alike else None
        return Download(Once(state.A), experts, state.common, assignment, shared_key)

    def local(self, client: Client, download: Start | Download) -> Program:
        if isinstance(download, Start):
            fitted = yield Fit(self.site_model(client, download), epochs=self.init_epochs)  # line 6
            return Upload(fitted.model["lora"])
        active, common = download.assignment.active, starting_common(client, download, self.shared)  # lines 8, 23
        fitted = yield Fit(  # lines 24-29
            routed_model(client.card, download, common),
            train=(*(f"experts.*.B.{m}" for m in active), *ROUTERS, *(f"{name}.*" for name in common.terms)),
            penalties=(*calibrating(self.calibration, self.beta, download.assignment),),
            lr_scale=dict.fromkeys(ROUTERS, self.router_lr),
        )
        trained = client.memory["trained"] = trained_parts(fitted.model, active)
        return Upload(trained)  # line 30

    def aggregate(self, state: State, uploads: Uploads, server: Server) -> Program:
        pool = later_pool(uploads, state.A, len(state.tasks)) if state.A else first_pool(uploads)  # lines 7, 17
        if pool is None:
            return state
        descent = Descent(self.steps, self.lr, self.regulariser, self.balanced)
        found = yield from extracted(  # lines 9, 18
            pool, state.tasks, state.contributions, state.clients, descent, self.examples
        )
        C = smoothed(state.contributions, found.contributions, self.smoothing, state.clients)  # line 19
        return replace(state, A=dict(pool.A), experts=found.experts, common=pool.common, contributions=C)

    def check(self, payload: Any, card: Card) -> None:
        if isinstance(payload, Trained):
            check_trained(payload, card, self.shared, self.trainable(card))
        else:
            check_adapter(payload, card, card.rank)

    def site_model(self, client: Client, download: Start | Download) -> Model:
        if isinstance(download, Start):
            return Model(lora=initial_factors(client.card, download.init_key))
        own: Trained | None = client.memory.get("trained")
        if own is None:
            return routed_model(client.card, download, starting_common(client, download, self.shared))
        return routed_model(client.card, download, own.common, own.blocks)

    def global_model(self, state: State) -> None:
        return None  # each client routes over the experts in its own way

    def measures(self, state: State, federation: Federation, seen: Mapping[str, Any]) -> dict[str, Any]:
        return concentration(state.contributions, [task.removeprefix(PUBLIC) for task in state.tasks])
