"""Assets of several wheels, and those that are converted, arrive whole too."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.assets import ASSETS, Asset, AssetError, convert, fetch, store
from coterie.assets.convert import ConversionError, join_zip, unpack_gguf

INSIDE = {"a.txt": b"first\n" * 40, "deep/b.bin": bytes(range(256)) * 50, "unwanted.txt": b"no"}


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, content in files.items():
            made.writestr(f"model/{name}", content)
    return buffer.getvalue()


def cut(content: bytes, pieces: int) -> list[bytes]:
    size = -(-len(content) // pieces)
    return [content[start : start + size] for start in range(0, len(content), size)]


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asset]:
    """Makes an asset of several wheels, in a folder that stands in for pip."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()

    def copied(asset: Asset, scratch: Path) -> Path:
        (scratch / "wheel").mkdir(exist_ok=True)
        return Path(shutil.copy(wheels / asset.filename, scratch / "wheel"))

    monkeypatch.setattr(store, "download", copied)

    def part(number: int, content: bytes) -> Asset:
        file = wheels / f"part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as wheel:
            wheel.writestr(f"part/{number}", content)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        member = {f"part/{number}": f"archive.{number:03}"}
        return Asset("big", "a test", f"part{number}", "1.0", file.name, digest, file.stat().st_size, "none", member)

    def made(content: bytes, pieces: int = 3) -> Asset:
        first, *rest = (part(number, piece) for number, piece in enumerate(cut(content, pieces), start=1))
        return dataclasses.replace(first, parts=tuple(rest), recipe="split-zip", makes=("a.txt", "deep/b.bin"))

    return made


def test_an_archive_cut_over_several_wheels_is_joined(split: Callable[..., Asset], tmp_path: Path) -> None:
    asset, root = split(archive(INSIDE)), tmp_path / "cache"
    folder = store.install(asset, root)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"a.txt", "deep/b.bin", store.MANIFEST}
    assert all((folder / name).read_bytes() == INSIDE[name] for name in asset.files)
    assert {path.name for path in root.iterdir()} == {asset.key, f".{asset.key}.lock"}
    assert store.is_present(asset, root) and store.install(asset, root) == folder
    assert asset.size == sum(part.download for part in (asset, *asset.parts)) > asset.download


def test_another_part_is_another_folder(split: Callable[..., Asset]) -> None:
    asset = split(archive(INSIDE))
    changed = dataclasses.replace(asset.parts[0], sha256="0" * 64)
    assert dataclasses.replace(asset, parts=(changed, *asset.parts[1:])).key != asset.key


@pytest.mark.parametrize("wrong", ["hash", "missing part", "missing file", "checksum", "no archive"])
def test_what_is_not_as_expected_is_one_line_and_leaves_nothing(
    split: Callable[..., Asset], tmp_path: Path, wrong: str
) -> None:
    whole = archive(INSIDE)
    if wrong == "hash":
        asset = split(whole)
        asset = dataclasses.replace(asset, parts=(asset.parts[0], dataclasses.replace(asset.parts[1], sha256="0" * 64)))
    elif wrong == "missing part":
        asset = split(whole)
        asset = dataclasses.replace(asset, parts=asset.parts[:1])
    elif wrong == "missing file":
        asset = dataclasses.replace(split(whole), makes=("a.txt", "none.txt"))
    elif wrong == "checksum":
        place = whole.index(INSIDE["a.txt"]) + 3
        asset = split(whole[:place] + b"#" + whole[place + 1 :])
    else:
        asset = split(b"not a zip file at all")
    root = tmp_path / "cache"
    with pytest.raises(AssetError) as caught:
        store.install(asset, root)
    assert "\n" not in str(caught.value) and "'big'" in str(caught.value)
    assert {path.name for path in root.iterdir()} <= {f".{asset.key}.lock"}


def test_a_target_outside_the_folder_cannot_be_made(split: Callable[..., Asset]) -> None:
    with pytest.raises(ValueError, match="does not stay inside"):
        dataclasses.replace(split(archive(INSIDE)), makes=("../up.txt",))


def test_a_missing_extra_is_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "download", lambda *_: pytest.fail("downloaded"))
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssetError) as caught:
        store.install(ASSETS["smollm2"], tmp_path)
    message = str(caught.value)
    assert "\n" not in message and "gguf and accelerate" in message and "pip install 'coterie[gguf]'" in message


def write_gguf(path: Path) -> None:
    """A LLaMA of one layer and width 32 in GGUF, with one matrix in 8-bit blocks and a byte-level tokeniser."""
    import gguf
    import numpy as np

    from coterie.maths.keys import root_key

    words = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyzĠ", "ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *([1] * (len(words) - 3))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd.weight": (len(words), 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    for name, shape in shapes.items():
        value = root_key(5).fold(name).normal(shape).numpy().astype(np.float32)
        if name.endswith("ffn_up.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_gguf_becomes_a_plain_folder_of_the_same_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from coterie.maths.keys import root_key

    folders = []
    for run in ("one", "two"):
        raw, fresh = tmp_path / run / "raw", tmp_path / run / "fresh"
        raw.mkdir(parents=True)
        fresh.mkdir()
        write_gguf(raw / "model.gguf")
        (raw / "LICENSE").write_text("free")
        torch.manual_seed(len(run))
        unpack_gguf(
            raw, fresh, ["LICENSE", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        )
        folders.append(fresh)
    assert not capfd.readouterr().err
    one, two = folders
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "config.json").read_bytes() == (two / "config.json").read_bytes()
    assert (one / "LICENSE").read_text() == "free" and "gguf" not in (one / "config.json").read_text()
    weights = load_file(one / "model.safetensors")
    assert "lm_head.weight" not in weights and all(value.dtype == torch.float32 for value in weights.values())
    expected = root_key(5).fold("blk.0.ffn_up.weight").normal((64, 32))
    gap = (weights["model.layers.0.mlp.up_proj.weight"] - expected).abs().max()
    assert 0 < gap < float(expected.abs().max()) / 127
    network = AutoModelForCausalLM.from_pretrained(one)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(one)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab c")["input_ids"]) == ["ab", "Ġ", "c"]
    assert network(**tokenizer("ab c", return_tensors="pt")).logits.shape == (1, 3, 31)


@pytest.mark.slow
def test_what_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(ConversionError) as caught:
        unpack_gguf(tmp_path, tmp_path, ["config.json"])
    assert "\n" not in str(caught.value)


def test_an_empty_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "archive.001").write_bytes(archive({}))
    with pytest.raises(ConversionError, match="not as expected"):
        join_zip(tmp_path, tmp_path / "fresh", ["a.txt"])


@pytest.mark.slow
@pytest.mark.assets
def test_mpnet_is_an_encoder_whose_sentences_of_one_meaning_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    folder = fetch("mpnet")
    tokens = AutoTokenizer.from_pretrained(folder)(
        ["A man is eating food.", "Somebody eats a meal.", "The stock market fell."], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    near, far = float(means[0] @ means[1]), float(means[0] @ means[2])
    assert near > 0.6 and far < 0.2


@pytest.mark.slow
@pytest.mark.assets
def test_smollm2_knows_the_capital_of_france_and_prefers_true_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    from coterie.data.sequences import tokenise_choices
    from coterie.models.loading import load_language_base
    from coterie.protocol import Model
    from coterie.training.evaluation import evaluate, predict

    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    base = load_language_base(fetch("smollm2"), targets=None)
    assert len(base.layers) == 60 and sum(value.numel() for value in base.network.parameters()) == 134_515_008
    data = tokenise_choices(
        ["The capital of France is", "The sun rises in the", "Two plus two is"],
        [[" Berlin", " Paris", " Madrid"], [" east", " north"], [" seven", " four"]],
        [1, 0, 1],
        base.tokenizer,
        32,
    )
    assert evaluate(base, Model(), None, data, 8).accuracy == 1.0
    assert predict(base, Model(), None, data, 8).logits.shape == (3, 3)
