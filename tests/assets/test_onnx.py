"""ONNX files: read without a library, and the encoder of one turned into a model folder."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.assets import fetch
from coterie.assets.convert import RECIPES, ConversionError
from coterie.assets.onnx import read_graph


def varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def held(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def weight(name: str, value: np.ndarray, *, packed: bool = False, floats: bool = False) -> bytes:
    if packed:
        dims = held(1, b"".join(varint(size) for size in value.shape))
    else:
        dims = b"".join(varint(1 << 3) + varint(size) for size in value.shape)
    kind = varint(2 << 3) + varint(1)
    return held(5, dims + kind + held(8, name.encode()) + held(4 if floats else 9, value.astype("<f4").tobytes()))


def node(op: str, inputs: list[str], output: str) -> bytes:
    return held(
        1, b"".join(held(1, name.encode()) for name in inputs) + held(2, output.encode()) + held(4, op.encode())
    )


def file_of(*parts: bytes) -> bytes:
    return varint(1 << 3) + varint(7) + held(7, b"".join(parts)) + struct.pack("<B", 9 << 3 | 5) + b"\0" * 4


def test_weights_and_operations_are_read_however_they_are_written() -> None:
    W, b = np.arange(6.0).reshape(2, 3), np.array([0.5, -1.0, 300.0])
    content = file_of(
        weight("W", W),
        weight("b", b, packed=True, floats=True),
        node("MatMul", ["x", "W"], "y"),
        node("Add", ["y", "b"], "z"),
    )
    nodes, weights = read_graph(content)
    assert [(n.op, n.inputs, n.outputs) for n in nodes] == [("MatMul", ("x", "W"), ("y",)), ("Add", ("y", "b"), ("z",))]
    assert np.array_equal(weights["W"], W) and np.array_equal(weights["b"], b)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 12, file_of(weight("W", np.ones((2, 2))))[:-20], b"not onnx at all"]
)
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_graph(content)


def test_a_shape_that_its_bytes_do_not_fill_is_refused() -> None:
    bad = weight("W", np.ones((2, 2))).replace(varint(1 << 3) + varint(2), varint(1 << 3) + varint(3), 1)
    with pytest.raises(ValueError, match="W has 16 bytes for the shape"):
        read_graph(file_of(bad, node("Add", ["W", "W"], "y")))


def encoder_file(width: int = 64) -> bytes:
    """As little of an encoder as the recipe looks at: one layer of width 64 with one matrix."""
    rng = np.random.default_rng(0)
    first = "backbone.encoder.layer.0.mlp.fc1"
    return file_of(
        weight("backbone.embeddings.cls_token", rng.normal(size=(1, 1, width))),
        weight("backbone.embeddings.patch_embeddings.projection.weight", rng.normal(size=(width, 3, 4, 4))),
        weight(f"{first}.bias", np.arange(2.0 * width)),
        weight("onnx::Concat_1", rng.normal(size=(1, 1, width))),
        weight("onnx::Reshape_2", rng.normal(size=(1, 9, width))),
        weight("onnx::MatMul_3", np.arange(2.0 * width * width).reshape(width, 2 * width)),
        weight("decoder.bias", np.ones(1)),
        node("MatMul", ["x", "onnx::MatMul_3"], "y"),
        node("Add", [f"{first}.bias", "y"], "z"),
    )


def test_a_matrix_is_named_after_the_bias_added_to_its_product(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    raw, fresh = tmp_path / "raw", tmp_path / "fresh"
    raw.mkdir(), fresh.mkdir()
    (raw / "model.onnx").write_bytes(encoder_file())
    RECIPES["onnx-dinov2"].make(raw, fresh, ("config.json", "model.safetensors"))
    weights = load_file(fresh / "model.safetensors")
    assert torch.equal(weights["encoder.layer.0.mlp.fc1.weight"], torch.arange(8192.0).reshape(64, 128).T)
    assert weights["embeddings.position_embeddings"].shape == (1, 10, 64)
    assert not any("decoder" in name for name in weights)
    assert '"image_size": 12' in (fresh / "config.json").read_text()


def test_another_network_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(file_of(node("Add", ["a", "b"], "c")))
    with pytest.raises(ConversionError, match="holds no image encoder") as caught:
        RECIPES["onnx-dinov2"].make(tmp_path, tmp_path, ())
    assert "\n" not in str(caught.value)


@pytest.mark.assets
def test_the_packaged_encoder_computes_what_onnxruntime_computes() -> None:
    """The numbers are those that onnxruntime 1.32 gave for this input, at the output of the encoder's last norm."""
    from transformers import Dinov2Model

    network, report = Dinov2Model.from_pretrained(fetch("vit-small"), output_loading_info=True)
    assert not any(report.values())
    place = np.arange(3 * 224 * 224, dtype=np.float64)
    pixels = torch.from_numpy(np.sin(0.37 * place + 0.002 * (place % 224) ** 2).astype(np.float32))
    with torch.no_grad():
        states = network.eval()(pixel_values=pixels.view(1, 3, 224, 224)).last_hidden_state
    assert states.shape == (1, 257, 384)
    first = [0.64800173, -0.47969112, 2.067913, -3.7397096, -0.8139671, -0.19336314]
    later = [0.9424809, 0.96485084, 0.6887732, -3.9142253, -1.2366464, -2.0480201]
    assert np.allclose(states[0, 0, :6], first, atol=1e-4) and np.allclose(states[0, 100, :6], later, atol=1e-4)
