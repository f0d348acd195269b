"""coterie report: a page about runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of a comparison.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page; by default report.html in the folder named, of several here."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="A folder for the figures too, each as SVG and PNG.")
    ] = None,
) -> None:
    """Make one page of runs: what came out, for whom, at what cost, and how to play it again.

    The page is a single HTML file that loads nothing from elsewhere. Runs that differ in their seed alone are drawn as
    one, with a band. A run that is not finished is reported as far as it has come. Needs matplotlib (the extra
    `report`).
    """
    from coterie.report.writing import write_report

    page, files = write_report(runs, out, figures)
    print(page)
    if files:
        print(f"{figures}: {len(files) // 2} figures, each as SVG and PNG")


def page_after(folder: Path) -> None:
    """Writes the page of a run or comparison that has just ended, where matplotlib is there.

    That it cannot be written is a note, no failure. A worker of a comparison writes none: the comparison's own page
    shows all of its runs.
    """
    from coterie.report.drawing import available

    started = getattr(sys.modules.get("__main__"), "__spec__", None)
    if not available() or (started is not None and started.name == "coterie.cli.worker"):
        return
    from coterie.report.writing import write_report

    try:
        page, _ = write_report([folder])
    except Exception as error:  # the run itself is done, and what it left must not be called into question
        reason = " ".join(str(error).split())
        print(f"coterie: note: no page of it ({reason}); to try again: coterie report {folder}", file=sys.stderr)
    else:
        print(f"{page}: what came out, as a page")
