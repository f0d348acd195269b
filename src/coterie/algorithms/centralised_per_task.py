"""Centralised, a model for each task: the clients' data of each task in one place.

The second reference of FedSEE (section 5.3 and Appendix B.3), beside one model for all. Of a mixture of tasks, each
task's model is trained on what all clients together hold of that task and tested on examples of it; of any other task,
the groups of clients stand for tasks, and all data of a client go to the one group that it belongs to.
Up and down: as Centralised.
Each group's model takes the steps of its clients; where clients hold mixtures, each task's model those of N / M of the
N clients, at least of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coterie.algorithms.centralised import Centralised, State
from coterie.protocol import Adapter, Card, Client, Federation, Model, Server


@dataclass(frozen=True)
class CentralisedPerTask(Centralised):
    """One model for each task of a mixture, else for each group of clients. steps: mini-batches of each in a round."""

    traits = replace(Centralised.traits, title="Centralised, per task", personal=True)

    def data_of(self, group: str) -> str:
        return f"pooled/{group}"

    def work(self, federation: Federation, server: Server) -> Mapping[str, int]:
        groups = super().work(federation, server)
        pools = [name.removeprefix("pooled/") for name in server.data if name.startswith("pooled/")]
        if not pools or groups.keys() - pools != {"all"}:
            return groups
        # Clients of several tasks belong to "all", which no data set is for.
        return dict.fromkeys(pools, max(1, len(federation.cards) // len(pools)))

    def send(self, state: State, card: Card) -> dict[str, Adapter]:
        models = state.models if state.mixed else {card.group: state.models[card.group]}
        return {name: {layer: lora[layer] for layer in card.layers} for name, lora in models.items()}

    def site_model(self, client: Client, download: dict[str, Adapter]) -> Model:
        """Of a client of several tasks nothing but the base, since each of its examples has another model."""
        own = download.get(client.card.group)
        return Model() if own is None else Model(lora=own)

    def part_models(self, client: Client, download: dict[str, Adapter]) -> Mapping[str, Model]:
        alone = download.keys() == {client.card.group}
        return {} if alone else {part: Model(lora=lora) for part, lora in download.items()}

    def head_group(self, state: State | None, card: Card) -> str:
        return card.group

    def global_model(self, state: State) -> None:
        return None  # no one model is for all
