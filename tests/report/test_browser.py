"""The page as a browser shows it: at the width of a telephone and of a desk, in light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.report.writing import write_report

pytest.importorskip("matplotlib", reason="matplotlib is not installed: it draws the figures")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it looks at pages")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

CONTRASTS = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 * 255 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const ground = node => {
    for (let one = node; one; one = one.parentElement) {
      const found = channels(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0.99) return found;
    }
    return [255, 255, 255];
  };
  const told = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    const text = walk.currentNode.data.trim();
    if (!text || "■●▲◆▼✚✖★".includes(text) || !node.checkVisibility() || node.tagName === "title") continue;
    const style = getComputedStyle(node);
    const fore = channels(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    if (node.namespaceURI.endsWith("svg") && fore.every((v, place) => place > 2 || v === 0)) continue;
    const [high, low] = [luminance(fore), luminance(ground(node))].sort((a, b) => b - a);
    told.push([(high + 0.05) / (low + 0.05), text.slice(0, 40)]);
  }
  return told.sort((a, b) => a[0] - b[0]);
}"""

NAMES = """() => [...document.querySelectorAll("figure")].map(figure => {
  const shown = [...figure.querySelectorAll("svg")].filter(svg => svg.checkVisibility());
  const title = document.getElementById(figure.getAttribute("aria-labelledby"));
  return [title && title.textContent.trim(), shown.length, shown.map(svg => svg.getAttribute("aria-label") || "")];
})"""

OUTSIDE = """() => [...document.querySelectorAll("svg.chart")].filter(svg => svg.checkVisibility()).flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 2 || box.right > frame.right + 2;
  }).map(text => text.textContent);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium of this machine, without a window."""
    place = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if place is None:
        pytest.skip(f"there is no browser here to look at pages with: none of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=place, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(real: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one run and one of a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        "one": write_report([real / "fedpa-lora-seed0"], folder / "one.html")[0],
        "comparison": write_report([real], folder / "comparison.html")[0],
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("which", ["one", "comparison"])
def test_a_page_fits_is_readable_and_asks_for_nothing(
    browser: Any, pages: dict[str, Path], which: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    view.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    view.on("pageerror", lambda error: said.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    view.goto(pages[which].as_uri())
    assert asked == [pages[which].as_uri()] and not said

    for unfolded in (False, True):
        if unfolded:
            view.evaluate("() => document.querySelectorAll('details').forEach(one => { one.open = true })")
        assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        lowest = view.evaluate(CONTRASTS)[0]
        assert lowest[0] >= 4.5, lowest

    figures = view.evaluate(NAMES)
    assert len(figures) > 8
    for title, shown, names in figures:
        assert title and shown == 1 and all(len(name) > 20 for name in names), (title, shown, names)
    assert view.evaluate(OUTSIDE) == []
    dark = view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 24)"
    assert dark == (scheme == "dark")
    context.close()


def test_letters_of_figures_keep_their_size_on_a_telephone(browser: Any, pages: dict[str, Path]) -> None:
    view = browser.new_page(viewport={"width": 390, "height": 900})
    view.goto(pages["comparison"].as_uri())
    scales = view.evaluate(
        """() => [...document.querySelectorAll("svg.chart")].filter(svg => svg.checkVisibility())
             .map(svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)"""
    )
    assert scales and all(0.9 <= scale <= 1.25 for scale in scales)
    view.close()


def test_a_click_selects_a_whole_command_and_boxes_scroll_with_the_keyboard(
    browser: Any, pages: dict[str, Path]
) -> None:
    view = browser.new_page(viewport={"width": 390, "height": 900})
    view.goto(pages["comparison"].as_uri())
    command = view.locator("pre.copy").first
    command.click()
    assert view.evaluate("getSelection().toString().trim()") == command.inner_text().strip()
    box = view.locator(".scroll.main")
    box.focus()
    view.keyboard.press("ArrowRight")
    for _ in range(100):  # the page forbids the evaluation that waiting for a condition would need
        if view.evaluate("document.querySelector('.scroll.main').scrollLeft") > 0:
            break
        view.wait_for_timeout(20)
    assert view.evaluate("document.querySelector('.scroll.main').scrollLeft") > 0
    assert view.evaluate("document.documentElement.scrollLeft") == 0
    view.close()
