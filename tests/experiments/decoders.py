"""Small decoders on disk, and tasks for them that a word of the prompt decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from reference.tokenisers import write_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def write_decoder(folder: Path, kind: str, width: int = 32, layers: int = 2) -> Path:
    """A random LLaMA or GPT-2; its tokeniser has an end token and none for padding."""
    sizes: dict[str, Any] = {"vocab_size": 80, "initializer_range": 0.2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "llama":
            shape = {
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": layers,
                "num_attention_heads": 2,
            }
            network: Any = LlamaForCausalLM(LlamaConfig(**shape, **sizes))
        else:
            network = GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=layers, n_head=2, n_positions=64, **sizes))
    network.save_pretrained(folder)
    write_tokenizer(folder, eos_token="<end>")
    return folder


def write_questions(path: Path, count: int = 120) -> Path:
    """Whether a film is good or bad, as JSON lines: question, choices, answer, site (one of three)."""
    rows = [
        {
            "question": f"{'the ' * (i % 7)}film {'very ' * (i // 7 % 9)}{('bad', 'good')[i % 2]} {i}",
            "choices": ["no", "yes very"],
            "answer": i % 2,
            "site": f"s{i % 3}",
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_answers(path: Path, count: int = 120) -> Path:
    """The same as prompts and answers: prompt, answer, site."""
    asked = [json.loads(line) for line in write_questions(path, count).read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": row["question"], "answer": row["choices"][row["answer"]], "site": row["site"]} for row in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def raw_config(base: Path, kind: str, task: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A run of two rounds among three clients of unequal ranks."""
    return {
        "method": "fedpa-lora",
        "rounds": 2,
        "model": {"base": str(base), "targets": TARGETS[kind], "max_length": 64},
        "task": task,
        "clients": {"count": 3, "ranks": [2, 4, 3]},
        "partition": {"kind": "iid", "minimum": 5},
        "train": {"batch_size": 8, "steps": 12, "lr": 2e-2},
        "evaluate": {"objective_examples": 8},
        "execution": {"dtype": "float32", "attention": "eager", "clients_per_step": 3},
    } | sections
