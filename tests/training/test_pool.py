"""Answers of worker processes are those of one process, whatever happens to the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.forked import Forked
from training.killing import Always, Deadly, Refusing
from training.small import (
    PLAIN,
    STEPS,
    ask,
    base_of,
    choices,
    cohort,
    language_base_of,
    llama_lm,
    lora,
    sequences,
    tensors,
    texts,
)

from coterie.data.sequences import DataSet
from coterie.errors import ConfigError, RunError, said
from coterie.protocol import BaseLog, Calibrate, Evaluate, Fit, Gradient, Model, Predict, Weights
from coterie.protocol.messages import leaves
from coterie.training.asks import Ask, Done, Plan
from coterie.training.executor import Executor
from coterie.training.pool import PoolExecutor, cost, executor_for, spread

SETTINGS = replace(STEPS, dropout=0.1)
PLAN = replace(PLAIN, clients_per_step=2)


def bases() -> dict[str, Any]:
    return {"base": base_of(), "decoder": language_base_of(llama_lm())}


@pytest.fixture(scope="module")
def alone() -> Executor:
    return Executor(bases(), SETTINGS, PLAN)


@pytest.fixture(scope="module")
def pools(forked_workers: list[Forked]) -> Iterator[dict[int, PoolExecutor]]:
    made = {count: PoolExecutor(bases(), SETTINGS, replace(PLAN, workers=count)) for count in (2, 3)}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture(params=[2, 3])
def pool(request: pytest.FixtureRequest, pools: dict[int, PoolExecutor]) -> PoolExecutor:
    return pools[request.param]


@pytest.fixture
def two(pools: dict[int, PoolExecutor]) -> PoolExecutor:
    return pools[2]


def everything(executor: Executor) -> list[Ask]:
    """Requests of every kind, on two bases, some of which cannot be answered."""
    base, decoder = executor.bases["base"], executor.bases["decoder"]
    held, model, language = texts(30, "held"), lora(base, 4), lora(decoder, 2)
    on_decoder: list[tuple[Any, DataSet]] = [
        (Fit(language, steps=2), sequences(9)),
        (Evaluate(language, "test"), choices(5)),
        (Predict(language, "test", top_k=3), sequences(4)),
    ]
    asks = [
        *cohort(base),
        ask(base, Evaluate(model, "test", judged_by=("macro_f1",)), "e", held),
        ask(base, Evaluate(Model(), "test", limit=7), "f", held),
        ask(base, Predict(model, "test", features=True, sample=11), "p", held),
        ask(base, Gradient(model, "train", batch="first"), "g", held),
        ask(base, Gradient(model, "train", wrt=("lora.*.A",)), "g", held),
        ask(base, Calibrate(model, "train"), "c", held),
        replace(ask(base, Weights(tuple(base.layers))), data=None),
        ask(base, Fit(model, train=("lora.*.C",)), "malformed"),
        ask(base, Fit(None), "no model"),  # type: ignore[arg-type]
        ask(base, Evaluate(model, "test"), "empty", held.select([])),
        *(replace(ask(decoder, request, "d", data, head=False), spec="decoder") for request, data in on_decoder),
        replace(ask(base, Fit(model)), spec="another"),
    ]
    return [replace(one, spec="base") if one.spec == "" else one for one in asks]


def alike(one: Done | Exception, other: Done | Exception) -> bool:
    """Bit for bit, strides included; errors by class and words."""
    if isinstance(one, Exception):
        return isinstance(other, Exception) and type(one) is type(other) and str(one) == str(other)
    pairs = [list(leaves((done.answer, done.head))) for done in (one, other) if isinstance(done, Done)]
    return len(pairs) == 2 and len(pairs[0]) == len(pairs[1]) and all(map(_same, *pairs))


def _same(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    (path, a), (where, b) = one, other
    if isinstance(a, torch.Tensor):
        equal = torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
    else:
        equal = type(a) is type(b) and a == b
    return path == where and equal


def test_every_answer_is_the_same_bits_whatever_the_number_of_workers(alone: Executor, pool: PoolExecutor) -> None:
    expected, found = alone.answer(everything(alone)), pool.answer(everything(pool))
    assert [alike(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)
    assert sum(isinstance(one, Exception) for one in expected) == 4 and pool.replaced == 0


def test_bases_have_the_version_that_was_set_by_whatever_path(alone: Executor, pool: PoolExecutor) -> None:
    base = alone.bases["base"]
    steps = [lora(base, 2, f"patch {i}")["lora"] for i in range(3)]
    first, third = BaseLog().add(steps[0]), BaseLog().add(steps[0]).add(steps[1]).add(steps[2])
    other = BaseLog().add(steps[2])
    asks = [*cohort(base), ask(base, Evaluate(Model(), "test"), "e"), replace(ask(base, Weights(tuple(base.layers))))]
    seen = []
    for log in (first, third, third, other, BaseLog()):
        for executor in (alone, pool):
            executor.set_base(log, "base")
        expected, found = alone.answer(asks), pool.answer(asks)
        assert all(map(alike, expected, found))
        seen.append(tensors(expected[0])["head.classifier.weight"])
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2]) and not torch.equal(seen[2], seen[3])


def test_data_travel_to_a_worker_once(two: PoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    base, data = two.bases["base"], texts(2000, "large")
    sent: list[int] = []
    worker = two._workers[0]
    asked = worker.asked
    monkeypatch.setattr(worker, "asked", lambda frame: (sent.append(len(frame)), asked(frame))[1])
    for limit in (3, 4):
        two.answer([ask(base, Evaluate(Model(), "test", limit=limit), "e", data)])
    assert sent[1] < sent[0] / 5


def test_a_worker_killed_in_the_middle_is_replaced_and_the_bits_are_the_same(
    alone: Executor, two: PoolExecutor, tmp_path: Path
) -> None:
    mark = tmp_path / "kill me"
    base = alone.bases["base"]

    def asks() -> list[Ask]:
        doomed = cohort(base, penalties=(Deadly([str(mark)]),))
        return [*doomed, *(replace(one, party=f"x{one.party}") for one in cohort(base)), *evaluations(base)]

    expected = alone.answer(asks())
    mark.touch()
    before = two.replaced
    found = two.answer(asks())
    assert two.replaced == before + 1 and not mark.exists()
    assert [alike(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)


def evaluations(base: Any) -> list[Ask]:
    return [ask(base, Evaluate(lora(base, 2, f"m{i}"), "test"), f"e{i}") for i in range(3)]


def test_a_worker_killed_between_rounds_is_replaced_and_knows_the_base(alone: Executor, two: PoolExecutor) -> None:
    base = alone.bases["base"]
    log = BaseLog().add(lora(base, 2, "a patch")["lora"])
    for executor in (alone, two):
        executor.set_base(log, "base")
    two.answer(evaluations(base))
    process = two._workers[0].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert all(map(alike, alone.answer(evaluations(base)), two.answer(evaluations(base))))
    for executor in (alone, two):
        executor.set_base(BaseLog(), "base")


@pytest.mark.usefixtures("forked_workers")
def test_work_that_always_kills_its_worker_is_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.training.pool.TRIES", 2)
    base = base_of()
    pool = PoolExecutor({"base": base}, SETTINGS, replace(PLAN, workers=1))
    try:
        with pytest.raises(RunError, match=r"ended 2 times while they worked for c0, c1 \(SIGKILL\)"):
            pool.answer(cohort(base, (2, 4), penalties=(Always(os.getpid()),)))
        with pytest.raises(RunError, match="closed"):
            pool.answer(evaluations(base))
    finally:
        pool.close()


def test_an_error_that_cannot_travel_says_what_it_said(alone: Executor, two: PoolExecutor) -> None:
    base = alone.bases["base"]
    asks = [ask(base, Fit(lora(base, 2), penalties=(Refusing(0),)), "a"), *evaluations(base)]
    expected, found = alone.answer(asks), two.answer(asks)
    assert isinstance(expected[0], Exception) and isinstance(found[0], Exception)
    assert said(found[0]) == said(expected[0]) == "Refused: the penalty refuses this"
    assert "in a worker process" in "".join(found[0].__notes__)
    assert all(map(alike, expected[1:], found[1:]))


def test_a_request_that_cannot_travel_fails_alone(two: PoolExecutor) -> None:
    base = two.bases["base"]
    model = lora(base, 2)
    object.__setattr__(model, "mix", lambda: None)
    failed, *others = two.answer([ask(base, Evaluate(model, "test"), "odd"), *evaluations(base)])
    assert isinstance(failed, RunError) and "odd: its Evaluate cannot be handed to a worker" in str(failed)
    assert all(isinstance(one, Done) for one in others)


def test_the_longest_work_comes_first() -> None:
    base = base_of()
    few, many = texts(10, "few"), texts(40, "many")
    fit, longer, evaluated = (
        cost(ask(base, request, "a", data), STEPS)
        for request, data in [
            (Fit(lora(base, 2)), few),
            (Fit(lora(base, 2), steps=9), few),
            (Evaluate(Model(), "t"), many),
        ]
    )
    assert longer == pytest.approx(9 / 5 * fit) and fit == pytest.approx(3 * 20 * float(few.lengths.double().mean()))
    assert evaluated == pytest.approx(float(many.lengths.sum()))
    epochs = replace(STEPS, steps=None, epochs=2)
    assert cost(ask(base, Fit(lora(base, 2)), "a", few), epochs) == pytest.approx(3 * 2 * float(few.lengths.sum()))
    assert cost(ask(base, Evaluate(Model(), "t"), "a", few.select([])), STEPS) == 0


@pytest.mark.parametrize(
    ("size", "workers", "clients", "expected"), [(16, 2, 10, 5), (16, 3, 10, 4), (2, 2, 10, 2), (16, 4, 1, 1)]
)
def test_stacks_leave_no_worker_idle(size: int, workers: int, clients: int, expected: int) -> None:
    plan = spread(Plan(clients_per_step=size), workers, clients)
    assert (plan.workers, plan.clients_per_step) == (workers, expected)


def test_one_worker_means_this_process_and_a_gpu_none_beside_it() -> None:
    assert type(executor_for({"base": base_of()}, STEPS, PLAN)) is Executor
    with pytest.raises(ConfigError, match="workers=1"):
        executor_for({"base": base_of()}, STEPS, replace(PLAN, workers=2, device="cuda"))


SCRIPT = """
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from training.small import PLAIN, STEPS, base_of, cohort
from coterie.training.pool import PoolExecutor

def work(told):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background would ignore
    base = base_of()
    pool = PoolExecutor({"base": base}, STEPS, replace(PLAIN, workers=2))
    pool.answer(cohort(base))
    pids = [worker.process.pid for worker in pool._workers if worker.process]
    Path(told).write_text(" ".join(map(str, [*pids, pool._folder.name])))
    longer = [replace(one, request=replace(one.request, steps=10**6)) for one in cohort(base)]
    try:
        pool.answer(longer)
    except KeyboardInterrupt:
        sys.exit(77)

if __name__ == "__main__":
    children = []
    for told in sys.argv[1:]:
        child = os.fork()
        if not child:
            work(told)
            sys.exit(1)
        children.append(child)
    print(*children, flush=True)
    print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_workers_and_their_memory_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Which is killed, or interrupted."""
    script, told = tmp_path / "script.py", [tmp_path / "killed", tmp_path / "interrupted"]
    script.write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen([sys.executable, str(script), *told], env=environment, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    owners = [int(pid) for pid in started.stdout.readline().split()]
    try:
        assert until(lambda: all(one.exists() and "coterie-pool-" in one.read_text() for one in told), 120)
        held = [one.read_text().split() for one in told]
        workers, folders = [int(pid) for *pids, _ in held for pid in pids], [Path(folder) for *_, folder in held]
        assert len(set(workers)) == 4 and all(map(alive, workers)) and all(folder.is_dir() for folder in folders)
        time.sleep(1)  # they are in the middle of the second answer by now
        for owner, how in zip(owners, (signal.SIGKILL, signal.SIGINT), strict=True):
            os.kill(owner, how)
        assert started.communicate(timeout=60)[0] == "-9 77\n"
    finally:
        for owner in owners if started.poll() is None else ():
            os.kill(owner, signal.SIGKILL)
        started.kill()
        started.wait()
    assert until(lambda: not any(map(alive, workers)))
    assert until(lambda: not any(folder.exists() for folder in folders))
