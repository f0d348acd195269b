"""Numbers as people read them."""

from __future__ import annotations


def percent(share: float | None) -> str:
    """A share of one as a percentage with one decimal; an en dash for None."""
    return "–" if share is None else f"{100 * share:.1f}"


def decimal(value: float | None, digits: int = 3) -> str:
    """A number with fixed decimals; an en dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def figure(value: float | None) -> str:
    """A number of any magnitude in at most about eight letters; an en dash for None."""
    if value is None:
        return "–"
    magnitude = abs(value)
    if magnitude >= 1e6 or 0 < magnitude < 5e-4:
        return f"{value:.1e}"
    return f"{value:.3f}" if magnitude < 10 else f"{value:.1f}" if magnitude < 1000 else f"{value:,.0f}"


def size(count: float | None) -> str:
    """Bytes in decimal units (1 kB = 1000 B)."""
    if count is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 07 s or 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
