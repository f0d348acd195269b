"""Base models whose frozen weights are quantised on loading, by bitsandbytes through transformers."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from torch import nn

from coterie.errors import ModelError

Quantization = Literal["8bit", "4bit"]

_COMPUTES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float32}


def quantised_options(quantization: Quantization | None, dtype: str) -> dict[str, Any]:
    """What transformers' `from_pretrained` takes to load linear layers in so many bits; nothing for None.

    8bit is LLM.int8 (Dettmers et al. 2022, arXiv 2208.07339); 4bit is NF4 with quantised scales, as QLoRA has it
    (Dettmers et al. 2023, arXiv 2305.14314), computed in `dtype` (float32 for float64). Output layer and head stay
    as they are. Meant for a GPU, where the project has not run it; tests run it on a CPU where bitsandbytes is
    installed.

    Raises:
        ModelError: bitsandbytes or accelerate is not installed.
    """
    if quantization is None:
        return {}
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"model.quantization={quantization} needs {' and '.join(missing)}; install with: pip install "
            f"{' '.join(missing)}, or leave the option out"
        )
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    chosen = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_COMPUTES[dtype],
    )
    return {"quantization_config": chosen}


def keep_trainable(network: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights at the first inference on a CPU, in place.

    Its product with packed weights has no gradient by what enters the layer.
    """
    layer: Any
    for layer in network.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
