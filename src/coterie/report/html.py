"""HTML from text: whatever is not marked as HTML is escaped."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


EMPTY = ("meta", "link", "br", "hr")


def element(name: str, /, *content: str | None, **attributes: str | bool | None) -> Html:
    """<name attributes>content</name>. Content that is no Html is escaped, None is left out; of an attribute's name
    a last underscore is dropped and others become hyphens, True is an attribute without value, False or None none."""
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if one is True else f'="{escape(one, quote=True)}"')
        for key, one in attributes.items()
        if isinstance(one, str) or one is True
    )
    if name in EMPTY:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(*content)}</{name}>")


def joined(*content: str | None) -> Html:
    """One after another."""
    return Html(
        "".join(one if isinstance(one, Html) else escape(one, quote=False) for one in content if one is not None)
    )
