"""The engine of one process: plays rounds, one after another or with clients stacked.

It moves messages and keeps books; what a method does stands in its own file, what a step computes in `training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from coterie.engines.arrivals import check_arrival, check_head, misshapen, poisoned
from coterie.engines.base_versions import base_of, carried, extends
from coterie.engines.driver import REQUESTS, Party, drive, drive_one
from coterie.engines.evaluation import global_scores, objective, personal_scores, untrained_scores
from coterie.engines.figures import Figures
from coterie.engines.heads import chosen_heads, head_name, head_of
from coterie.engines.measures import factors_in
from coterie.engines.scoring import Evaluation
from coterie.engines.setting import Setting
from coterie.engines.sites import Draft, Store, load_record, memory_of
from coterie.engines.traffic import Traffic
from coterie.engines.uploads import Waiting
from coterie.engines.visits import (
    Clock,
    Visit,
    factors_left,
    mismatches,
    seen_of,
    server_training_of,
    training_of,
    weights_of,
)
from coterie.errors import RunError, said
from coterie.maths.concurrency import at_once
from coterie.maths.keys import Key, root_key
from coterie.protocol import (
    BaseLog,
    Client,
    Phase,
    Server,
    Upload,
    Uploads,
    as_adapters,
    copied,
    message,
)
from coterie.protocol.messages import Uploaded, weighted_sum
from coterie.training.asks import Head
from coterie.training.executor import Executor
from coterie.wire.codec import decode, encode
from coterie.wire.ledger import Ledger


@message
class Progress:
    """Where a run stands: the last round played, the server's state, and the heads that the engine keeps."""

    round: int
    state: Any
    heads: dict[str, Head]
    finished: bool


@dataclass(frozen=True)
class Played:
    """One round: where the run stands now, its metrics (a pure function of the configuration) and its seconds."""

    progress: Progress
    metrics: dict[str, Any]
    seconds: dict[str, float]


class InProcess:
    """All clients in this process, on one executor."""

    def __init__(
        self, setting: Setting, executor: Executor, store: Store, ledger: Ledger, waiting: Waiting | None = None
    ) -> None:
        self.setting = setting
        self.executor = executor
        self.store = store
        self.ledger = ledger
        self.waiting = waiting or Waiting()
        self.algorithm = setting.algorithm
        self.federation = setting.federation
        self.root = root_key(setting.seed)
        self.cards = {card.id: card for card in self.federation.cards}
        self.specs = setting.specs
        self.schedule = [phase for phase in self.algorithm.phases(setting.rounds) for _ in range(phase.rounds)]

    def begin(self) -> Progress:
        """The run before its first round: the algorithm's start program has run."""
        self._use_base(None)
        heads = {}
        for spec in self.specs:
            head = self.setting.initial_head(spec)
            if head is not None:
                heads[head_name(self.setting.head_owner(spec), "all")] = head
        party = self._server_party(0, heads)
        state = drive_one(self.algorithm.start(self.federation, self._server(0, "start")), party, self.executor)
        return copied(Progress(0, state, self._with_server_heads(heads, party), False))

    def rounds(self, progress: Progress) -> Iterator[Played]:
        """The rounds that are left; after the last one the finish program has run."""
        while not progress.finished:
            played = self.play(progress)
            progress = played.progress
            yield played

    def play(self, progress: Progress) -> Played:
        """The next round. When it raises (too few clients answered, say), ledger and store are as they were."""
        try:
            return self._played(progress)
        finally:
            self.waiting.clear()

    def _played(self, progress: Progress) -> Played:
        clock = Clock()
        self._use_base(progress.state)
        draft, ledger = Draft(self.store), Ledger()
        number = progress.round + 1
        phase = self.schedule[progress.round]
        traffic = Traffic(ledger, number, phase.name, self.setting.strict)
        if number == 1:
            traffic.pool(self.setting.given)
        visits = self._visit(progress, number, phase, traffic)
        outcomes = drive(
            {name: self._program(visit) for name, visit in visits.items() if visit.error is None},
            {name: visit.party for name, visit in visits.items()},
            self.executor,
        )
        for name in list(outcomes):
            self._settle(visits[name], outcomes.pop(name), number, phase, traffic)
        clock.lap("clients")

        answered = {name: v for name, v in visits.items() if v.error is None and not v.late}
        failed = {name: said(v.error) for name, v in visits.items() if v.error is not None}
        if phase.clients != "none" and len(answered) < self.setting.min_replies:
            why = failed | {name: "answered too late" for name, visit in visits.items() if visit.late}
            told = "; ".join(f"{name}: {reason}" for name, reason in sorted(why.items()))
            raise RunError(
                f"round {number}: {len(answered)} of {len(visits)} clients answered, min_replies is "
                f"{self.setting.min_replies} ({told}); mend the clients or lower min_replies, then resume"
            )
        metrics: dict[str, Any] = {
            "round": number,
            "phase": phase.name,
            "cohort": sorted(visits),
            "answered": sorted(answered),
            "failed": failed,
            "late": sorted(name for name, v in visits.items() if v.late),
            "train": training_of(answered, self.setting.members),
        }
        for name, visit in visits.items():
            if visit.error is None:
                draft.put(f"records/{name}", visit.kept)

        last = number == len(self.schedule)
        measuring = self.setting.measuring
        weights = weights_of(self.setting, answered)
        view = Evaluation(self.setting, self.executor, draft, number, phase.name, traffic)
        trained = {name: (v.party, weights[name]) for name, v in answered.items() if v.party.fits}
        if trained and measuring.objective_examples:
            metrics["objective"] = objective(view, trained)
        if number == 1 and measuring.untrained:
            metrics["untrained"] = untrained_scores(view)
        clients_due = last or number % measuring.clients_every == 0
        early = self.algorithm.traits.evaluated == "before aggregation"
        shared: Figures | None = None
        validation: Figures | None = None
        clock.lap("measures")
        if clients_due and early:
            downloads = {name: v.fields["pristine"] for name, v in visits.items() if v.error is None}
            metrics["personal"], validation = personal_scores(
                view, progress.state, progress.heads, downloads, pooled=last
            )
            clock.lap("evaluation")

        state, heads, party = self._aggregate(progress, answered, weights, number, phase)
        if phase.clients == "none" and party.fits:
            metrics["train"] = server_training_of(party)
        clock.lap("server")
        # Of an emulator's factors, which are no part of what is averaged, nothing can be missing.
        comparable = not self.algorithm.traits.server_trains and self.algorithm.emulation() is None
        if measuring.mismatch and comparable:
            patches = as_adapters(base_of(state).since(base_of(progress.state).version))
            deployed = self.algorithm.global_model(state)
            metrics |= mismatches(deployed, patches, answered, weights, visits, measuring.mismatch_layers)
        seen = {name: seen_of(visit, weights[name]) for name, visit in answered.items()}
        metrics["measures"] = self.algorithm.measures(state, self.federation, seen)
        if "objective" in metrics and "regulariser" in metrics["measures"]:
            metrics["objective"]["joint"] = metrics["objective"]["task"] + metrics["measures"]["regulariser"]
        clock.lap("measures")

        if last:
            party = self._server_party(number + 1, heads)
            state = drive_one(self.algorithm.finish(state, self._server(number + 1, "finish")), party, self.executor)
            heads = self._with_server_heads(heads, party)
        now = self._transferred(Progress(number, state, heads, last), base_of(progress.state))
        state, heads = now.state, now.heads
        self._use_base(state)
        clock.lap("server")
        if last or number % measuring.every == 0:
            limit = None if last else measuring.pooled_limit
            metrics["global"], shared = global_scores(view, state, heads, limit, clients=clients_due)
        if clients_due and not early:
            metrics["personal"], validation = personal_scores(view, state, heads, {}, pooled=last)
        if (shared or validation) is not None:
            metrics["validation"] = shared or validation  # the global model is what is deployed, where there is one
        clock.lap("evaluation")
        metrics["bytes"] = ledger.round_totals(number)
        draft.settle()
        for row in ledger.drain():
            self.ledger.add(**row)
        return Played(now, metrics, clock.seconds)

    def _visit(self, progress: Progress, number: int, phase: Phase, traffic: Traffic) -> dict[str, Visit]:
        """Sends every client of the cohort what it is to have before it starts."""
        visits = {}
        for name in self._cohort(number, phase):
            card, site = self.cards[name], self.setting.sites[name]
            record = load_record(self.store, name)
            log = base_of(progress.state)
            for patch in log.since(record.base_version):
                traffic.book(name, "down", "base", patch)  # the executor has it already
            record = replace(record, held=traffic.set_up(name, self.setting.set_up.get(card.spec, 0), record.held))
            head = head_of(self.setting, progress.state, progress.heads, name, record)
            choices = self.algorithm.head_choices(progress.state, card)
            group_heads: dict[str, Head] = {}
            if self.setting.head == "averaged" and choices and head is not None:
                offered = chosen_heads(self.setting, progress.heads, card.spec, choices)
                group_heads = traffic.carry(name, "down", "head", offered)
                head = group_heads[record.head_group or self.algorithm.head_group(progress.state, card)]
            elif self.setting.head == "averaged":
                head = traffic.carry(name, "down", "head", head)
            download, held = traffic.download(name, self.algorithm.send(progress.state, card), record.held)
            memory = memory_of(record)
            key = self._key_of("client", number, name)
            client = Client(card, memory, tuple(sorted(site.data)), key, number, phase.name, record.head_group)
            party = Party(
                name,
                card.spec,
                site.data,
                head,
                self.root.fold("request", number, name),
                trains_head=self.setting.head != "frozen",
                group_heads=group_heads,
                choices=choices,
            )
            record = replace(record, base_version=log.version, held=held)
            visits[name] = Visit(client, party, memory, record, download)
            visits[name].fields["head"] = head
            if self.algorithm.traits.evaluated == "before aggregation":
                visits[name].fields["pristine"] = traffic.transferred(download)
            if self._fault(name, number) == "exception":
                visits[name].error = RunError("rehearsed fault: the site raised")
        return visits

    def _program(self, visit: Visit) -> Any:
        try:
            return self.algorithm.local(visit.client, visit.download)
        except Exception as error:
            return error

    def _settle(self, visit: Visit, outcome: Any, number: int, phase: Phase, traffic: Traffic) -> None:
        """Checks what a client returned; commits its memory and carries its upload when it is sound."""
        name = visit.client.card.id
        fault = self._fault(name, number)
        try:
            if isinstance(outcome, Exception):
                raise outcome
            if not isinstance(outcome, Upload):
                raise RunError(
                    f"client {name}: local must return an Upload, not {type(outcome).__name__}; is a `yield` missing?"
                )
            if phase.trains and not visit.party.fits:
                raise RunError(
                    f"client {name}: uploaded in phase {phase.name!r} without any answered Fit; is a `yield` missing?"
                )
            averaged = self.setting.head == "averaged" and visit.party.head_trained
            if not phase.uploads and (outcome.payload is not None or averaged):
                what, instead = "a payload", "return Upload(None)"
                if outcome.payload is None:
                    what, instead = "its trained head", "give Fit head=False"
                raise RunError(
                    f"client {name}: {what} would leave it in phase {phase.name!r}, which uploads nothing; {instead}"
                )
            payload = outcome.payload
            if fault == "nan":
                payload = poisoned(payload)
            if fault == "shape":
                payload = misshapen(payload)
            if outcome.head_group is not None and outcome.head_group not in visit.party.choices:
                raise RunError(f"client {name}: chose the head group {outcome.head_group!r}, which it was not offered")
            told = outcome.head_group if phase.uploads else None
            visit.payload, visit.head_group = traffic.upload(name, payload, told)
            check_arrival(visit.payload, visit.client.card)
            self.algorithm.check(visit.payload, visit.client.card)
            if averaged:
                visit.party.head = traffic.carry(name, "up", "head", visit.party.head)
                check_head(visit.party.head, visit.fields["head"], visit.client.card)
            visit.fields["previous"] = factors_in(visit.record.uploaded)
            visit.record = replace(
                visit.record,
                memory=visit.memory.commit(),
                head=visit.party.head if self.setting.head == "local" else None,
                uploaded=factors_left(visit) if self.setting.measuring.mismatch else None,
                head_group=outcome.head_group or visit.record.head_group,
            )
            visit.kept = encode(visit.record)  # what cannot be kept must fail here, as this client's own fault
        except Exception as error:
            visit.error = error
            return
        visit.payload = self.waiting.kept(visit.payload)
        visit.diagnostics = None if self.setting.strict else outcome.diagnostics
        visit.late = fault == "late"

    def _aggregate(
        self,
        progress: Progress,
        answered: dict[str, Visit],
        weights: dict[str, float],
        number: int,
        phase: Phase,
    ) -> tuple[Any, dict[str, Head], Party]:
        """The server's half of the round, and what it asked for as a party."""
        if not answered and phase.clients != "none":
            return progress.state, progress.heads, self._server_party(number, progress.heads)
        heads = dict(progress.heads)
        if self.setting.head == "averaged":
            heads |= self._averaged_heads(progress, answered, weights)
        uploads = Uploads(
            [Uploaded(self.cards[name], v.payload, weights[name], v.head_group) for name, v in answered.items()]
        )
        party = self._server_party(number, heads)
        with at_once(self.executor.plan.workers):
            program = self.algorithm.aggregate(progress.state, uploads, self._server(number, phase.name))
            state = drive_one(program, party, self.executor)
        if state is None or isinstance(state, REQUESTS):
            raise RunError(f"round {number}: aggregate must return the new state, not {type(state).__name__}")
        if not extends(base_of(state), base_of(progress.state)):
            raise RunError(f"round {number}: the base's log may only grow; add patches with state.base.add")
        return state, self._with_server_heads(heads, party), party

    def _averaged_heads(
        self, progress: Progress, answered: dict[str, Visit], weights: dict[str, float]
    ) -> dict[str, Head]:
        """The mean of the heads that were trained, for each base model: of every group, and of all together."""
        members: dict[str, list[tuple[float, Head]]] = {}
        for name in sorted(answered):
            party = answered[name].party
            if party.head is not None and party.head_trained:
                group = answered[name].head_group or self.algorithm.head_group(progress.state, self.cards[name])
                owner = self.setting.head_owner(party.spec)
                for which in {group, "all"}:
                    members.setdefault(head_name(owner, which), []).append((weights[name], party.head))
        averaged = {}
        for group, heads in members.items():
            total = sum(weight for weight, _ in heads)
            if total > 0:
                averaged[group] = weighted_sum([(weight / total, head) for weight, head in heads])
        return averaged

    def _cohort(self, number: int, phase: Phase) -> list[str]:
        names = list(self.setting.names)
        if phase.clients == "none":
            return []
        if phase.clients == "all" or self.setting.sample is None:
            return names
        return [names[i] for i in self.root.fold("sample", number).choice(len(names), self.setting.sample)]

    def _fault(self, name: str, number: int) -> str | None:
        return next((f.kind for f in self.setting.faults if f.client == name and f.round == number), None)

    def _key_of(self, side: str, number: int, name: str) -> Callable[[str], Key]:
        return lambda purpose: self.root.fold(side, purpose, number, name)

    def _server(self, number: int, phase: str) -> Server:
        return Server(tuple(sorted(self.setting.server_data)), self._key_of("server", number, "server"), number, phase)

    def _server_party(self, number: int, heads: dict[str, Head]) -> Party:
        spec = self.setting.server_spec
        prefix = head_name(spec, "")
        own = {name.removeprefix(prefix): head for name, head in heads.items() if name.startswith(prefix)}
        return Party(
            "server",
            spec,
            self.setting.server_data,
            own.pop("all", None),
            self.root.fold("request", number, "server"),
            trains_head=self.setting.head == "averaged",
            is_server=True,
            group_heads=own,
        )

    @staticmethod
    def _with_server_heads(heads: dict[str, Head], party: Party) -> dict[str, Head]:
        now = {} if party.head is None else {"all": party.head}
        return heads | {head_name(party.spec, group): head for group, head in (now | party.group_heads).items()}

    def _use_base(self, state: Any) -> None:
        """Every base model in use at the version of this state."""
        for spec in self.specs:
            self.executor.set_base(base_of(state), spec)

    def _transferred(self, progress: Progress, before: BaseLog) -> Progress:
        """The progress as a checkpoint would give it back: through bytes in strict mode, else a copy.

        before: the base's log of the round before.
        """

        def across(tree: Any) -> Any:
            return decode(encode(tree, dense=True)) if self.setting.strict else copied(tree)

        heads: dict[str, Head] = across(progress.heads)
        return replace(progress, state=carried(progress.state, before, across), heads=heads)
