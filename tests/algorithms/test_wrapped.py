"""A wrapper hands every call of the contract on, and programs pass through whole."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from coterie.algorithms import Algorithm, FedIT
from coterie.algorithms.wrapped import Wrapped, requests_through, result_through


@pytest.mark.parametrize("name", sorted(n for n, v in vars(Algorithm).items() if callable(v) and not n.startswith("_")))
def test_every_call_of_the_contract_reaches_the_inner_method(name: str) -> None:
    class Recording(FedIT):
        pass

    calls: list[tuple[Any, ...]] = []
    setattr(Recording, name, lambda self, *given: calls.append(given) or "answer")  # type: ignore[func-returns-value]
    code = getattr(Algorithm, name).__code__
    given = code.co_varnames[1 : code.co_argcount]
    answer = getattr(Wrapped(Recording()), name)(*given)
    if name == "in_federation":  # the inner method's answer is wrapped again
        assert isinstance(answer, Wrapped) and answer.inner == "answer"
    elif name != "check":
        assert answer == "answer"
    assert calls == [given]


def test_traits_are_the_inner_methods() -> None:
    assert Wrapped(FedIT()).traits is FedIT.traits


def asking() -> Generator[Any, Any, str]:
    first = yield 1
    try:
        second = yield [2, 3]
    except ValueError as error:
        second = str(error)
    return f"{first} {second}"


def test_requests_are_changed_one_by_one_and_answers_errors_and_the_result_come_through() -> None:
    program = requests_through(asking(), lambda request: request * 10)
    assert next(program) == 10
    assert program.send("a") == [20, 30]
    with pytest.raises(StopIteration) as stopped:
        program.throw(ValueError("broke off"))
    assert stopped.value.value == "a broke off"


def test_a_program_that_is_given_up_is_closed() -> None:
    inner = asking()
    program = requests_through(inner, lambda request: request)
    next(program)
    program.close()
    assert inner.gi_frame is None


def test_an_error_of_the_inner_program_comes_out() -> None:
    def failing() -> Generator[Any, Any, str]:
        yield 1
        raise KeyError("inside")

    program = requests_through(failing(), lambda request: request)
    next(program)
    with pytest.raises(KeyError, match="inside"):
        program.send(None)


def test_a_result_passes_through_whether_or_not_it_took_a_program() -> None:
    assert result_through(3, lambda made: made + 1) == 4
    program = result_through(asking(), str.upper)
    next(program)
    program.send("a")
    with pytest.raises(StopIteration) as stopped:
        program.send("b")
    assert stopped.value.value == "A B"
    assert requests_through("plain", lambda request: "changed") == "plain"
