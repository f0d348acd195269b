"""Scores of several clients as the figures that stand in a line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.engines.measures import spread
from coterie.protocol import Score

Figures = dict[str, Any]
"""What goes into a line of metrics.jsonl.

On the task's tests: {loss, accuracy, examples, score, metrics: {name: value}}, of several models their plain mean. On
clients' own tests: {accuracy: {id: value}, score: {id: value}} and of the scores mean, worst_50 and worst_25. `score`
is the first of the task's metrics. Where sites hold a set in parts as well (test/<part> beside test), `parts` has the
same of each part, by its name.
"""


@dataclass
class Shown:
    """What sites' models of one kind scored, by client: on own tests, on the pooled one, on further ones by name."""

    own: dict[str, Score] = field(default_factory=dict)
    pooled: dict[str, Score] = field(default_factory=dict)
    more: dict[str, dict[str, Score]] = field(default_factory=dict)
    parts: dict[str, dict[str, Score]] = field(default_factory=dict)

    def figures(self) -> Figures:
        """As in a line of metrics.jsonl, in id order, in which sums are taken too."""
        found: Figures = {"clients": by_client(_in_order(self.own))}
        if self.pooled:
            found["pooled"] = mean_figures(_in_order(self.pooled))
        if self.more:
            found["more"] = {test: mean_figures(_in_order(scores)) for test, scores in sorted(self.more.items())}
        if self.parts:
            found["parts"] = {part: by_client(_in_order(scores)) for part, scores in sorted(self.parts.items())}
        return found

    def of(self, names: Collection[str]) -> Shown:
        """The same of these clients alone."""

        def kept(scores: Mapping[str, Score]) -> dict[str, Score]:
            return {name: score for name, score in scores.items() if name in names}

        def inside(found: Mapping[str, dict[str, Score]]) -> dict[str, dict[str, Score]]:
            return {key: held for key, scores in found.items() if (held := kept(scores))}

        return Shown(kept(self.own), kept(self.pooled), inside(self.more), inside(self.parts))


def joined_scores(parts: Iterable[Mapping[str, Score]]) -> dict[str, Score]:
    """Scores on the parts of a set as those on the whole, by client: figures that are means over examples stay such."""
    by_client: dict[str, list[Score]] = {}
    for scores in parts:
        for name, score in scores.items():
            by_client.setdefault(name, []).append(score)
    return {name: scores[0] if len(scores) == 1 else _weighted(scores) for name, scores in by_client.items()}


def _weighted(scores: Sequence[Score]) -> Score:
    examples = sum(score.examples for score in scores)

    def mean(pick: Callable[[Score], float]) -> float:
        return sum(score.examples * pick(score) for score in scores) / examples

    metrics = {name: mean(lambda score, name=name: score.metrics[name]) for name in scores[0].metrics}  # type: ignore[misc]
    return Score(mean(lambda score: score.loss), mean(lambda score: score.accuracy), examples, metrics)


def _in_order(scores: Mapping[str, Score]) -> dict[str, Score]:
    return dict(sorted(scores.items()))


def mean_figures(scores: Mapping[str, Score]) -> Figures:
    """The plain mean of every figure, of scores on equally many examples."""
    values = list(scores.values())

    def mean(pick: Callable[[Score], float]) -> float:
        return sum(map(pick, values)) / len(values)

    return {
        "loss": mean(lambda score: score.loss),
        "accuracy": mean(lambda score: score.accuracy),
        "examples": values[0].examples,
        "score": mean(lambda score: score.score),
        "metrics": {name: sum(one.metrics[name] for one in values) / len(values) for name in values[0].metrics},
    }


def validation_figures(scores: Mapping[str, Score]) -> Figures | None:
    """The mean of every figure weighted by examples; None without any."""
    values = list(scores.values())
    examples = sum(score.examples for score in values)
    if not examples:
        return None

    def mean(pick: Callable[[Score], float]) -> float:
        return sum(score.examples * pick(score) for score in values) / examples

    return {
        "loss": mean(lambda score: score.loss),
        "accuracy": mean(lambda score: score.accuracy),
        "score": mean(lambda score: score.score),
        "examples": examples,
    }


def by_client(scores: Mapping[str, Score]) -> Figures:
    """Accuracy and score of each client, and of the scores mean, worst_50 and worst_25."""
    judged = {name: score.score for name, score in scores.items()}
    accuracy = {name: score.accuracy for name, score in scores.items()}
    return {"accuracy": accuracy, "score": judged, **(spread(judged) if judged else {})}
