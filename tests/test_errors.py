"""What an error message suggests."""

import pytest

from coterie.errors import nearest

METHODS = ["feddpa-t", "fedit", "fedpa-factors", "fedpa-lora"]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("fedpa", "fedpa-lora"), ("fedpa-f", "fedpa-factors"), ("fedti", "fedit"), ("feddpa", "feddpa-t")],
)
def test_the_beginning_of_a_name_means_the_shortest_such_and_else_the_most_alike(wrong: str, meant: str) -> None:
    assert nearest(wrong, METHODS) == f"; did you mean {meant!r}?"


def test_nothing_alike_lists_all_when_they_are_few() -> None:
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
    assert nearest("zzz", [f"name{number}" for number in range(20)]) == ""
