"""Answers requests: stacks what stacks, evaluates, predicts, differentiates, calibrates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from coterie.data.sequences import DataSet
from coterie.errors import DataError, ModelError, nearest
from coterie.models.loading import Base
from coterie.protocol import Answer, BaseLog, Calibrate, Evaluate, Fit, Gradient, Predict, Weights
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.evaluation import calibrate, evaluate, first_batch, gradient, predict
from coterie.training.fit import fit


class Executor:
    """Owns the base models of one process and answers asks on them, within one plan.

    The bases are cast, moved and given their attention as the plan says, and torch's thread count is pinned.
    Results depend on the asks and the plan alone, never on torch's global generator.
    """

    def __init__(self, bases: Mapping[str, Base], settings: TrainSettings, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        self.bases = dict(bases)
        self.settings = settings
        self.plan = plan
        for base in self.bases.values():
            base.prepare(plan.dtype, plan.attention, plan.device)

    def set_base(self, log: BaseLog, spec: str) -> None:
        """Bring a base to the version of `log`.

        Raises:
            ModelError: an unknown spec, or a patch that does not fit.
        """
        self._base(spec).set_log(log)

    def answer(self, asks: Sequence[Ask]) -> list[Done | Exception]:
        """One answer for each ask, in order; an ask that cannot be answered gets its exception as the answer."""
        answers: list[Done | Exception | None] = [None] * len(asks)
        groups: dict[Hashable, list[int]] = {}
        for number, ask in enumerate(asks):
            if isinstance(ask.request, Fit):
                try:
                    groups.setdefault(stack_signature(ask, ask.request), []).append(number)
                except Exception as error:  # a malformed request is its own client's failure
                    answers[number] = error
            else:
                answers[number] = self._guarded(ask)
        size = max(1, self.plan.clients_per_step)
        for numbers in groups.values():
            for start in range(0, len(numbers), size):
                part = numbers[start : start + size]
                for number, answer in zip(part, self._fit([asks[i] for i in part]), strict=True):
                    answers[number] = answer
        return [answer for answer in answers if answer is not None]

    def _fit(self, asks: list[Ask]) -> list[Done | Exception]:
        request = asks[0].request
        assert isinstance(request, Fit)
        try:
            return fit(self._base(request.initial.spec or asks[0].spec), asks, self.settings, self.plan)
        except Exception as error:
            if len(asks) == 1:
                return [error]
            # One client's request broke the pass of all: each alone, so that only the culprit fails.
            return [answer for ask in asks for answer in self._fit([ask])]

    def _guarded(self, ask: Ask) -> Done | Exception:
        try:
            return Done(self._single(ask), None if ask.head is None else dict(ask.head))
        except Exception as error:
            return error

    def _single(self, ask: Ask) -> Answer:
        request, size = ask.request, self.plan.eval_batch_size
        if isinstance(request, Weights):
            base = self._base(request.spec or ask.spec)
            return {name: base.weight(name) for name in request.names}
        assert not isinstance(request, Fit)
        base = self._base(request.model.spec or ask.spec)
        data = _data(ask)
        if isinstance(request, Evaluate):
            chosen = data if request.batch == "all" else first_batch(data, self.settings, ask.key)
            taken = chosen if request.limit is None else chosen.select(range(min(request.limit, len(chosen))))
            return evaluate(base, request.model, ask.head, taken, size, request.judged_by)
        if isinstance(request, Predict):
            if request.sample is not None and request.sample < len(data):
                data = data.select(ask.key.choice(len(data), request.sample))
            return predict(base, request.model, ask.head, data, size, request.top_k, request.features)
        if isinstance(request, Gradient):
            if request.examples is not None and request.examples < len(data):
                data = data.select(ask.key.choice(len(data), request.examples))
            return gradient(
                base, request.model, ask.head, data, request.wrt, request.batch, self.settings, size, ask.key
            )
        assert isinstance(request, Calibrate)
        return calibrate(base, request.model, ask.head, data, size)

    def _base(self, spec: str) -> Base:
        if spec not in self.bases:
            raise ModelError(f"there is no base model {spec!r}{nearest(spec, self.bases)}")
        return self.bases[spec]


def stack_signature(ask: Ask, request: Fit) -> Hashable:
    """What must be equal for two Fits to train in one stack."""
    return (
        request.initial.spec or ask.spec,
        request.initial.signature,
        type(request.loss),
        tuple((type(penalty), penalty.signature) for penalty in request.penalties),
        None if ask.head is None else tuple((name, tuple(value.shape)) for name, value in ask.head.items()),
    )


def _data(ask: Ask) -> DataSet:
    if ask.data is None or len(ask.data) == 0:
        raise DataError(f"{ask.party}: {type(ask.request).__name__} needs examples, and its data set has none")
    return ask.data
