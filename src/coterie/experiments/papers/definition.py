"""What one table or figure of a paper is, as data, and how it is found inside the package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from coterie.errors import ConfigError, nearest
from coterie.experiments.config import Section, merged

Mean = tuple[float | None, float | None]
"""A reported mean (None: its table has one that is not at hand) and its deviation over seeds, None where it gives none.
"""

PACKAGE = "coterie.experiments.papers"
COMMON = "common"


class Column(Section):
    """One condition, such as a Dirichlet concentration; `config` is laid over the scale's."""

    title: str
    config: dict[str, Any] = Field(default_factory=dict)


class Row(Section):
    """One line: a method under a variant of the settings, and what the paper reports by column.

    model: which of a run's models it is about, as a place in summary.json such as global/further/weak or
    personal/bases/ratio-0.4; by default the deployed one.
    extra: the paper has no such line. operation: of a table of server times, in place of a method. panel: of a page of
    computed theory, the one that it belongs to.
    """

    title: str
    method: str | None = None
    variant: str = ""
    model: str = ""
    operation: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, Mean] = Field(default_factory=dict)
    extra: bool = False
    note: str = ""
    panel: str = ""


class Axis(Section):
    """How a panel is drawn: its title there, what x and y are, their scales, and the rows that are lines.

    x is the column's `config: {x: ...}`.
    """

    title: str
    x: str
    y: str
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    rows: list[str]


class Panel(Section):
    """One table of a page of computed theory: the columns that its rows have; axis: None where it is not drawn."""

    title: str
    columns: list[str]
    axis: Axis | None = None


Sense = Literal["less", "greater", "near", "at-least", "wider", "gains", "zero", "below", "above"]


class Claim(Section):
    """A statement of the paper about its rows, judged by the means of `figure` in each of `columns` (default: all).

    sense: each of `first` is less or greater than each of `second`; near it (at most `within` apart); at-least it, less
    `within`; wider: further from it than in the column that `than` names, on either side; gains: further above it, or
    less below; or alone zero, below or above `within`.
    than: by column the other one in which `second` is read, by default the same row as `first`.
    untested: why it is not judged at all, in place of all these.
    """

    says: str
    where: str
    figure: str = ""
    first: list[str] = Field(default_factory=list)
    second: list[str] = Field(default_factory=list)
    columns: list[str] = Field(default_factory=list)
    than: dict[str, str] = Field(default_factory=dict)
    sense: Sense = "greater"
    within: float = 0.0
    untested: str = ""


class Scale(Section):
    """How large it is computed: settings for all runs, and what a column changes in them. minutes: measured on two
    cores; None where it was never run.

    only: the columns that it has, by default all; of others the paper's figures are shown alone. left_out: rows that
    are not computed. cells: what "column/variant" changes last of all.
    """

    about: str
    seeds: list[int] = Field(default_factory=lambda: [0])
    minutes: float | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, dict[str, Any]] = Field(default_factory=dict)
    cells: dict[str, dict[str, Any]] = Field(default_factory=dict)
    only: list[str] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)


class Definition(Section):
    """A table or figure.

    figures: which measured figures are shown, the first beside the paper's. setting: the paper's set-up by aspect, in
    the words of `result.here`, None where the paper does not say. layer: the layer that a figure shows, as a shell
    pattern. models: of a table of server times. against: the row from which the others' differences are told, seed by
    seed; what the paper reports of those are differences too. panels: the tables of a page of computed theory.
    mixtures: the row whose estimates of clients' mixtures are drawn, a panel for each column. drawn: of a table, the
    figures that are drawn over rounds beside it, of the rows that have them.
    """

    title: str
    paper: str
    shows: str
    kind: Literal["runs", "curves", "server", "theory", "geometry"] = "runs"
    figures: list[str]
    setting: dict[str, str | None] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    columns: dict[str, Column]
    rows: dict[str, Row]
    claims: list[Claim] = Field(default_factory=list)
    scales: dict[Annotated[str, Field(pattern="^(small|paper)$")], Scale]
    notes: list[str] = Field(default_factory=list)
    layer: str = ""
    against: str = ""
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    drawn: list[str] = Field(default_factory=list)
    panels: dict[str, Panel] = Field(default_factory=dict)
    mixtures: str = ""


def at_scale(whole: Definition, scale: Scale) -> Definition:
    """The definition with the columns of this scale alone; a claim that has none of its columns left is untested."""
    columns = {name: column for name, column in whole.columns.items() if not scale.only or name in scale.only}
    return whole.model_copy(
        update={"columns": columns, "claims": [_claim_in(claim, whole, columns) for claim in whole.claims]}
    )


def _claim_in(claim: Claim, whole: Definition, columns: Mapping[str, Column]) -> Claim:
    than = {column: other for column, other in claim.than.items() if column in columns and other in columns}
    kept = [column for column in claim.columns or (claim.than or whole.columns) if column in columns]
    if claim.than:
        kept = [column for column in kept if column in than]
    untested = claim.untested
    if not kept and not untested:
        named = ", ".join(whole.columns[column].title for column in claim.columns or claim.than)
        untested = f"it is about {named}, which this scale has not"
    return claim.model_copy(update={"columns": kept, "than": than, "untested": untested})


def names() -> list[str]:
    """Every reproduction, such as fedpa/table2, in order."""
    found = []
    for folder in files(PACKAGE).iterdir():
        if folder.is_dir() and not folder.name.startswith("_"):
            stems = (place.name.removesuffix(".yaml") for place in folder.iterdir() if place.name.endswith(".yaml"))
            found += [f"{folder.name}/{stem}" for stem in stems if stem != COMMON]
    return sorted(found)


@cache
def definition(name: str) -> Definition:
    """The definition of that name; what `common: true` says in it comes from common.yaml beside it.

    Raises:
        ConfigError: no such reproduction, or a file of the package that is not sound.
    """
    if name not in names():
        raise ConfigError(f"there is no reproduction {name!r}{nearest(name, names())} (coterie reproduce lists them)")
    folder = files(PACKAGE).joinpath(name.split("/")[0])
    raw = _mapping(folder.joinpath(f"{name.split('/')[1]}.yaml").read_text(encoding="utf-8"))
    if raw.pop(COMMON, False):
        raw = merged(_mapping(folder.joinpath(f"{COMMON}.yaml").read_text(encoding="utf-8")), raw)
    try:
        return Definition.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _mapping(text: str) -> dict[str, Any]:
    read = yaml.safe_load(text)
    assert isinstance(read, dict)
    return read
