"""A name that nothing can answer for is told at once."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from coterie.errors import ModelError
from coterie.models.hub import require_reachable


def test_a_hub_without_an_address_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any) -> None:
        raise OSError("no such host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(ModelError, match=r"no model folder 'some/model', and the hub cannot be asked.*no address for"):
        require_reachable("some/model")


def test_an_offline_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        require_reachable("some/model")


def test_a_hub_with_an_address_is_left_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place: asked.append(place))
    require_reachable("some/model")
    assert len(asked) == 1


def test_folders_pass_and_missing_paths_do_not(tmp_path: Path) -> None:
    require_reachable(str(tmp_path))
    with pytest.raises(ModelError, match="no model folder"):
        require_reachable(str(tmp_path / "nothing"))
