"""The benchmark of memory and generation: what it says of bytes, what it generates, and that its command runs."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from coterie.models.loading import load_language_base
from coterie.protocol import Model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("efficiency")


@pytest.fixture(scope="module")
def places(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[float | None, Path]:
    """The toy, whole and cut. Read only."""
    place = tmp_path_factory.mktemp("models")
    return benchmark.models(benchmark.toy(place / "toy"), place, [0.4, 0.6])


def test_decomposed_layers_with_cores_hold_at_most_46_percent_of_their_dense_bytes(
    benchmark: ModuleType, places: dict[float | None, Path]
) -> None:
    shares = {}
    for name, configuration in benchmark.CONFIGURATIONS.items():
        row = benchmark.measure(name, places[configuration.ratio], benchmark.SMALL)
        shares[name] = row.layers
        assert set(row.by_batch) == {1, 2} and set(row.by_length) == {4, 8}
        assert min(*row.by_batch.values(), *row.by_length.values()) > 0 and row.peak >= row.loaded
    assert shares["full"] == 1
    assert 0.35 < shares["0.4"] <= 0.4 < shares["0.4+cores"] <= 0.46
    assert 0.55 < shares["0.6"] <= 0.6 < shares["0.6+cores"] <= 0.6 + 0.6**2 / 4
    # Two square layers more of k x k: a core of rank k = 12 in each of 64 x 64, of 17 in each of 64 x 128.
    assert shares["0.4+cores"] - shares["0.4"] == pytest.approx((4 * 12**2 + 3 * 17**2) / (4 * 64**2 + 3 * 64 * 128))


@pytest.mark.parametrize(("name", "ratio"), [("full+lora", None), ("0.4+cores", 0.4)])
def test_what_is_generated_with_a_cache_is_the_likeliest_token_after_each(
    benchmark: ModuleType, places: dict[float | None, Path], name: str, ratio: float | None
) -> None:
    base = load_language_base(places[ratio], targets="all-linear")
    model = Model.stack([benchmark.trained_on(base, benchmark.CONFIGURATIONS[name].trained)])
    with torch.no_grad(), base.slots.bound(1, model, None):
        ids = benchmark.generated(base, 2, 5, 4)
        adapted = base.network(input_ids=ids).logits
        expected = ids[:, :5]
        for _ in range(4):
            logits = base.network(input_ids=expected).logits[:, -1]
            logits[:, base.network.generation_config.eos_token_id] = -torch.inf
            expected = torch.cat([expected, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(ids, expected)
    with torch.no_grad():  # so the adapters had a part in it, though few tokens may be likeliest either way
        assert not torch.allclose(base.network(input_ids=ids).logits, adapted, rtol=1e-3)


def test_the_command_writes_figures_and_a_picture(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["efficiency.py", "--small", "--only", "0.4+cores", "--json", "f.json"])
    benchmark.main()  # which measures in a process of its own
    said = capsys.readouterr().out
    assert "0.4+cores" in said and said.endswith("f.svg\nf.png\n")
    (row,) = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert row["name"] == "0.4+cores" and row["layers"] <= 0.46
    # The toy itself is small; what loading brings beside it belongs to the process.
    assert row["loaded"] < 50
    assert "tokens a second" in (tmp_path / "f.svg").read_text() and (tmp_path / "f.png").stat().st_size > 1000
