"""Colours can be read on both grounds and told apart by all common kinds of colour vision."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from coterie.report.colours import DARK, LIGHT, STAND_INS, rank_roles, style_rules, with_variables

# Full dichromacy, on linear RGB: Machado, Oliveira, Fernandes 2009.
VISION = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1."""
    low, high = sorted(float(linear(colour) @ TO_XYZ[1]) + 0.05 for colour in (one, other))
    return high / low


def lab(rgb: np.ndarray) -> np.ndarray:
    relative = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def of(scheme: dict[str, str], prefix: str) -> list[str]:
    return [colour for role, colour in scheme.items() if re.fullmatch(rf"{prefix}\d", role)]


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_series_have_the_contrast_of_text_and_all_else_that_of_graphics(scheme: dict[str, str]) -> None:
    for role in ("ink", "muted", "bad", "warn", *(f"s{place}" for place in range(8))):
        assert contrast(scheme[role], scheme["ground"]) >= 4.5, role
    for prefix in "rpk":
        assert all(contrast(colour, scheme["ground"]) >= 3 for colour in of(scheme, prefix)), prefix
    assert all(contrast("#000000", colour) >= 4.5 for colour in of(scheme, "k"))
    assert contrast(scheme["ink"], scheme["panel"]) >= 4.5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_series_are_told_apart(scheme: dict[str, str], vision: str) -> None:
    seen = [lab(VISION[vision] @ linear(colour)) for colour in of(scheme, "s")]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) >= 10


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_higher_ranks_stand_out_more(scheme: dict[str, str]) -> None:
    contrasts = [contrast(colour, scheme["ground"]) for colour in of(scheme, "r")]
    assert contrasts == sorted(contrasts)


def test_every_role_has_a_colour_in_both_schemes_and_a_stand_in_of_its_own() -> None:
    assert set(LIGHT) == set(DARK) == set(STAND_INS) and len(set(STAND_INS.values())) == len(STAND_INS)
    assert not set(STAND_INS.values()) & {*LIGHT.values(), *DARK.values()}
    rules = style_rules()
    assert all(rules.count(f"--{role}:") == 2 for role in LIGHT)
    assert with_variables(" ".join(STAND_INS.values())) == " ".join(f"var(--{role})" for role in LIGHT)


def test_ranks_take_colours_in_their_order() -> None:
    assert rank_roles([8]) == {8: "r2"}
    assert rank_roles([4, 2, 16, 4]) == {2: "r0", 4: "r2", 16: "r4"}
    many = rank_roles(range(1, 20))
    assert [many[1], many[19]] == ["r0", "r4"] and list(many.values()) == sorted(many.values())
