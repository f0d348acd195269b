"""Takes results of `coterie reproduce` into results/, and shows them in README.md and docs/reproductions.md.

Usage: python tools/reproductions.py [FOLDER ...]     # of `coterie reproduce`, such as reproductions/fedpa/table4-small

A page has `<!-- reproduction: fedpa/table4 -->` … `<!-- /reproduction -->` where a result at small scale is to stand,
and `<!-- reproductions -->` … `<!-- /reproductions -->` where all are listed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from coterie.experiments.papers.definition import definition, names
from coterie.experiments.papers.writing import MANY, claims, markdown, tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "reproductions.md")
LARGEST = 50_000
"""Bytes of a result.json that is committed."""
CURVE = r"\[(?:[-+\d.e,\s]|null)+\]"
INNERMOST = r'"(?:paper|axis)": \{[^{}]*\}|"(?:columns|rows|missing)": \[[^\[\]{}]*\]'
CELL = r'\{\s*"\w+": \{\s*"mean": [^{}]*"values": \{[^{}]*\}\s*\}\s*\}'


def take(folder: Path, results: Path = RESULTS) -> Path:
    """Copies a result under its name and scale; ends the program for one that is too large or names a folder."""
    result = shortened(json.loads((folder / "result.json").read_text(encoding="utf-8")))
    stem = results / f"{result['name'].replace('/', '-')}-{result['scale']}"
    for claim in result["claims"]:  # of many comparisons a page has those alone that do not hold
        if len(claim["comparisons"]) > MANY:
            claim["comparisons"] = [told for told in claim["comparisons"] if told.startswith("no:")]
    if "picture" in result:
        result["picture"] = f"{stem.name}.svg"
        for suffix in (".svg", ".png"):
            shutil.copyfile(folder / f"figure{suffix}", stem.with_suffix(suffix))
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    for on_one_line in (CURVE, CELL, INNERMOST):
        text = re.sub(on_one_line, lambda found: " ".join(found.group().split()), text)
    if len(text.encode()) > LARGEST:
        sys.exit(f"{folder}: result.json has more than {LARGEST} bytes")
    if found := re.search(r"(?<![\w.)<])/\w[\w.-]*/[^\"\s]*", text):
        sys.exit(f"{folder}: {found.group()} looks like a place on this machine; compute it without")
    stem.with_suffix(".json").write_text(text, encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    return stem.with_suffix(".json")


def shortened(value: Any) -> Any:
    """The same content with five significant digits of every fraction."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: shortened(inner) for name, inner in value.items()}
    return [shortened(inner) for inner in value] if isinstance(value, list) else value


def filled(page: str, results: Path = RESULTS, depth: str = "") -> str:
    """The page with all its marked places made anew; `depth` leads from it to the project's folder."""

    def one(found: re.Match[str]) -> str:
        return f"{found.group(1)}\n{_shown(found.group(2), results, depth)}\n{found.group(3)}"

    page = re.sub(r"(<!-- reproduction: (\S+) -->)\n.*?(<!-- /reproduction -->)", one, page, flags=re.DOTALL)
    return re.sub(
        r"(<!-- reproductions -->)\n.*?(<!-- /reproductions -->)",
        lambda found: f"{found.group(1)}\n{_listing(results)}\n{found.group(2)}",
        page,
        flags=re.DOTALL,
    )


def _shown(name: str, results: Path, depth: str) -> str:
    place = results / f"{name.replace('/', '-')}-small.json"
    if not place.is_file():
        return f"`coterie reproduce {name} --workers 2` has not been run for this page yet."
    result: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    machine = f"{result['machine']['cores']} cores, {result['machine']['cpu']}"
    head = f"{result['title']} ({result['paper']}), `{result['command']}`, {result['date']}, {machine}:"
    picture = [f"![{result['title']}]({depth}results/{result['picture']})", ""] if "picture" in result else []
    page = f"[What differs from the paper, line by line]({depth}results/{place.stem}.md)."
    return "\n".join([head, "", *tables(result), *picture, *claims(result), "", page])


def _listing(results: Path) -> str:
    lines = ["| name | what it shows | at small scale |", "|---|---|---|"]
    for name in names():
        whole = definition(name)
        minutes = whole.scales["small"].minutes
        there = (results / f"{name.replace('/', '-')}-small.json").is_file()
        time = "time not measured" if minutes is None else f"{minutes:g} min"
        lines.append(f"| `{name}` | {whole.title}: {whole.shows} | {time}{'' if there else ', no result here yet'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    for argument in sys.argv[1:]:
        print(take(Path(argument)))
    for place in PAGES:
        up = "../" * (len(place.relative_to(ROOT).parts) - 1)
        place.write_text(filled(place.read_text(encoding="utf-8"), depth=up), encoding="utf-8")
