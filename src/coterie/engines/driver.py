"""Running programs: plain results pass through, generators are fed the answers to what they ask.

Programs of one round advance together, so that the trainer sees at once what several clients ask and may stack it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coterie.data.sequences import DataSet
from coterie.errors import RunError, nearest
from coterie.maths.keys import Key
from coterie.protocol import (
    Calibrate,
    Evaluate,
    Fit,
    Fitted,
    Gradient,
    Model,
    Predict,
    Request,
    Translate,
    Weights,
    copied,
)
from coterie.training.asks import Ask, Done, Head
from coterie.training.executor import Executor

REQUESTS = (Fit, Evaluate, Predict, Translate, Gradient, Calibrate, Weights)


@dataclass
class Party:
    """A client or the server while its program runs: what its requests resolve to, and what has happened so far.

    Models are kept as copies: what the program does with its own afterwards is no business of measurements.
    `group_heads`: the heads of groups by name: at the server all that the engine keeps, beside `head`, that of all; at
    a client those between which it chooses (`choices`), where heads are averaged. `head` is then that of its last
    choice, and afterwards the one that it trained.
    """

    name: str
    spec: str
    data: Mapping[str, DataSet]
    head: Head | None
    key: Key
    trains_head: bool
    is_server: bool = False
    head_trained: bool = False
    first_initial: Model | None = None
    fits: list[tuple[Fit, Fitted]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    group_heads: dict[str, Head] = field(default_factory=dict)
    choices: tuple[str, ...] = ()

    def ask(self, request: Any) -> Ask:
        """The request with data, head and key filled in; raises RunError for what this party may not ask."""
        if not isinstance(request, REQUESTS):
            raise RunError(f"{self.name}: a program may yield requests or lists of them, not {type(request).__name__}")
        if isinstance(request, Weights):
            if not self.is_server:
                raise RunError(f"{self.name}: only the server may ask for base weights")
            return Ask(self.name, request, request.spec or self.spec, self.head, None, self._key(request))
        if isinstance(request, Translate):
            return self._translation(request)
        if request.data not in self.data:
            raise RunError(f"{self.name} has no data set {request.data!r}{nearest(request.data, self.data)}")
        key = self._key(request)
        head = self.head
        if isinstance(request, Evaluate) and request.group is not None:
            head = self._head_of(request.group)
        if isinstance(request, Fit):
            head = self._head_of(head_group(request))
            if self.first_initial is None:
                self.first_initial = copied(request.initial)
            if not self.trains_head or head is None:
                request = replace(request, head=False)
        model = request.initial if isinstance(request, Fit) else request.model
        return Ask(self.name, request, model.spec or self.spec, head, self.data[request.data], key)

    def _translation(self, request: Translate) -> Ask:
        """Both tokenisations of the examples; one that is the party's own stands for both."""
        names = request.data, request.data if request.source == self.spec else f"{request.data}/{request.source}"
        for name in names:
            if name not in self.data:
                raise RunError(f"{self.name} has no data set {name!r}{nearest(name, self.data)}")
        own, other = (self.data[name] for name in names)
        return Ask(self.name, request, self.spec, self.head, own, self._key(request), other)

    def receive(self, request: Request, done: Done) -> Any:
        """Books an answer and returns what the program is to see."""
        if isinstance(request, Fit):
            assert isinstance(done.answer, Fitted)
            self.fits.append((request, replace(done.answer, model=copied(done.answer.model))))
            if request.head and self.trains_head:
                self.head_trained = True
                if head_group(request) == "all" or not self.is_server:
                    self.head = done.head
                elif done.head is not None:
                    self.group_heads[head_group(request)] = done.head
        return done.answer

    def _head_of(self, group: str) -> Head | None:
        """The head of a group; one without a head of its own begins with the head of all."""
        if group != "all" and not self.is_server and group not in self.choices:
            raise RunError(
                f"{self.name}: only the server's Fit may name a head group, not {group!r}; use head=True, or give the "
                "method head_choices"
            )
        return self.group_heads.get(group, self.head)

    def _key(self, request: Request) -> Key:
        """The k-th request of its class has its own stream, so another Evaluate never moves a batch."""
        kind = type(request).__name__
        if isinstance(request, Gradient | Evaluate) and request.batch == "first":
            return self.key.fold("Fit", self.counts["Fit"])
        key = self.key.fold(kind, self.counts[kind])
        self.counts[kind] += 1
        return key


def head_group(request: Fit) -> str:
    """The group whose head a Fit uses: "all" unless it names one."""
    return request.head if isinstance(request.head, str) else "all"


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
    """The asks of one yield. Two Fits of a list may not both train one head: one of the two would be lost."""
    asks = [party.ask(one) for one in (wanted if isinstance(wanted, list) else [wanted])]
    trained = [head_group(ask.request) for ask in asks if isinstance(ask.request, Fit) and ask.request.head]
    if len(set(trained)) < len(trained):
        raise RunError(f"{party.name}: only one Fit of a list may train the head; give the others head=False")
    return asks


def drive_one(program: Any, party: Party, executor: Executor) -> Any:
    """The result of a single program; its exception is raised."""
    result = drive({party.name: program}, {party.name: party}, executor)[party.name]
    if isinstance(result, Exception):
        raise result
    return result
