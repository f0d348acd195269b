"""Who takes part: what the server knows of a client, what a site holds, and what a federation is.

`Card` and `Client` are different types, so an algorithm's `send` cannot reach a client's memory, in
simulation either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coterie.errors import ModelError
from coterie.maths.keys import Key
from coterie.protocol.messages import message


@message
class Layer:
    """The shape of one adaptable linear layer, y = W x with W (d_out, d_in); `inner` is the rank of a factored base."""

    d_out: int
    d_in: int
    inner: int | None = None


@message
class Card:
    """What the server knows of a client.

    `rank` is what the client can train, `reference_rank` what it can download (FedPA-LoRA's R_i), `examples`
    its number of training examples, `scale` the s in s B A, `spec` the name of its base model, `group` what it is
    known to belong to (a language, a hospital's kind; "all" where nothing is known). `width` is the number of entries
    of its features (what enters its head or output layer), `classes` how many classes or options its task has, `pool`
    how many examples the pool that all parties hold has, and labels in this client's tokens; None where nobody says, or
    there are none.
    """

    id: str
    rank: int
    examples: int
    scale: float
    layers: dict[str, Layer]
    reference_rank: int | None = None
    routed_experts: int | None = None
    trained_experts: int | None = None
    group: str = "all"
    spec: str = "base"
    width: int | None = None
    classes: int | None = None
    pool: tuple[int, int] | None = None

    @property
    def down_rank(self) -> int:
        """The reference rank R_i; the client's own rank where none is given."""
        return self.rank if self.reference_rank is None else self.reference_rank


KeyMaker = Callable[[str], Key]


@dataclass(frozen=True)
class Client:
    """A site during one round: its card, its own memory, the names of its data sets, and the head group it chose last.

    head_group: of a method with `Algorithm.head_choices`; None before the first choice.
    """

    card: Card
    memory: MutableMapping[str, Any]
    data: tuple[str, ...]
    key: KeyMaker
    round: int
    phase: str
    head_group: str | None = None


@dataclass(frozen=True)
class Server:
    """The server during one round; its data names are `public/<task>` and `unlabeled` (see also `pools_data`)."""

    data: tuple[str, ...]
    key: KeyMaker
    round: int
    phase: str


@dataclass(frozen=True)
class Federation:
    """All cards in id order, the number of main rounds, and the common scale (None where scales differ).

    server: a card of the server's own base model, rank and scale; None: as those of the first client.
    """

    cards: tuple[Card, ...]
    rounds: int
    server_data: tuple[str, ...] = ()
    server: Card | None = None

    @property
    def server_card(self) -> Card:
        """See `server`."""
        return self.server or self.cards[0]

    @property
    def scale(self) -> float | None:
        scales = {card.scale for card in self.cards}
        return scales.pop() if len(scales) == 1 else None

    @property
    def rank(self) -> int:
        """The largest rank of any client (FedPA-LoRA's r_g)."""
        return max(card.rank for card in self.cards)

    @property
    def layers(self) -> dict[str, Layer]:
        """The adaptable layers of all clients together; raises ModelError where two disagree on a shape."""
        merged: dict[str, Layer] = {}
        for card in self.cards:
            for name, layer in card.layers.items():
                known = merged.setdefault(name, layer)
                if (known.d_out, known.d_in) != (layer.d_out, layer.d_in):
                    raise ModelError(
                        f"layer {name} is {known.d_out} x {known.d_in} for one client and {layer.d_out} x {layer.d_in} "
                        f"for client {card.id}; one name must mean one shape"
                    )
        return merged


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds. `clients` says who takes part; `trains` that an upload without any Fit is a mistake.

    uploads: whether anything leaves a client in it; where not, a payload and a trained averaged head are refused.
    """

    name: str
    rounds: int
    clients: Literal["sampled", "all", "none"] = "sampled"
    trains: bool = True
    uploads: bool = True


@dataclass(frozen=True)
class Traits:
    """The facts of a method, once: catalogue, `coterie list` and the conformance battery are made from them.

    title, paper: name and arXiv id (or the source).
    up, down: what travels per adapted layer, in words.
    ranks: whether clients may differ in rank.
    bases: whether clients may differ in base model: "one" for all, models "compressed" from the server's, or "any".
    common_scale: refuses clients of different scale, because it works on the unscaled product B A.
    exact: what is deployed equals sum p_i s_i B_i A_i whatever the clients send.
    best_rank: what is deployed is the best approximation of that sum at the federation's rank.
    gauge_invariant: (B R, R^-1 A) uploaded for (B, A) deploys the same product.
    one_client: with one client, what is deployed is that client's own product.
    equal_clients: clients that send the same deploy the same.
    zero_weight: a client of weight zero might as well be absent.
    linear_upload: the server uses only weighted sums of what is uploaded.
    averages: the new state's `lora` is the weighted mean of the factors that clients trained, so that a server
        optimiser or a proximal term may stand around the method.
    adaptive_size: how much is uploaded (and sent back) depends on what was trained; the method's formula says how
        much at most.
    changes_base: the method patches the base model.
    personal: sites use models that differ beyond their rank.
    keeps_memory: sites keep values of their own between rounds.
    server_data: the data of its own that the server needs, as the setting server_data calls them.
    shares_data: clients give a part of their examples to a pool, which then every party holds, as `pool`.
    server_trains: what is deployed was trained at the server, on data there; clients' factors have no part in it.
    pools_data: no federation but a reference for one: the server is given the clients' training data, as `pooled`
        and `pooled/<group>`.
    evaluated: whether a site is evaluated with this round's download or the next one's.
    weights: the paper's aggregation weights, used unless the experiment sets its own.
    head: the one policy for trained heads under which the method is itself, whatever the experiment sets (frozen heads
        stay frozen); None: any.
    """

    title: str
    paper: str
    up: str
    down: str
    ranks: Literal["equal", "unequal"]
    bases: Literal["one", "compressed", "any"] = "one"
    evaluated: Literal["before aggregation", "after aggregation"] = "after aggregation"
    weights: Literal["uniform", "examples", "processed"] = "examples"
    head: Literal["frozen", "averaged", "local"] | None = None
    common_scale: bool = False
    exact: bool = False
    best_rank: bool = False
    gauge_invariant: bool = False
    one_client: bool = False
    equal_clients: bool = False
    zero_weight: bool = False
    linear_upload: bool = False
    averages: bool = False
    adaptive_size: bool = False
    changes_base: bool = False
    personal: bool = False
    keeps_memory: bool = False
    server_data: Literal["public", "unlabeled"] | None = None
    pools_data: bool = False
    shares_data: bool = False
    server_trains: bool = False


class Memory(MutableMapping[str, Any]):
    """A site's own values as a transaction: reads are copies, writes wait for `commit`.

    The engine commits together with the returned upload; a client that raised starts its next round from the
    last commit. A read-only memory (evaluation) refuses writes.
    """

    def __init__(self, committed: Mapping[str, Any], copy: Callable[[Any], Any], read_only: bool = False) -> None:
        self._committed = dict(committed)
        self._staged: dict[str, Any] = {}
        self._deleted: set[str] = set()
        self._copy = copy
        self._read_only = read_only

    def __getitem__(self, name: str) -> Any:
        if name in self._staged:
            return self._copy(self._staged[name])
        if name in self._deleted:
            raise KeyError(name)
        return self._copy(self._committed[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self._writable()
        self._staged[name] = self._copy(value)
        self._deleted.discard(name)

    def __delitem__(self, name: str) -> None:
        self._writable()
        if name not in self:
            raise KeyError(name)
        self._staged.pop(name, None)
        self._deleted.add(name)

    def __contains__(self, name: object) -> bool:
        return name in self._staged or (name in self._committed and name not in self._deleted)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted((set(self._committed) - self._deleted) | set(self._staged)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def changed(self) -> bool:
        """Whether anything waits for a commit."""
        return bool(self._staged or self._deleted)

    def commit(self) -> dict[str, Any]:
        """The values after this transaction."""
        kept = {name: value for name, value in self._committed.items() if name not in self._deleted}
        return kept | self._staged

    def _writable(self) -> None:
        if self._read_only:
            raise TypeError("a site's memory is read-only while its model is being evaluated")


@message
class SiteRecord:
    """All that a site keeps between rounds: memory, head, base version, contents held, its last upload and choice."""

    memory: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] | None = None
    base_version: int = 0
    held: tuple[str, ...] = ()
    uploaded: Any = None
    head_group: str | None = None
