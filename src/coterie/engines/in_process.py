"""The engine of one process: plays rounds, one after another or with clients stacked.

It moves messages and keeps books; what a method does stands in its own file, what a step computes in `training`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.engines.arrivals import check_arrival, check_head, misshapen, poisoned
from coterie.engines.driver import REQUESTS, Party, drive, drive_one
from coterie.engines.evaluation import (
    Evaluation,
    global_scores,
    head_name,
    head_of,
    objective,
    personal_scores,
    said,
)
from coterie.engines.measures import aggregation_mismatch, factors_in, initialisation_mismatch
from coterie.engines.setting import Setting
from coterie.engines.sites import Draft, Store, load_record, memory_of
from coterie.engines.traffic import Traffic
from coterie.errors import RunError
from coterie.maths.keys import Key, root_key
from coterie.protocol import (
    Adapter,
    BaseLog,
    Client,
    Memory,
    Phase,
    Seen,
    Server,
    SiteRecord,
    Upload,
    Uploads,
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


@dataclass
class _Visit:
    """One client's part in the round that is being played."""

    client: Client
    party: Party
    memory: Memory
    record: SiteRecord
    download: Any
    payload: Any = None
    error: Exception | None = None
    kept: bytes = b""
    diagnostics: Any = None
    late: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


class InProcess:
    """All clients in this process, on one executor."""

    def __init__(self, setting: Setting, executor: Executor, store: Store, ledger: Ledger) -> None:
        self.setting = setting
        self.executor = executor
        self.store = store
        self.ledger = ledger
        self.algorithm = setting.algorithm
        self.federation = setting.federation
        self.root = root_key(setting.seed)
        self.cards = {card.id: card for card in self.federation.cards}
        self.specs = sorted({card.spec for card in self.federation.cards})
        self.schedule = [phase for phase in self.algorithm.phases(setting.rounds) for _ in range(phase.rounds)]

    def begin(self) -> Progress:
        """The run before its first round: the algorithm's start program has run."""
        self._use_base(None)
        heads = {}
        for spec in self.specs:
            head = self.setting.initial_head(spec)
            if head is not None:
                heads[head_name(spec, "all")] = head
        party = self._server_party(0, heads)
        state = drive_one(self.algorithm.start(self.federation, self._server(0, "start")), party, self.executor)
        return copied(Progress(0, state, self._with_server_head(heads, party), False))

    def rounds(self, progress: Progress) -> Iterator[Played]:
        """The rounds that are left; after the last one the finish program has run."""
        while not progress.finished:
            played = self.play(progress)
            progress = played.progress
            yield played

    def play(self, progress: Progress) -> Played:
        """The next round. When it raises (too few clients answered, say), ledger and store are as they were."""
        clock = _Clock()
        self._use_base(progress.state)
        draft, ledger = Draft(self.store), Ledger()
        number = progress.round + 1
        phase = self.schedule[progress.round]
        traffic = Traffic(ledger, number, phase.name, self.setting.strict)
        visits = self._visit(progress, number, phase, traffic)
        outcomes = drive(
            {name: self._program(visit) for name, visit in visits.items() if visit.error is None},
            {name: visit.party for name, visit in visits.items()},
            self.executor,
        )
        for name, outcome in outcomes.items():
            self._settle(visits[name], outcome, number, phase, traffic)
        clock.lap("clients")

        answered = {name: v for name, v in visits.items() if v.error is None and not v.late}
        failed = {name: said(v.error) for name, v in visits.items() if v.error is not None}
        if phase.clients != "none" and len(answered) < self.setting.min_replies:
            told = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
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
            "train": self._training(answered),
        }
        for name, visit in visits.items():
            if visit.error is None:
                draft.put(f"records/{name}", visit.kept)

        last = number == len(self.schedule)
        measuring = self.setting.measuring
        weights = self._weights(answered)
        view = Evaluation(self.setting, self.executor, draft, number, phase.name, traffic)
        trained = {name: (v.party, weights[name]) for name, v in answered.items() if v.party.fits}
        if trained and measuring.objective_examples:
            metrics["objective"] = objective(view, trained)
        clients_due = last or number % measuring.clients_every == 0
        early = self.algorithm.traits.evaluated == "before aggregation"
        clock.lap("measures")
        if clients_due and early:
            downloads = {name: v.fields["pristine"] for name, v in visits.items() if v.error is None}
            metrics["personal"] = personal_scores(view, progress.state, progress.heads, downloads, pooled=last)
            clock.lap("evaluation")

        state, heads = self._aggregate(progress, answered, weights, number, phase)
        clock.lap("server")
        metrics.update(self._mismatches(progress, state, answered, weights, visits))
        seen = {
            name: Seen(weights[name], v.party.fits[-1][1].model if v.party.fits else None, v.diagnostics)
            for name, v in answered.items()
        }
        metrics["measures"] = self.algorithm.measures(state, self.federation, seen)
        if "objective" in metrics and "regulariser" in metrics["measures"]:
            metrics["objective"]["joint"] = metrics["objective"]["task"] + metrics["measures"]["regulariser"]
        clock.lap("measures")

        if last:
            party = self._server_party(number + 1, heads)
            state = drive_one(self.algorithm.finish(state, self._server(number + 1, "finish")), party, self.executor)
            heads = self._with_server_head(heads, party)
        now = self._transferred(Progress(number, state, heads, last))
        state, heads = now.state, now.heads
        self._use_base(state)
        clock.lap("server")
        if last or number % measuring.every == 0:
            limit = None if last else measuring.pooled_limit
            metrics["global"] = global_scores(view, state, heads, limit, clients=clients_due)
        if clients_due and not early:
            metrics["personal"] = personal_scores(view, state, heads, {}, pooled=last)
        clock.lap("evaluation")
        metrics["bytes"] = ledger.round_totals(number)
        draft.settle()
        for row in ledger.drain():
            self.ledger.add(**row)
        return Played(now, metrics, clock.seconds)

    def _visit(self, progress: Progress, number: int, phase: Phase, traffic: Traffic) -> dict[str, _Visit]:
        """Sends every client of the cohort what it is to have before it starts."""
        visits = {}
        for name in self._cohort(number, phase):
            card, site = self.cards[name], self.setting.sites[name]
            record = load_record(self.store, name)
            log = _base_of(progress.state)
            for patch in log.since(record.base_version):
                traffic.carry(name, "down", "base", patch)
            head = head_of(self.setting, progress.state, progress.heads, name, record)
            if self.setting.head == "averaged":
                head = traffic.carry(name, "down", "head", head)
            download, held = traffic.download(name, self.algorithm.send(progress.state, card), record.held)
            memory = memory_of(record)
            key = self._key_of("client", number, name)
            client = Client(card, memory, tuple(sorted(site.data)), key, number, phase.name)
            party = Party(
                name,
                card.spec,
                site.data,
                head,
                self.root.fold("request", number, name),
                trains_head=self.setting.head != "frozen",
            )
            record = replace(record, base_version=log.version, held=held)
            visits[name] = _Visit(client, party, memory, record, download)
            visits[name].fields["head"] = head
            if self.algorithm.traits.evaluated == "before aggregation":
                visits[name].fields["pristine"] = traffic.transferred(download)
            if self._fault(name, number) == "exception":
                visits[name].error = RunError("rehearsed fault: the site raised")
        return visits

    def _program(self, visit: _Visit) -> Any:
        try:
            return self.algorithm.local(visit.client, visit.download)
        except Exception as error:
            return error

    def _settle(self, visit: _Visit, outcome: Any, number: int, phase: Phase, traffic: Traffic) -> None:
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
            payload = outcome.payload
            if fault == "nan":
                payload = poisoned(payload)
            if fault == "shape":
                payload = misshapen(payload)
            visit.payload = traffic.carry(name, "up", "message", payload)
            check_arrival(visit.payload, visit.client.card)
            self.algorithm.check(visit.payload, visit.client.card)
            if self.setting.head == "averaged" and visit.party.head_trained:
                visit.party.head = traffic.carry(name, "up", "head", visit.party.head)
                check_head(visit.party.head, visit.fields["head"], visit.client.card)
            visit.fields["previous"] = factors_in(visit.record.uploaded)
            visit.record = replace(
                visit.record,
                memory=visit.memory.commit(),
                head=visit.party.head if self.setting.head == "local" else None,
                uploaded=_left(visit) if self.setting.measuring.mismatch else None,
            )
            visit.kept = encode(visit.record)  # what cannot be kept must fail here, as this client's own fault
        except Exception as error:
            visit.error = error
            return
        visit.diagnostics = None if self.setting.strict else outcome.diagnostics
        visit.late = fault == "late"

    def _aggregate(
        self,
        progress: Progress,
        answered: dict[str, _Visit],
        weights: dict[str, float],
        number: int,
        phase: Phase,
    ) -> tuple[Any, dict[str, Head]]:
        """The server's half of the round."""
        if not answered and phase.clients != "none":
            return progress.state, progress.heads
        heads = dict(progress.heads)
        if self.setting.head == "averaged":
            heads |= self._averaged_heads(progress, answered, weights)
        uploads = Uploads([Uploaded(self.cards[name], v.payload, weights[name]) for name, v in answered.items()])
        party = self._server_party(number, heads)
        program = self.algorithm.aggregate(progress.state, uploads, self._server(number, phase.name))
        state = drive_one(program, party, self.executor)
        if state is None or isinstance(state, REQUESTS):
            raise RunError(f"round {number}: aggregate must return the new state, not {type(state).__name__}")
        if not _extends(_base_of(state), _base_of(progress.state)):
            raise RunError(f"round {number}: the base's log may only grow; add patches with state.base.add")
        return state, self._with_server_head(heads, party)

    def _averaged_heads(
        self, progress: Progress, answered: dict[str, _Visit], weights: dict[str, float]
    ) -> dict[str, Head]:
        """The mean of the heads that were trained, for each base model: of every group, and of all together."""
        members: dict[str, list[tuple[float, Head]]] = {}
        for name in sorted(answered):
            party = answered[name].party
            if party.head is not None and party.head_trained:
                group = self.algorithm.head_group(progress.state, self.cards[name])
                for which in {group, "all"}:
                    members.setdefault(head_name(party.spec, which), []).append((weights[name], party.head))
        averaged = {}
        for group, heads in members.items():
            total = sum(weight for weight, _ in heads)
            if total > 0:
                averaged[group] = weighted_sum([(weight / total, head) for weight, head in heads])
        return averaged

    def _weights(self, answered: dict[str, _Visit]) -> dict[str, float]:
        """The policy's weight of everybody who answered, summing to one."""
        policy = self.setting.weights if self.setting.weights != "paper" else self.algorithm.traits.weights
        raw = {}
        for name in sorted(answered):
            if policy == "uniform":
                raw[name] = 1.0
            elif policy == "examples":
                raw[name] = float(self.cards[name].examples)
            else:
                raw[name] = float(sum(fitted.examples_seen for _, fitted in answered[name].party.fits))
        total = sum(raw.values())
        # Nothing was processed, or nobody has examples: then nobody counts more than others.
        return {name: value / total if total > 0 else 1 / len(raw) for name, value in raw.items()}

    def _training(self, answered: dict[str, _Visit]) -> dict[str, Any]:
        losses = {
            name: visit.party.fits[-1][1].mean_loss for name, visit in sorted(answered.items()) if visit.party.fits
        }
        mean = sum(losses.values()) / len(losses) if losses else None
        steps = {name: sum(f.steps_taken for _, f in v.party.fits) for name, v in sorted(answered.items())}
        return {"loss": mean, "losses": losses, "steps": steps}

    def _mismatches(
        self,
        before: Progress,
        state: Any,
        answered: dict[str, _Visit],
        weights: dict[str, float],
        visits: dict[str, _Visit],
    ) -> dict[str, Any]:
        if not self.setting.measuring.mismatch:
            return {}
        found: dict[str, Any] = {}
        deployed = self.algorithm.global_model(state)
        locals_ = [(weights[name], v.party.fits[-1][1].model) for name, v in sorted(answered.items()) if v.party.fits]
        if deployed is not None and locals_:
            patches = _base_of(state).since(_base_of(before.state).version)
            found["mismatch"] = aggregation_mismatch(locals_, deployed, patches)
        pairs = []
        for _, visit in sorted(visits.items()):
            previous, initial = visit.fields.get("previous"), visit.party.first_initial
            entering = None if initial is None or "lora" not in initial else factors_in(initial["lora"])
            if previous is not None and entering is not None:
                pairs.append(initialisation_mismatch(previous, entering))
        pairs = [pair for pair in pairs if pair]
        if pairs:
            found["init_mismatch"] = {name: sum(pair[name] for pair in pairs) / len(pairs) for name in ("B", "A")}
        return found

    def _cohort(self, number: int, phase: Phase) -> list[str]:
        names = sorted(self.cards)
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
        return Party(
            "server",
            self.setting.server_spec,
            self.setting.server_data,
            heads.get(head_name(self.setting.server_spec, "all")),
            self.root.fold("request", number, "server"),
            trains_head=self.setting.head == "averaged",
            is_server=True,
        )

    @staticmethod
    def _with_server_head(heads: dict[str, Head], party: Party) -> dict[str, Head]:
        return heads if party.head is None else heads | {head_name(party.spec, "all"): party.head}

    def _use_base(self, state: Any) -> None:
        """Every base model in use at the version of this state."""
        for spec in self.specs:
            self.executor.set_base(_base_of(state), spec)

    def _transferred(self, progress: Progress) -> Progress:
        """The progress as a checkpoint would give it back: through bytes in strict mode, else a copy."""
        if not self.setting.strict:
            return copied(progress)
        through = decode(encode(progress, dense=True))
        assert isinstance(through, Progress)
        return through


def _base_of(state: Any) -> BaseLog:
    log = getattr(state, "base", None)
    return log if isinstance(log, BaseLog) else BaseLog()


def _extends(new: BaseLog, old: BaseLog) -> bool:
    """Whether the new log starts with all patches of the old one."""
    return new.version >= old.version and all(
        later is earlier or encode(later) == encode(earlier)
        for later, earlier in zip(new.patches, old.patches, strict=False)
    )


def _left(visit: _Visit) -> Adapter | None:
    """The factors with which this client left the round: what it uploaded, or trained where it uploads otherwise."""
    sent = factors_in(visit.payload)
    if sent is None and visit.party.fits and "lora" in visit.party.fits[-1][1].model:
        return factors_in(visit.party.fits[-1][1].model["lora"])
    return sent


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
