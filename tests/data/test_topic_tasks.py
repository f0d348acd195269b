"""TREC and Banking77 from generated files in their public layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coterie.data.tasks import load_task
from coterie.errors import DataError
from coterie.maths.keys import root_key

KEY = root_key(0)


def test_trec_of_its_authors_and_trec_by_digits_are_the_same_task(tmp_path: Path) -> None:
    layouts = {
        "authors": {
            "train_5500.label": b"NUM:count How many ?\nHUM:ind Who is Ren\xe9 ?\n",
            "TREC_10.label": b"LOC:city Where ?\n",
        },
        "digits": {
            "TREC.train.all": b"5 How many ?\n3 Who is Ren\xe9 ?\n",
            "TREC.test.all": b"4 Where ?\n",
        },
    }
    for layout, files in layouts.items():
        folder = tmp_path / layout
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        task = load_task("trec", seed_key=KEY, path=str(folder))
        assert task.train.texts == ("How many ?", "Who is René ?") and task.train.labels.tolist() == [5, 3]
        assert task.label_names == ("description", "entity", "abbreviation", "human", "location", "number")
        assert task.test.labels.tolist() == [4] and task.notes == ()


def test_trec_names_the_line_of_an_unknown_class(tmp_path: Path) -> None:
    (tmp_path / "TREC.train.all").write_bytes(b"5 How ?\n7 Who ?\n")
    (tmp_path / "TREC.test.all").write_bytes(b"4 Where ?\n")
    with pytest.raises(DataError, match=r"TREC\.train\.all, line 2: the label '7' does not occur in TREC"):
        load_task("trec", seed_key=KEY, path=str(tmp_path))


def test_banking77_numbers_its_classes_over_both_files(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('text,category\n"Where, is my card?",lost\nTop up?,top_up\n')
    (tmp_path / "test.csv").write_text("text,category\nWhy a fee?,fee\nCard gone,lost\n")
    task = load_task("banking77", seed_key=KEY, path=str(tmp_path))
    assert task.label_names == ("fee", "lost", "top_up")
    assert task.train.texts[0] == "Where, is my card?" and task.train.labels.tolist() == [1, 2]
    assert task.test.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"neither train\.csv nor test\.csv is there"):
        load_task("banking77", seed_key=KEY, path=str(tmp_path.parent))


@pytest.mark.data
def test_the_real_trec_has_its_known_test_set(data_dir: Path) -> None:
    if not (data_dir / "trec").is_dir():
        pytest.skip("COTERIE_DATA holds no 'trec'")
    task = load_task("trec", seed_key=KEY)
    assert len(task.train) == 5_442 and np.bincount(task.test.labels).tolist() == [138, 94, 9, 65, 81, 113]


@pytest.mark.data
def test_the_real_banking77_has_77_classes_of_40_test_requests(data_dir: Path) -> None:
    if not (data_dir / "banking77").is_dir():
        pytest.skip("COTERIE_DATA holds no 'banking77'")
    task = load_task("banking77", seed_key=KEY)
    assert len(task.train) == 9_997 and np.bincount(task.test.labels).tolist() == [40] * 77
