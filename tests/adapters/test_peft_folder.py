"""PEFT folders out and in."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from coterie.adapters import peft_folder
from coterie.adapters.peft_folder import CONFIG, NOTES, WEIGHTS, alpha_for, load_peft, save_peft
from coterie.errors import CoterieError, ModelError, RunError
from coterie.maths.keys import root_key
from coterie.models.loading import from_language_network, from_network
from coterie.protocol import Adapter, Dense, LowRank, Model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CLASSES = 3
KEY = root_key(5)
SMALL = {"num_labels": CLASSES, "pad_token_id": 0, "initializer_range": 0.1}
TINY = SMALL | {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 40,
}
TINY_GPT2 = SMALL | {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 40}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY))


def roberta() -> nn.Module:
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**TINY))


def gpt2() -> nn.Module:
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**TINY_GPT2))


def llama() -> nn.Module:
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TINY))


def gpt2_lm() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY_GPT2))


def llama_lm() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


LAYERS: dict[Callable[[], nn.Module], list[str]] = {
    bert: [f"bert.encoder.layer.{i}.attention.self.{p}" for i in range(2) for p in ("query", "value")],
    roberta: [f"roberta.encoder.layer.{i}.attention.self.{p}" for i in range(2) for p in ("query", "value")]
    + ["roberta.encoder.layer.1.intermediate.dense"],
    gpt2: [f"transformer.h.{i}.{p}" for i in range(2) for p in ("attn.c_attn", "mlp.c_proj")],
    llama: [f"model.layers.{i}.{p}" for i in range(2) for p in ("self_attn.q_proj", "mlp.down_proj")],
}
LAYERS |= {gpt2_lm: LAYERS[gpt2], llama_lm: LAYERS[llama]}
CONV1D = (gpt2, gpt2_lm)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make().eval()


def shape(network: nn.Module, name: str) -> tuple[int, int]:
    """(d_out, d_in)."""
    weight = network.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return (weight.shape[1], weight.shape[0]) if is_conv(network, name) else (weight.shape[0], weight.shape[1])


def is_conv(network: nn.Module, name: str) -> bool:
    return type(network.get_submodule(name)).__name__ == "Conv1D"


def adapter_for(
    make: Callable[[], nn.Module],
    ranks: tuple[int, ...] = (3,),
    scales: tuple[float, ...] = (0.7,),
    dtype: torch.dtype = torch.float32,
    diagonal: bool = False,
) -> Adapter:
    network = seeded(make)
    made: Adapter = {}
    for i, name in enumerate(LAYERS[make]):
        d_out, d_in = shape(network, name)
        r, key = ranks[i % len(ranks)], root_key(3).fold(name)
        B = key.fold("B").normal((d_out, r), 0.5, dtype)
        A = key.fold("A").normal((r, d_in), 0.5, dtype)
        d = key.fold("d").normal((r,), 1.0, dtype) if diagonal else None
        made[name] = LowRank(B, A, scales[i % len(scales)], d)
    return made


def head_for(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    key = root_key(4)
    named = seeded(make).named_parameters()
    return {n: key.fold(n).normal(p.shape) for n, p in named if n.startswith(("classifier.", "score."))}


TOKENS = torch.arange(1, 25).reshape(3, 8)


@torch.no_grad()
def by_hand(make: Callable[[], nn.Module], adapter: Adapter, head: dict[str, Tensor]) -> Tensor:
    """Logits of W + s B A with the head put in place."""
    network = seeded(make)
    for name, term in adapter.items():
        weight = network.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        diagonal = torch.ones(term.rank) if term.diagonal is None else term.diagonal
        added = float(term.scale) * (term.B.double() @ torch.diag(diagonal.double()) @ term.A.double())
        weight += (added.T if is_conv(network, name) else added).to(weight.dtype)
    for name, value in head.items():
        network.get_parameter(name).copy_(value)
    logits: Tensor = network(input_ids=TOKENS).logits
    return logits


@torch.no_grad()
def by_peft(make: Callable[[], nn.Module], folder: Path) -> Tensor:
    """Logits of the same base with PEFT's adapter loaded onto it."""
    logits: Tensor = peft.PeftModel.from_pretrained(seeded(make), str(folder)).eval()(input_ids=TOKENS).logits
    return logits


@contextmanager
def one_line(kind: type[CoterieError], *parts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text
    assert all(part in text for part in parts), text


def save(folder: Path, adapter: Adapter, **options: Any) -> None:
    save_peft(folder, adapter, **({"base_name": "tiny", "head": None, "task_type": "CAUSAL_LM"} | options))


def simple(rank: int = 2, **fields: Any) -> Adapter:
    return {"a.query": LowRank(torch.ones(4, rank), torch.ones(rank, 5), **fields)}


@pytest.mark.parametrize("make", [bert, roberta, gpt2, llama])
@pytest.mark.parametrize(
    ("ranks", "scales", "diagonal"),
    [((3,), (2.0,), False), ((1, 4, 2), (0.7, 2.0, 1 / 3), False), ((3, 2), (10 / 49,), True)],
    ids=["equal", "unequal ranks and scales", "diagonal"],
)
def test_peft_gives_the_logits_of_the_adapter_and_head(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    ranks: tuple[int, ...],
    scales: tuple[float, ...],
    diagonal: bool,
) -> None:
    adapter, head = adapter_for(make, ranks, scales, diagonal=diagonal), head_for(make)
    save(tmp_path / "out", adapter, head=head, task_type="SEQ_CLS", fan_in_fan_out=make in CONV1D)
    expected = by_hand(make, adapter, head)
    assert torch.allclose(by_peft(make, tmp_path / "out"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, by_hand(make, {}, head), rtol=0, atol=1e-2)
    assert not torch.allclose(expected, by_hand(make, adapter, {}), rtol=0, atol=1e-2)


@torch.no_grad()
def test_the_usual_way_of_loading_gives_the_same_logits(tmp_path: Path) -> None:
    adapter, head = adapter_for(bert, (2, 3)), head_for(bert)
    seeded(bert).get_submodule("bert").save_pretrained(tmp_path / "base")
    save(tmp_path / "out", adapter, head=head, task_type="SEQ_CLS", base_name=str(tmp_path / "base"))
    expected = by_hand(bert, adapter, head)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=CLASSES)
    loaded = peft.PeftModel.from_pretrained(network, str(tmp_path / "out")).eval()
    assert torch.allclose(loaded(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-5)
    by_name = peft.AutoPeftModelForSequenceClassification.from_pretrained(str(tmp_path / "out"), num_labels=CLASSES)
    assert torch.allclose(by_name.eval()(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("make", [gpt2_lm, llama_lm])
def test_a_language_model_keeps_its_outputs(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    adapter = adapter_for(make, (2, 3, 1), (0.7, 2.0))
    save(tmp_path / "out", adapter, task_type="CAUSAL_LM", fan_in_fan_out=make in CONV1D)
    expected = by_hand(make, adapter, {})
    assert torch.allclose(by_peft(make, tmp_path / "out"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(expected, seeded(make)(input_ids=TOKENS).logits, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("make", [bert, gpt2, llama, gpt2_lm, llama_lm])
def test_what_was_trained_here_is_what_peft_computes_and_what_is_loaded_again(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    language = make in (gpt2_lm, llama_lm)
    adapter, head = adapter_for(make, (1, 4, 2), (0.7, 2.0, 1 / 3)), head_for(make)
    network, targets = seeded(make), LAYERS[make]
    base = from_language_network(network, None, targets) if language else from_network(network, None, targets, KEY)
    stored = {"head": head or None, "task_type": "CAUSAL_LM" if language else "SEQ_CLS"}
    save(tmp_path / "out", adapter, fan_in_fan_out=make in CONV1D, **stored)
    found = load_peft(tmp_path / "out")

    def here(factors: Adapter, own_head: dict[str, Tensor] | None) -> Tensor:
        stack = None if own_head is None else {name: value[None] for name, value in own_head.items()}
        with base.slots.bound(1, Model.stack([Model(lora=factors)]), stack):
            logits: Tensor = base.network(input_ids=TOKENS).logits
        return logits

    trained = here(adapter, head or None)
    assert torch.allclose(by_peft(make, tmp_path / "out"), trained, rtol=0, atol=1e-5)
    assert torch.allclose(here(found.adapter, found.head), trained, rtol=0, atol=1e-5)
    assert (found.head is None) == language
    assert {name: term.rank for name, term in found.adapter.items()} == {n: t.rank for n, t in adapter.items()}


def test_what_was_saved_is_loaded_exactly(tmp_path: Path) -> None:
    adapter = adapter_for(bert, (1, 4), (0.7, 1 / 3))
    head = {"classifier.weight": torch.randn(3, 16), "classifier.bias": torch.randn(3)}
    save(tmp_path / "out", adapter, head=head, task_type="SEQ_CLS", label_names=["no", "maybe", "yes"])
    found = load_peft(tmp_path / "out")
    assert (found.base_name, found.task_type) == ("tiny", "SEQ_CLS")
    assert found.labels == ("no", "maybe", "yes") and found.dtype is torch.float32
    assert list(found.adapter) == sorted(adapter)
    assert found.head is not None and all(torch.equal(found.head[name], head[name]) for name in head)
    for name, term in adapter.items():
        got = found.adapter[name]
        assert got.scale == term.scale and torch.equal(got.B, term.B) and torch.equal(got.A, term.A)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = adapter_for(bert, dtype=dtype, diagonal=True)
    save(tmp_path / "out", adapter, head={"classifier.bias": torch.ones(3)}, task_type="SEQ_CLS")
    found = load_peft(tmp_path / "out")
    assert found.dtype is dtype and found.head is not None and found.head["classifier.bias"].dtype is torch.float32
    assert {t.dtype for t in load_file(tmp_path / "out" / WEIGHTS).values()} == {dtype, torch.float32}
    mixed = {"a": simple()["a.query"], "b": LowRank(torch.ones(2, 1).double(), torch.ones(1, 2).double())}
    save(tmp_path / "mixed", mixed)
    assert load_peft(tmp_path / "mixed").dtype is None


@given(st.floats(1e-6, 1e6) | st.floats(-100, 100), st.integers(1, 300))
def test_alpha_over_rank_is_the_scale_or_no_alpha_is(scale: float, rank: int) -> None:
    alpha = alpha_for(scale, rank)
    if alpha is not None:
        assert alpha / rank == scale
    else:
        candidates = [scale * rank]
        for towards in (math.inf, -math.inf):
            step = scale * rank
            for _ in range(4):
                step = math.nextafter(step, towards)
                candidates.append(step)
        assert all(candidate / rank != scale for candidate in candidates)


def test_usual_scales_have_a_whole_alpha(tmp_path: Path) -> None:
    for rank in (1, 2, 4, 8, 16, 64):
        for alpha in (8, 16, 32):
            folder = tmp_path / f"{rank}-{alpha}"
            save(folder, simple(rank, scale=alpha / rank))
            config = json.loads((folder / CONFIG).read_text())
            assert config["lora_alpha"] == alpha and isinstance(config["lora_alpha"], int)


def unreachable() -> tuple[float, int]:
    """A scale and a rank for which no double alpha gives alpha / rank == scale."""
    for rank in range(3, 100):
        for k in range(1, 200):
            if alpha_for(k / 199, rank) is None:
                return k / 199, rank
    pytest.fail("every scale can be reached")


def test_a_scale_that_no_alpha_gives_is_taken_up_by_b(tmp_path: Path) -> None:
    scale, rank = unreachable()
    term = LowRank(torch.randn(6, rank).double(), torch.randn(rank, 6).double(), scale)
    save(tmp_path / "out", {"layer": term})
    found = load_peft(tmp_path / "out").adapter["layer"]
    assert found.scale != scale
    assert torch.allclose(found.product(), term.product(), rtol=1e-14, atol=1e-14)


def test_a_rank_of_zero_and_a_scale_of_zero_are_written_as_no_change(tmp_path: Path) -> None:
    empty = LowRank(torch.ones(16, 0), torch.ones(0, 16), 2.0)
    adapter = adapter_for(bert)
    first, second, *_ = adapter
    adapter |= {first: empty, second: LowRank(adapter[second].B, adapter[second].A, 0.0)}
    head = head_for(bert)
    save(tmp_path / "out", adapter, head=head, task_type="SEQ_CLS")
    rest = {name: term for name, term in adapter.items() if name not in (first, second)}
    assert torch.allclose(by_peft(bert, tmp_path / "out"), by_hand(bert, rest, head), rtol=0, atol=1e-5)
    assert not load_peft(tmp_path / "out").adapter[first].product().any()


def made_by_peft(folder: Path, make: Callable[[], nn.Module], **options: Any) -> dict[str, Tensor]:
    """A folder written by PEFT with random factors; the matrix that PEFT itself adds to each layer (d_out, d_in)."""
    fields = {"task_type": "SEQ_CLS", "target_modules": LAYERS[make], "r": 4, "lora_alpha": 6}
    model = peft.get_peft_model(seeded(make), peft.LoraConfig(**(fields | options)))
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder))
    made = {}
    for name in LAYERS[make]:
        layer = model.base_model.model.get_submodule(name)
        delta = layer.get_delta_weight("default").detach()
        made[name] = delta.T if is_conv(model.base_model.model, f"{name}.base_layer") else delta
    return made


SHORT = {"bert.encoder.layer.1.attention.self.query": 2, "value": 5}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (bert, {}),
        (bert, {"rank_pattern": SHORT}),
        (bert, {"rank_pattern": SHORT, "alpha_pattern": {"layer.0.attention.self.query": 7, "value": 0.3}}),
        (bert, {"use_rslora": True}),
        (bert, {"use_rslora": True, "rank_pattern": SHORT, "alpha_pattern": {"value": 9}}),
        (bert, {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "target_modules": ["query", "value"]}),
        (bert, {"target_modules": r".*self\.(query|value)"}),
        (roberta, {}),
        (gpt2, {"fan_in_fan_out": True}),
    ],
    ids=[
        "plain",
        "ranks",
        "ranks and alphas",
        "rslora",
        "rslora, ranks",
        "gaussian",
        "regex",
        "roberta",
        "gpt2",
    ],
)
def test_a_folder_made_by_peft_has_the_same_products(
    tmp_path: Path, make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    products = made_by_peft(tmp_path / "peft", make, **options)
    found = load_peft(tmp_path / "peft")
    assert sorted(found.adapter) == sorted(products)
    assert all(torch.equal(found.adapter[name].product(), products[name]) for name in products)
    assert found.head is not None and set(found.head) == set(head_for(make))
    expected = by_peft(make, tmp_path / "peft")
    assert torch.allclose(by_hand(make, found.adapter, found.head), expected, rtol=0, atol=1e-5)
    save(tmp_path / "ours", found.adapter, head=found.head, task_type="SEQ_CLS", fan_in_fan_out=make in CONV1D)
    assert torch.equal(by_peft(make, tmp_path / "ours"), expected)


def test_other_saved_modules_travel_with_the_head(tmp_path: Path) -> None:
    made_by_peft(tmp_path / "peft", bert, modules_to_save=["pooler.dense"])
    found = load_peft(tmp_path / "peft")
    assert found.head is not None
    assert set(found.head) == {f"{m}.{p}" for m in ("bert.pooler.dense", "classifier") for p in ("weight", "bias")}
    save(tmp_path / "ours", found.adapter, head=found.head, task_type="SEQ_CLS")
    assert found.config["modules_to_save"] is not None
    assert json.loads((tmp_path / "ours" / CONFIG).read_text())["modules_to_save"] == [
        "bert.pooler.dense",
        "classifier",
    ]
    expected = by_peft(bert, tmp_path / "peft")
    assert torch.equal(by_peft(bert, tmp_path / "ours"), expected)
    assert torch.allclose(by_hand(bert, found.adapter, found.head), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"use_dora": True}, ("use_dora=True", "train plain LoRA")),
        ({"bias": "all"}, ("bias='all'", "use 'none'")),
        ({"lora_bias": True}, ("lora_bias=True",)),
        ({"init_lora_weights": "pissa"}, ("init_lora_weights='pissa'", "base weights")),
        ({"init_lora_weights": "olora"}, ("init_lora_weights='olora'", "base weights")),
        ({"trainable_token_indices": [1]}, ("trainable_token_indices=[1]",)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_more_than_lora_is_refused_with_the_reason(
    tmp_path: Path, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    made_by_peft_only(tmp_path / "peft", **options)
    with one_line(ModelError, str(tmp_path), *parts):
        load_peft(tmp_path / "peft")


def made_by_peft_only(folder: Path, **options: Any) -> None:
    fields = {"task_type": "SEQ_CLS", "target_modules": ["query"], "r": 2}
    peft.get_peft_model(seeded(bert), peft.LoraConfig(**(fields | options))).save_pretrained(str(folder))


def test_other_kinds_of_adapter_and_other_layers_are_refused(tmp_path: Path) -> None:
    config = peft.IA3Config(task_type="SEQ_CLS", target_modules=["key"], feedforward_modules=[])
    peft.get_peft_model(seeded(bert), config).save_pretrained(str(tmp_path / "ia3"))
    with one_line(ModelError, "peft_type 'IA3' is not read, only LORA"):
        load_peft(tmp_path / "ia3")
    made_by_peft_only(tmp_path / "words", target_modules=["word_embeddings"])
    with one_line(ModelError, "lora_embedding_A", "only these are read"):
        load_peft(tmp_path / "words")


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_damaged_and_missing_files_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with one_line(ModelError, str(folder), f"has no {CONFIG}"):
        load_peft(folder)
    save(folder, simple())
    good = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS, NOTES)}

    def restore() -> None:
        for name, data in good.items():
            (folder / name).write_bytes(data)

    for name, part in (
        (WEIGHTS, "copy the folder again"),
        (CONFIG, "cannot be read"),
        (NOTES, "cannot be read"),
    ):
        for broken in (b"", good[name][: len(good[name]) // 2], b"\xff" * 40):
            (folder / name).write_bytes(broken)
            with one_line(ModelError, name, part):
                load_peft(folder)
        restore()
    (folder / CONFIG).write_text("[1]")
    with one_line(ModelError, "not a JSON object"):
        load_peft(folder)
    restore()
    (folder / WEIGHTS).unlink()
    with one_line(ModelError, f"has no {WEIGHTS}"):
        load_peft(folder)
    (folder / "adapter_model.bin").write_bytes(b"x")
    with one_line(ModelError, "adapter_model.bin", "a pickle"):
        load_peft(folder)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"r": 3}, ("a.query", "(2, 5)", "(4, 2)", "rank 3")),
        ({"r": ...}, ("a.query", "no rank and alpha", "KeyError")),
        ({"r": 0}, ("a.query", "no rank and alpha")),
        ({"lora_alpha": "many"}, ("a.query", "no rank and alpha")),
        ({"rank_pattern": {"(": 2}}, ("a.query", "no rank and alpha")),
        ({"something_new": 1}, ("something_new=1", "not read")),
        ({"peft_type": ...}, ("peft_type None",)),
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_is_one_line(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    save(tmp_path / "out", simple())
    edited(tmp_path / "out", **changes)
    with one_line(ModelError, *parts):
        load_peft(tmp_path / "out")


def test_tensors_that_do_not_belong_are_one_line(tmp_path: Path) -> None:
    save(tmp_path / "out", simple())
    path = tmp_path / "out" / WEIGHTS
    tensors = load_file(path)
    prefix = "base_model.model."
    for wrong, parts in (
        ({f"{prefix}a.query.lora_magnitude_vector": torch.ones(4)}, ("lora_magnitude_vector",)),
        ({f"{prefix}embed.weight": torch.ones(4)}, ("embed.weight", "modules_to_save")),
        ({f"{prefix}b.lora_A.weight": torch.ones(2, 5)}, ("b has only lora_A", "incomplete")),
    ):
        save_file(tensors | wrong, path)
        with one_line(ModelError, *parts):
            load_peft(tmp_path / "out")
    save_file({f"{prefix}classifier.weight": torch.ones(2)}, path)
    edited(tmp_path / "out", task_type="SEQ_CLS")
    with one_line(ModelError, "no LoRA factors"):
        load_peft(tmp_path / "out")


def test_an_adapter_that_peft_cannot_express_is_refused(tmp_path: Path) -> None:
    for adapter, parts in (
        ({}, ("nothing to export",)),
        ({"q": Dense(torch.eye(2))}, ("q", "Dense")),
        (
            {"q": LowRank(torch.ones(3, 4, 2), torch.ones(3, 2, 5))},
            ("q", "(3, 4, 2)", "one client at a time"),
        ),
        ({"q": LowRank(torch.ones(4, 2), torch.ones(3, 5))}, ("q", "(4, 2)", "(3, 5)")),
        (simple(scale=math.nan), ("a.query", "nan")),
    ):
        with one_line(ModelError, *parts):
            save(tmp_path / "out", adapter)  # type: ignore[arg-type]
    with one_line(ModelError, "expects the head in a SEQ_CLS folder"):
        save(tmp_path / "out", simple(), task_type="SEQ_CLS")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "names",
    [["h.1.q", "h.x1.q", "h.2.q", "h.11.q"], ["a.q", "aXq", "b"], ["q", "x.q", "y.x.q"], ["m+n", "m(", "m+"]],
    ids=str,
)
def test_layers_whose_names_resemble_each_other_keep_their_own_rank_and_scale(tmp_path: Path, names: list[str]) -> None:
    for i, order in enumerate([names, names[::-1]]):
        adapter = {name: simple(k + 1, scale=k + 0.5)["a.query"] for k, name in enumerate(order)}
        save(tmp_path / f"{i}", adapter)
        found = load_peft(tmp_path / f"{i}").adapter
        assert {n: (t.rank, t.scale) for n, t in found.items()} == {n: (t.rank, t.scale) for n, t in adapter.items()}


def test_an_earlier_export_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    save(folder, simple(2))
    save(folder, simple(3))
    assert load_peft(folder).adapter["a.query"].rank == 3
    (folder / "my-notes.txt").write_text("precious")
    with one_line(ModelError, "my-notes.txt", "name another folder"):
        save(folder, simple(4))
    foreign = tmp_path / "foreign"
    made_by_peft_only(foreign)
    with one_line(ModelError, "name another folder"):
        save(foreign, simple())
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", simple())
    (tmp_path / "file").write_text("")
    with one_line(ModelError, "is a file"):
        save(tmp_path / "file", simple())
    assert load_peft(folder).adapter["a.query"].rank == 3 and (folder / "my-notes.txt").exists()
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("moment", ["save_file", "write_text", "rename"])
def test_a_write_that_fails_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    folder = tmp_path / "out"
    save(folder, simple(2))

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(peft_folder if moment == "save_file" else Path, moment, full)
    with one_line(RunError, str(folder), "No space left on device", "kept"):
        save(folder, simple(3))
    monkeypatch.undo()
    assert load_peft(folder).adapter["a.query"].rank == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_swap_that_fails_halfway_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    save(folder, simple(2))
    real = Path.rename

    def second_fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".new"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with one_line(RunError, "Input/output error"):
        save(folder, simple(3))
    assert load_peft(folder).adapter["a.query"].rank == 2


class Words:
    def save_pretrained(self, folder: str, /) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_the_tokenizer_and_a_note_for_readers_are_there(tmp_path: Path) -> None:
    save(tmp_path / "out", simple(), tokenizer=Words(), label_names=["no", "yes"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {CONFIG, WEIGHTS, NOTES, "README.md", "tokenizer.json"}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "no, yes" in text and "num_labels=2" in text and 'from_pretrained("tiny"' in text
    save(tmp_path / "out", simple())  # also replaces an export with a tokenizer
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_another_prefix_is_remembered(tmp_path: Path) -> None:
    save(tmp_path / "out", simple(), prefix="base_model.")
    assert set(load_file(tmp_path / "out" / WEIGHTS)) == {f"base_model.a.query.lora_{x}.weight" for x in "AB"}
    assert list(load_peft(tmp_path / "out").adapter) == ["a.query"]
