"""Names on the model hub: told at once when nothing can answer, instead of after a minute of retries."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlparse

from coterie.errors import ModelError


def require_reachable(name: str) -> None:
    """Raises ModelError when `name` is no folder, is not in the hub's cache, and the hub's host has no address.

    A hub that has an address but does not answer is left to transformers, which retries.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(name).expanduser().is_dir():
        return
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError as error:  # not even the form of a hub name
        raise ModelError(f"there is no model folder {name!r}, and it is no hub name either") from error
    if cached:
        return
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unresolved(constants.ENDPOINT)
    if reason:
        raise ModelError(
            f"there is no model folder {name!r}, and the hub cannot be asked for that name ({reason}); "
            "give a folder in the transformers format, or an asset's name (coterie assets)"
        )


def _unresolved(endpoint: str) -> str | None:
    host = urlparse(endpoint).hostname or endpoint
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return f"no address for {host}"
    return None
