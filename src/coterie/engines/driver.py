"""Running programs: plain results pass through, generators are fed the answers to what they ask.

Programs of one round advance together, so that the trainer sees at once what several clients ask and may stack it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.data.text import TextSet
from coterie.errors import RunError, nearest
from coterie.maths.keys import Key
from coterie.protocol import Calibrate, Evaluate, Fit, Fitted, Gradient, Model, Predict, Request, Weights, copied
from coterie.training.asks import Ask, Done, Head
from coterie.training.executor import Executor

REQUESTS = (Fit, Evaluate, Predict, Gradient, Calibrate, Weights)


@dataclass
class Party:
    """A client or the server while its program runs: what its requests resolve to, and what has happened so far.

    Models are kept as copies: what the program does with its own afterwards is no business of measurements.
    """

    name: str
    spec: str
    data: Mapping[str, TextSet]
    head: Head | None
    key: Key
    trains_head: bool
    is_server: bool = False
    head_trained: bool = False
    first_initial: Model | None = None
    fits: list[tuple[Fit, Fitted]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def ask(self, request: Any) -> Ask:
        """The request with data, head and key filled in; raises RunError for what this party may not ask."""
        if not isinstance(request, REQUESTS):
            raise RunError(f"{self.name}: a program may yield requests or lists of them, not {type(request).__name__}")
        if isinstance(request, Weights):
            if not self.is_server:
                raise RunError(f"{self.name}: only the server may ask for base weights")
            return Ask(self.name, request, request.spec or self.spec, self.head, None, self._key(request))
        if request.data not in self.data:
            raise RunError(f"{self.name} has no data set {request.data!r}{nearest(request.data, self.data)}")
        key = self._key(request)
        if isinstance(request, Fit):
            if self.first_initial is None:
                self.first_initial = copied(request.initial)
            if not self.trains_head or self.head is None:
                request = replace(request, head=False)
        model = request.initial if isinstance(request, Fit) else request.model
        return Ask(self.name, request, model.spec or self.spec, self.head, self.data[request.data], key)

    def receive(self, request: Request, done: Done) -> Any:
        """Books an answer and returns what the program is to see."""
        if isinstance(request, Fit):
            assert isinstance(done.answer, Fitted)
            self.fits.append((request, replace(done.answer, model=copied(done.answer.model))))
            if request.head and self.trains_head:
                self.head, self.head_trained = done.head, True
        return done.answer

    def _key(self, request: Request) -> Key:
        """The k-th request of its class has its own stream, so another Evaluate never moves a batch."""
        kind = type(request).__name__
        if isinstance(request, Gradient) and request.batch == "first":
            return self.key.fold("Fit", self.counts["Fit"])
        key = self.key.fold(kind, self.counts[kind])
        self.counts[kind] += 1
        return key


def drive(programs: Mapping[str, Any], parties: Mapping[str, Party], executor: Executor) -> dict[str, Any]:
    """Every program's result, or the exception that ended it, by party name."""
    results: dict[str, Any] = {}
    waiting: dict[str, tuple[Generator[Any, Any, Any], Any]] = {}

    def advance(name: str, program: Generator[Any, Any, Any], answer: Any) -> None:
        try:
            failed = answer if isinstance(answer, Exception) else None
            wanted = program.throw(failed) if failed is not None else program.send(answer)
        except StopIteration as stop:
            results[name] = stop.value
        except Exception as error:
            results[name] = error
        else:
            waiting[name] = (program, wanted)

    for name in sorted(programs):
        if isinstance(programs[name], Generator):
            advance(name, programs[name], None)
        else:
            results[name] = programs[name]
    try:
        while waiting:
            current, waiting = dict(waiting), {}
            asks: list[Ask] = []
            spans: dict[str, slice | Exception] = {}
            for name in sorted(current):
                wanted = current[name][1]
                try:
                    listed = _asked(parties[name], wanted)
                except Exception as error:  # a request that cannot even be read is its own client's failure
                    spans[name] = error
                else:
                    spans[name] = slice(len(asks), len(asks) + len(listed))
                    asks += listed
            answers = executor.answer(asks) if asks else []
            for name in sorted(current):
                program, wanted = current[name]
                span = spans[name]
                if isinstance(span, Exception):
                    advance(name, program, span)
                    continue
                answered = answers[span]
                received = [
                    parties[name].receive(ask.request, done)
                    for ask, done in zip(asks[span], answered, strict=True)
                    if isinstance(done, Done)
                ]
                broken = next((one for one in answered if isinstance(one, Exception)), None)
                advance(name, program, broken or (received if isinstance(wanted, list) else received[0]))
    finally:  # whatever breaks off, no program is left suspended
        for program in programs.values():
            if isinstance(program, Generator):
                program.close()
    return results


def _asked(party: Party, wanted: Any) -> list[Ask]:
    """The asks of one yield. Two Fits of a list may not both train the head: one of the two would be lost."""
    asks = [party.ask(one) for one in (wanted if isinstance(wanted, list) else [wanted])]
    if sum(isinstance(ask.request, Fit) and ask.request.head for ask in asks) > 1:
        raise RunError(f"{party.name}: only one Fit of a list may train the head; give the others head=False")
    return asks


def drive_one(program: Any, party: Party, executor: Executor) -> Any:
    """The result of a single program; its exception is raised."""
    result = drive({party.name: program}, {party.name: party}, executor)[party.name]
    if isinstance(result, Exception):
        raise result
    return result
