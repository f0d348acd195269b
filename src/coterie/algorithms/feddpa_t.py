"""FedDPA-T: a local adapter trained beside the global one in every round; each input mixes the two.

FedDPA-T, arXiv 2403.19211. From its second round on the federation trains two adapters at each client: first the
local one, with the output W x + a local(x) + (1 - a) global(x) and the global one held, then the global one alone,
which is averaged as in FedIT. Inputs mix the two as in FedDPA-F.
Up: B_i, A_i of the global adapter, r_i (m + n) scalars a layer. Down: their averages, r_i (m + n). The local adapter
and the features of the client's examples stay at home.
The order, local before global, is the released code's, as is a first round of the global adapter only; each part has
an optimiser of its own and the experiment's steps or epochs. A client that has no local adapter yet begins it
afresh, and uses the global one until then. The head is trained with the global adapter and shared with it.
Deviations: those of FedDPA-F that concern inference, ranks and head. FedSEE's name for T, the test-time variant, means
this method too: in the paper T stands for training, and both variants mix at inference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.algorithms.base import Program
from coterie.algorithms.factors import initial_factors, with_scale
from coterie.algorithms.feddpa_f import FedDPAF
from coterie.protocol import Adapter, Client, Fit, Model, Phase, Upload


@dataclass(frozen=True)
class FedDPAT(FedDPAF):
    """Dual-personalising adapter, local one by training (arXiv 2403.19211). a: the local adapter's share meanwhile."""

    a: float = 0.5

    traits = replace(FedDPAF.traits, title="FedDPA-T")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.a <= 1:
            raise ValueError(f"a ({self.a:g}) must be above 0 and at most 1, or the local adapter learns nothing")

    def phases(self, rounds: int) -> list[Phase]:
        return [Phase("main", rounds)]

    def local(self, client: Client, download: Adapter) -> Program:
        if client.round > 1:
            s = client.card.scale
            own = client.memory.get("local") or initial_factors(client.card, client.key("local"))
            both = Model(lora=with_scale(download, (1 - self.a) * s), local=with_scale(own, self.a * s))
            fitted = yield Fit(both, train=("local.*",), head=False)
            yield from self.keep(client, with_scale(fitted.model["local"], s))
        fitted = yield Fit(Model(lora=download))
        return Upload(fitted.model["lora"])
