"""The names at the top."""

from __future__ import annotations

import subprocess
import sys

import pytest

import coterie


def test_every_listed_name_is_there_and_documented() -> None:
    assert set(coterie.__all__) == set(coterie._HOMES) == set(dir(coterie))
    assert all(getattr(coterie, name) is not None for name in coterie.__all__)
    for algorithm in coterie.METHODS.values():
        assert algorithm.__name__ in (coterie.__doc__ or "")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, coterie; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = coterie.nothing
