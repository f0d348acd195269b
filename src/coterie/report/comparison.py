"""Comparisons as tables for the terminal and as Markdown: methods are rows, so that there may be many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from coterie.report.numbers import decimal, duration, percent, size

Found = Mapping[str, Any]
"""The content of comparison.json."""

SCORES = {"pooled": "pooled", "own_mean": "own", "own_worst_50": "worst 50 %", "own_worst_25": "worst 25 %"}
"""The headings of the main scores."""

DIFFERENCES = ("pooled", "own_mean", "own_worst_25")
"""Those whose differences are shown; the others stand in comparison.json."""

NONE = "–"

NOTES = (
    "Scores are after the last round, times 100. Pooled: the global model on the pooled test. Own: the model that each "
    "client uses, on that client's own test share; worst 50 % and 25 %: the mean of the lowest half and quarter of "
    "clients. ± is the sample standard deviation over seeds. Differences are taken seed by seed, with the t interval "
    "of their mean; it is not corrected for the number of comparisons. Traffic is of whole messages, set-up included, "
    "evaluation apart. Rounds to a target are counted on what each round measured, of evaluate.pooled_limit examples. "
    "Lost in aggregation: ||deployed − mean of products|| / ||mean of products||, mean over rounds. "
    "Start mismatch: FedPA-LoRA's Eq. 2, mean of both factors and over rounds."
)


@dataclass(frozen=True)
class Section:
    """One table: its title, the headings of its columns, its rows, and what it needs to be understood."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(found: Found) -> list[Table]:
    """The main sections for the terminal; they fit in 100 columns."""
    made = []
    for section in _main(found):
        caption = "\n".join(section.notes) or None
        table = Table(title=section.title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left")
        table.caption_justify = "left"
        names = max((len(row[0]) for row in section.rows), default=0)
        for index, head in enumerate(section.heads):
            # a width, not a least one, by which rich would push the last columns out of a narrow terminal
            table.add_column(head, justify="right" if index else "left", width=None if index else min(names, 30))
        for row in section.rows:
            table.add_row(*map(escape, row))
        made.append(table)
    return made


def markdown(found: Found) -> str:
    """comparison.md: what the terminal shows, and what it took to reach a target."""
    seeds = found["seeds"]
    lines = [f"# {found['rounds']} rounds, seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}", ""]
    lines += [found["sentence"], ""]
    for section in [*_main(found), *([_targets(found)] if found["targets"] else [])]:
        lines += [f"## {section.title}", "", f"| {' | '.join(section.heads)} |"]
        lines += ["|---|" + "---:|" * (len(section.heads) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in section.rows]
        lines += ["", *(part for note in section.notes for part in (note, ""))]
    return "\n".join([*lines, NOTES, ""])


def _main(found: Found) -> list[Section]:
    """Scores; differences, where there are two methods; traffic and aggregation; tuning, if any."""
    made = [_scores(found)]
    if found["paired"]["methods"]:
        made.append(_differences(found))
    made.append(_traffic(found))
    if found.get("tuning"):
        made.append(_tuning(found))
    return made


def times(timing: Mapping[str, Any], found: Found) -> str:
    """A line on the time of each method, the mean over its runs."""
    told = []
    for method, parts in timing["seconds"].items():
        told.append(
            f"{found['methods'][method]['title']} {duration(sum(part['mean'] or 0 for part in parts.values()))}"
        )
    return f"time a run: {', '.join(told)}"


def _scores(found: Found) -> Section:
    counts = {len(method["seeds"]) for method in found["methods"].values()}
    target = _main_target(found)
    heads = ["", *SCORES.values(), "up a client"]
    heads += [] if target is None else [f"rounds to {percent(found['targets'][target]['score'])}"]
    if len(counts) > 1:
        heads.append("seeds")
    rows = []
    for method in found["methods"].values():
        figures = method["figures"]
        row = [method["title"], *(_spread(figures[name], percent) for name in SCORES)]
        row.append(size(figures["up_per_client"]["mean"]))
        row += [] if target is None else [_rounds(method["reached"][target])]
        row += [str(len(method["seeds"]))] if len(counts) > 1 else []
        rows.append(tuple(row))
    rows += _baseline(found, len(heads))
    notes = [_seeds(found, max(counts))]
    if target is not None:
        notes.append(f"rounds until {SCORES[target]} first was at {_target(found, target)}")
    if found.get("missing"):
        notes.append(f"not finished, and left out: {', '.join(found['missing'])}")
    return Section(f"Score: {found['metric']}, × 100", tuple(heads), tuple(rows), tuple(notes))


def _differences(found: Found) -> Section:
    against = found["paired"]["against"]
    rows = []
    for method, differences in found["paired"]["methods"].items():
        counts = [one["n"] for one in differences.values() if one is not None]
        cells = [_difference(differences[name]) for name in DIFFERENCES]
        rows.append((found["methods"][method]["title"], *cells, str(max(counts, default=0))))
    several = any(
        one is not None and one["n"] > 1 for own in found["paired"]["methods"].values() for one in own.values()
    )
    level = f"{100 * found['paired']['level']:.0f} %"
    note = f"mean over seeds, {level} t interval; * where 0 is outside" if several else "one seed: no spread is known"
    title = f"Difference to {found['methods'][against]['title']}, in points"
    return Section(title, ("", *(SCORES[name] for name in DIFFERENCES), "seeds"), tuple(rows), (note,))


def _traffic(found: Found) -> Section:
    """Traffic, and what aggregation lost; columns that nobody has are left out."""
    methods = list(found["methods"].values())
    columns = {
        head: [
            _spread(method["figures"][name], write) if spread else write(method["figures"][name]["mean"])
            for method in methods
        ]
        for head, name, write, spread in (
            ("down a client", "down_per_client", size, False),
            ("all traffic", "total", size, False),
            ("lost", "mismatch", decimal, True),
            ("start mismatch", "init_mismatch", decimal, True),
            ("own, pooled test", "own_pooled", percent, True),
        )
    }
    kept = {head: cells for head, cells in columns.items() if any(cell != NONE for cell in cells)}
    rows = tuple((method["title"], *(cells[i] for cells in kept.values())) for i, method in enumerate(methods))
    note = ("lost: in aggregation, relative, mean over rounds",) if "lost" in kept else ()
    return Section("Traffic and aggregation", ("", *kept), rows, note)


def _targets(found: Found) -> Section:
    """Rounds and bytes up a client until a target was first reached."""
    heads = [f"{what}, {SCORES[name]}" for name in found["targets"] for what in ("rounds", "up a client")]
    rows = tuple(
        (method["title"], *(cell for one in method["reached"].values() for cell in (_rounds(one), _up(one))))
        for method in found["methods"].values()
    )
    notes = tuple(f"{SCORES[name]}: until it first was at {_target(found, name)}" for name in found["targets"])
    several = ("over the seeds that reached it, and how many those are where not all did",)
    return Section("To reach a target", ("", *heads), rows, notes + (several if len(found["seeds"]) > 1 else ()))


def _tuning(found: Found) -> Section:
    """For each method what was chosen, and every score; the methods' titles where a run finished."""
    tuning = found["tuning"]
    rows, edges = [], []
    for method, tried in tuning["methods"].items():
        title = found["methods"][method]["title"] if method in found["methods"] else method
        for one in tried["tried"]:
            chosen = one["settings"] == tried["chosen"]
            settings = ", ".join(f"{name}={value}" for name, value in one["settings"].items()) or NONE
            score = "failed" if one["score"] is None else percent(one["score"])
            rows.append((title, settings, score, decimal(one["loss"]), "chosen" if chosen else ""))
        edges += [f"{title} {name}={tried['chosen'][name]}" for name in tried["at_edge"]]
    notes = [f"{tuning['rule']}; tests were not looked at; seeds {', '.join(map(str, tuning['seeds']))}"]
    if edges:
        notes.append(f"at the edge of what was tried, so that more may be worth trying: {', '.join(edges)}")
    return Section("Tuning, on validation shares", ("", "tried", "score", "loss", ""), tuple(rows), tuple(notes))


def _baseline(found: Found, width: int) -> Iterator[tuple[str, ...]]:
    """The score of always answering the most frequent class, pooled and each client's own."""
    first = next(iter(found["methods"].values()))["figures"]
    if first["majority"]["mean"] is not None or first["majority_own"]["mean"] is not None:
        cells = (percent(first["majority"]["mean"]), percent(first["majority_own"]["mean"]))
        yield ("majority class", *cells, *[""] * (width - 3))


def _main_target(found: Found) -> str | None:
    return next(iter(found["targets"]), None)


def _target(found: Found, name: str) -> str:
    target = found["targets"][name]
    return f"{percent(target['score'])}" + ("" if target["from"] == "given" else f" ({target['from']})")


def _seeds(found: Found, count: int) -> str:
    told = f"{found['rounds']} rounds, seeds {', '.join(map(str, found['seeds']))}"
    if count == 1:
        return f"{told.replace('seeds', 'seed', 1) if len(found['seeds']) == 1 else told}; one seed: no spread is known"
    return f"{told}; mean ± sample standard deviation, n = {count}"


def _spread(figure: Mapping[str, Any], write: Callable[[float | None], str]) -> str:
    return write(figure["mean"]) + ("" if figure["std"] is None else f" ± {write(figure['std'])}")


def _difference(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return NONE
    told = _points(difference["mean"])
    if difference["low"] is None:
        return told
    outside = difference["low"] > 0 or difference["high"] < 0
    return f"{told} [{_points(difference['low'])}, {_points(difference['high'])}]{'*' if outside else ''}"


def _points(share: float) -> str:
    """A difference with its sign; a true minus, and no sign for what rounds to 0."""
    text = f"{100 * share:+.1f}"
    return text[1:] if text.strip("+-0.") == "" else text.replace("-", "−")


def _rounds(reached: Mapping[str, Any] | None) -> str:
    return _when(reached, "rounds", lambda value: f"{value:.0f}" if value == round(value) else f"{value:.1f}")


def _up(reached: Mapping[str, Any] | None) -> str:
    return _when(reached, "up_per_client", size)


def _when(reached: Mapping[str, Any] | None, what: str, write: Callable[[float], str]) -> str:
    """The mean over the seeds that reached a target, and how many those are where not all did."""
    if reached is None:
        return NONE
    if reached["seeds"] == 0:
        return "not reached"
    told = write(reached[what]["mean"])
    return told if reached["seeds"] == reached["of"] else f"{told} ({reached['seeds']} of {reached['of']})"
