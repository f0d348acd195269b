"""The page: one HTML file that needs nothing else, from the runs that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files as resources
from pathlib import Path

from coterie.report import rerun, words
from coterie.report.colours import style_rules
from coterie.report.drawing import Picture, Table, inline
from coterie.report.groups import Group
from coterie.report.html import Html, element, joined
from coterie.report.pictures import sections_of
from coterie.report.reading import Found, Run, at, mapping, texts
from coterie.report.results import results, table

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""No script, no font, no picture, no request: the page itself says so to the browser."""

GENERATOR = "coterie report"


def page(found: Found, groups: Sequence[Group], places: Sequence[Path], notes: Sequence[str]) -> str:
    """The whole page. places: as the user named them; notes: what was left out or could not be read."""
    title = words.title_of(groups)
    chapters = [
        ("Results", None, results(groups, found.comparison)),
        *((heading, intro, _figures(pictures)) for heading, intro, pictures in sections_of(groups)),
        ("Play it again", None, _again(groups, places)),
        ("Settings", None, _settings(groups)),
    ]
    links, sections = [], []
    for heading, intro, content in chapters:
        name = heading.lower().replace(" ", "-")
        if heading != "Results":
            links.append(element("a", heading, href=f"#{name}"))
        hidden = heading == "Results"
        sections.append(
            element(
                "section",
                None if hidden else element("h2", heading, id=f"{name}-title"),
                element("p", intro, class_="muted") if intro else None,
                content,
                id=name,
                **({"aria_label": heading} if hidden else {"aria_labelledby": f"{name}-title"}),
            )
        )
    header = element(
        "header",
        element("p", "coterie report", class_="kicker"),
        element("h1", _unbroken(title)),
        element("p", " · ".join(words.facts_of(groups)), class_="facts"),
        *(element("p", _unbroken(text), class_="lead") for text in words.lead(groups) if text),
        _warning([*notes, *words.notes_on(groups), *(gap for run in _runs(groups) for gap in run.gaps)]),
        element("nav", *links, aria_label="Sections"),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} · coterie"),
        element("style", Html(style_rules() + (resources("coterie.report") / "page.css").read_text(encoding="utf-8"))),
    )
    body = element("body", header, element("main", *sections), _footer(groups))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _unbroken(text: str) -> Html:
    """The text with words like FedPA-LoRA kept on one line."""
    words = (element("span", word, class_="whole") if "-" in word else Html(escape(word)) for word in text.split(" "))
    return Html(" ".join(words))


def _runs(groups: Sequence[Group]) -> list[Run]:
    return [run for group in groups for run in group.runs]


def _warning(notes: Sequence[str]) -> Html | None:
    told = list(dict.fromkeys(notes))
    return element("div", *(element("p", note) for note in told), class_="warning", role="note") if told else None


def _figures(pictures: Sequence[Picture]) -> Html:
    return element("div", *(_figure(picture) for picture in pictures), class_="figures")


def _figure(picture: Picture) -> Html:
    name = f"figure-{picture.name}"
    return element(
        "figure",
        element("h3", picture.title, id=name),
        element("p", picture.unit, class_="unit"),
        Html(inline(picture)),
        element(
            "figcaption",
            element("p", picture.note) if picture.note else None,
            element("details", element("summary", "Numbers"), table(picture.table, picture.title)),
        ),
        class_="two" if picture.wide else None,
        aria_labelledby=name,
    )


def _again(groups: Sequence[Group], places: Sequence[Path]) -> Html:
    """Commands, each of which a click selects."""
    content: list[Html | None] = []
    whole = rerun.comparison_of(groups)
    if whole is not None:
        config, command = whole
        file = f"{config.get('name', 'comparison')}.yaml"
        content += [
            _command(f"All of it: save the settings below as {file}, then", command),
            _folded(f"{file}", element("pre", rerun.written(config), class_="copy", tabindex="0")),
        ]
    commands = rerun.commands(groups)
    shown = [_command(what, command) for what, command in commands]
    content.append(_folded("Single runs", *shown) if len(shown) > 3 else joined(*shown))
    content.append(_command("This page", rerun.report_command(places)))
    return joined(element("p", "A click selects a whole command.", class_="muted"), *content)


def _command(what: str, command: str) -> Html:
    return element("div", element("p", what), element("pre", command, class_="copy", tabindex="0"), class_="command")


def _folded(name: str, *content: Html) -> Html:
    return element("details", element("summary", name), *content, style="margin-bottom:18px")


def _settings(groups: Sequence[Group]) -> Html:
    """Environment, what differs between groups, and every group's whole configuration, folded."""
    content: list[Html] = [element("h4", "Environment"), _environment(_runs(groups))]
    if len(groups) > 1:
        differing = words.differing(groups)
        keys = [key for key in differing if key != "method"]
        rows = [[group.label, *(differing[key][place] for key in keys)] for place, group in enumerate(groups)]
        if keys:
            content += [
                element("h4", "What differs beside the method"),
                table(Table(["", *keys], rows), "Differing settings", "words"),
            ]
    if rerun.comparison_of(groups) is None:
        content.append(element("h4", "Whole configuration"))
    for group in groups if rerun.comparison_of(groups) is None else ():
        run = group.runs[0]
        name = group.label if len(groups) > 1 else run.folder.name
        content.append(_folded(name, element("pre", rerun.configuration(run), tabindex="0")))
    runs = _runs(groups)
    told = [str(source) for run in runs if (source := at(run.summary, "task", "source"))]
    told += [note for run in runs for note in texts(at(run.summary, "task", "notes"))]
    if told:
        content.append(element("h4", "Data"))
        content += [element("p", text, class_="small") for text in dict.fromkeys(told)]
    return joined(*content)


def _environment(runs: Sequence[Run]) -> Html:
    """Versions and execution plan, each value once."""
    rows: dict[str, dict[str, None]] = {}
    for run in runs:
        for part in ("versions", "plan"):
            for key, one in mapping(run.recorded.get(part)).items():
                rows.setdefault(key.replace("_", " "), {})[str(one)] = None
    if not rows:
        return element("p", "Nothing was recorded.")
    pairs = [element("div", element("dt", key), element("dd", ", ".join(told))) for key, told in rows.items()]
    return element("dl", *pairs, class_="pairs")


def _footer(groups: Sequence[Group]) -> Html:
    version = next((str(v) for run in _runs(groups) if (v := at(run.recorded, "versions", "coterie"))), "")
    told = f" {version}" if version and version != "unknown" else ""
    return element(
        "footer",
        element(
            "p", f"Made by coterie report from records of coterie{told}; nothing in this page is loaded from elsewhere."
        ),
    )
