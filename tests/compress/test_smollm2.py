"""SmolLM2-135M compressed on this machine: minutes, and what each method leaves of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

VOCABULARY = 49152
"""A model that gives every token the same probability has this perplexity."""

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "compress.py"


@pytest.mark.slow
@pytest.mark.assets
def test_svd_llm_leaves_a_language_model_within_minutes_where_the_others_leave_none() -> None:
    spec = importlib.util.spec_from_file_location("benchmark_compress", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)
    before, tokens, rows = benchmark.measure(["svd", "asvd", "svd-llm"], [0.8, 0.6])
    assert tokens >= 8000
    left = {(row.method, row.ratio): row.perplexity for row in rows}
    assert before < left["svd-llm", 0.8] < left["svd-llm", 0.6] < VOCABULARY
    assert left["svd-llm", 0.8] <= left["asvd", 0.8] <= left["svd", 0.8]
    # At 0.6 nothing is left by the other two, so that their order means nothing: both are worse than no model at all.
    assert min(left["asvd", 0.6], left["svd", 0.6]) > VOCABULARY
    errors = {(row.method, row.ratio): row.error for row in rows}
    for ratio in (0.8, 0.6):
        assert errors["svd-llm", ratio] < errors["asvd", ratio] < errors["svd", ratio]
    assert all(row.seconds < 300 and row.kept <= row.ratio for row in rows)
