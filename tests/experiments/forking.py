"""Runs that are killed and resumed, in processes forked from one that has imported everything."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ZYGOTE = Path(__file__).with_name("zygote.py")


@cache
def zygote() -> subprocess.Popen[str]:
    """Started when first needed, since its imports take seconds; ends with this process."""
    process = subprocess.Popen([sys.executable, str(ZYGOTE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def played(config: dict[str, Any], runs: dict[Path, list[dict[str, Any]]]) -> dict[Path, list[int]]:
    """How each attempt at the run in each folder ended: its exit code, or minus the signal."""
    process = zygote()
    assert process.stdin is not None and process.stdout is not None
    told = {str(folder): attempts for folder, attempts in runs.items()}
    print(json.dumps({"config": config, "runs": told, "environment": dict(os.environ)}), file=process.stdin, flush=True)
    line = process.stdout.readline()
    assert line, f"it ended with code {process.wait()}; standard error says why"
    return {Path(folder): codes for folder, codes in json.loads(line).items()}
