"""Bases: loaded from folders, frozen, with heads drawn by key and weights patched reproducibly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from training.small import KEY, base_of, bert, gpt2, llama, lora, texts
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models.loading import Base, inputs_of, load_base
from coterie.models.targets import check_rank, select_layers
from coterie.protocol import BaseLog, Layer, LowRank, Model
from coterie.training.asks import Plan
from coterie.training.evaluation import evaluate

HEAD = root_key(1).fold("head")


def load(folder: Path | str, **options) -> Base:
    given = {"targets": ("query", "value"), "num_labels": 2, "head_key": HEAD}
    return load_base(folder, **(given | options))


def test_a_folder_loads_frozen_in_eval_mode_with_its_tokenizer(tiny_base: Path) -> None:
    base = load(tiny_base)
    assert not base.network.training and not any(p.requires_grad for p in base.network.parameters())
    assert base.layers["bert.encoder.layer.1.attention.self.value"].d_out == 32 and len(base.layers) == 4
    assert base.tokenizer("a fine film")["input_ids"]
    assert {name: tuple(v.shape) for name, v in base.head.items()} == {
        "classifier.weight": (2, 32),
        "classifier.bias": (2,),
    }


def test_loading_depends_on_keys_and_content_alone(tiny_base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(load(tiny_base))
        left = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(left, torch.rand(1)), "loading drew from the global generator"
    a, b = made
    other = load(tiny_base, head_key=root_key(2))
    assert all(torch.equal(a.head[name], b.head[name]) for name in a.head)
    assert not torch.equal(a.head["classifier.weight"], other.head["classifier.weight"])
    assert a.digest == b.digest == other.digest
    assert not capfd.readouterr().err


def test_another_weight_is_another_digest(tiny_base: Path, tmp_path: Path) -> None:
    for file in tiny_base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.0.attention.self.query.weight"
    weights[name] = weights[name] + 1e-3
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).digest != load(tiny_base).digest


def test_parameters_that_the_checkpoint_lacks_are_drawn_by_key(tiny_base: Path, tmp_path: Path) -> None:
    for file in tiny_base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: value for name, value in weights.items() if not name.startswith("pooler")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(0)
    one = load(tmp_path)
    torch.manual_seed(1)
    assert load(tmp_path).digest == one.digest
    assert float(one.network.bert.pooler.dense.weight.std()) > 0.01


@pytest.mark.parametrize(
    ("name", "message"),
    [("/no/such/folder", "no model folder"), ("no-such-model-anywhere", "no model folder 'no-such-model-anywhere'")],
)
def test_what_is_not_there_gives_one_line(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_a_folder_without_a_model_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not load") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def tiny(kind, config, **changes):
    shape = {"vocab_size": 60, "num_labels": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return kind(config(**(shape | changes)))


FAMILIES = {
    "roberta": lambda: tiny(
        RobertaForSequenceClassification,
        RobertaConfig,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
    ),
    "distilbert": lambda: tiny(
        DistilBertForSequenceClassification,
        DistilBertConfig,
        dim=32,
        n_layers=1,
        n_heads=2,
        hidden_dim=48,
        max_position_embeddings=40,
    ),
    "mpnet": lambda: tiny(
        MPNetForSequenceClassification,
        MPNetConfig,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
    ),
    "modernbert": lambda: tiny(
        ModernBertForSequenceClassification,
        ModernBertConfig,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
}
HEADS = {
    "roberta": {"classifier.dense", "classifier.out_proj"},
    "distilbert": {"pre_classifier", "classifier"},
    "mpnet": {"classifier.dense", "classifier.out_proj"},
    "modernbert": {"classifier"},
    "bert": {"classifier"},
    "gpt2": {"score"},
    "llama": {"score"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_head_and_reacts_to_an_adapter_on_every_layer(family: str) -> None:
    base = base_of(FAMILIES[family](), "all-linear")
    assert {name.rpartition(".")[0] for name in base.head} == HEADS[family]
    assert not any(name.partition(".")[0] in ("classifier", "score", "pre_classifier") for name in base.layers)
    data = texts(6, "family")
    plain = evaluate(base, Model(), base.head, data, 4).loss
    for layer in base.layers:
        term = LowRank(
            KEY.fold("B").normal((base.layers[layer].d_out, 1)), KEY.fold("A").normal((1, base.layers[layer].d_in))
        )
        assert evaluate(base, Model(lora={layer: term}), base.head, data, 4).loss != plain, layer


@pytest.mark.parametrize("family", FAMILIES)
def test_without_targets_peft_s_defaults_are_taken_or_the_candidates_named(family: str) -> None:
    constants = pytest.importorskip("peft.utils.constants")
    defaults = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    network = FAMILIES[family]()
    if family in defaults:
        assert {name.rpartition(".")[2] for name in select_layers(network, None)} == set(defaults[family])
    elif family == "mpnet":  # of which there is an asset
        assert {name.rpartition("layer.0.")[2] for name in select_layers(network, None)} == {
            "attention.attn.q",
            "attention.attn.v",
        }
    else:
        with pytest.raises(ModelError, match=r"no default.*name some of: (q_lin|Wqkv), "):
            select_layers(network, None)


def test_targets_are_name_endings_at_a_dot_in_network_order_and_never_the_head() -> None:
    network = bert()
    chosen = select_layers(network, ["dense"])
    assert "bert.pooler.dense" in chosen and not any(name.endswith("query") for name in chosen)
    assert list(select_layers(network, ["value", "query"])) == [
        f"bert.encoder.layer.{i}.attention.self.{part}" for i in (0, 1) for part in ("query", "value")
    ]
    assert list(select_layers(network, "layer.1.attention.self.key")) == ["bert.encoder.layer.1.attention.self.key"]
    assert chosen["bert.encoder.layer.0.output.dense"] is not None
    shape = select_layers(network, ["layer.0.output.dense"])["bert.encoder.layer.0.output.dense"]
    assert (shape.d_out, shape.d_in) == (32, 48)


def test_conv1d_is_described_as_d_out_by_d_in() -> None:
    shape = select_layers(gpt2(), ["c_attn"])["transformer.h.0.attn.c_attn"]
    assert (shape.d_out, shape.d_in) == (96, 32)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["querry"], "'querry'.*nearest: query"),
        (["query", "zzz"], "'zzz'.*there are"),
        (["classifier"], "'classifier'"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error_that_names_the_nearest(targets, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        select_layers(bert(), targets)


def test_a_rank_beyond_a_layer_is_refused_with_its_name() -> None:
    layers = {"a.query": Layer(32, 32), "b.tiny": Layer(6, 32)}
    check_rank(layers, 6, "client x")
    with pytest.raises(ModelError, match=r"client x: rank 7.*b\.tiny \(6 x 32\).*at most 6"):
        check_rank(layers, 7, "client x")
    with pytest.raises(ModelError, match="at least 1"):
        check_rank(layers, 0, "client x")


def test_token_types_reach_only_models_that_take_them() -> None:
    rows = {name: torch.ones(1, 2) for name in ("input_ids", "attention_mask", "token_type_ids", "labels")}
    assert inputs_of(base_of(), rows).keys() == {"input_ids", "attention_mask", "token_type_ids"}
    distil = base_of(FAMILIES["distilbert"](), ("q_lin",))
    assert inputs_of(distil, rows).keys() == {"input_ids", "attention_mask"}


def log_of(base: Base, count: int) -> BaseLog:
    log = BaseLog()
    for i in range(count):
        layers = list(base.layers)[: 1 + i % 3]
        log = log.add({layer: lora(base, 2, f"p{i}", 0.5, torch.float32)["lora"][layer] for layer in layers})
    return log


PATCHED = {dtype: base_of(gpt2(), ("c_attn", "c_fc")) for dtype in ("float32", "bfloat16", "float64")}
for dtype, each in PATCHED.items():
    each.prepare(dtype, "eager")
LOG = log_of(PATCHED["float32"], 5)


def state(base: Base) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in base.network.state_dict().items()}


@pytest.mark.parametrize("dtype", PATCHED)
@given(path=st.lists(st.integers(0, 5), max_size=5), end=st.integers(0, 5))
def test_a_version_has_the_same_bits_by_whatever_path(dtype: str, path: list[int], end: int) -> None:
    base = PATCHED[dtype]
    base.set_log(BaseLog())
    base.set_log(BaseLog(LOG.patches[:end]))
    direct = state(base)
    for version in [*path, end]:
        # Equal content in fresh objects, as a message that has travelled.
        base.set_log(
            BaseLog(
                tuple(
                    {n: LowRank(t.B.clone(), t.A.clone(), t.scale) for n, t in p.items()} for p in LOG.patches[:version]
                )
            )
        )
    assert base.version == end
    assert all(torch.equal(value, direct[name]) for name, value in state(base).items())


def test_a_patched_weight_is_w0_plus_the_sum_of_products() -> None:
    base = PATCHED["float64"]
    base.set_log(LOG)
    original = dict(gpt2().double().named_modules())
    for name in base.layers:
        expected = original[name].weight.mT + sum(p[name].product().double() for p in LOG.patches if name in p)
        assert torch.allclose(base.weight(name), expected, atol=1e-7)


def test_small_patches_add_up_in_bfloat16() -> None:
    base = base_of()
    base.prepare("bfloat16", "eager")
    name = next(iter(base.layers))
    start = base.weight(name)
    log = BaseLog()
    for _ in range(200):
        log = log.add({name: LowRank(torch.full((32, 1), 1e-4), torch.ones(1, 32))})
    base.set_log(log)
    assert torch.allclose(base.weight(name) - start, torch.full((32, 32), 0.02), atol=2e-5)
    assert torch.equal(base.slots.layers[name].weight, base.weight(name).to(torch.bfloat16))


@pytest.mark.parametrize("bad", [("nowhere", 32), ("query", 7)])
def test_a_patch_that_does_not_fit_is_refused_and_changes_nothing(bad: tuple[str, int]) -> None:
    base = base_of()
    names = list(base.layers)
    before = state(base)
    good = {names[1]: LowRank(torch.ones(32, 1), torch.ones(1, 32))}
    name = "nowhere" if bad[0] == "nowhere" else names[0]
    log = BaseLog().add(good).add({name: LowRank(torch.ones(bad[1], 1), torch.ones(1, 32))})
    with pytest.raises(ModelError):
        base.set_log(log)
    assert base.version == 0 and all(torch.equal(value, before[n]) for n, value in state(base).items())


def test_casting_keeps_the_version() -> None:
    base, exact = base_of(), base_of()
    log = log_of(base, 3)
    base.set_log(log)
    base.prepare("float64", "eager")
    exact.prepare("float64", "eager")
    exact.set_log(log)
    assert base.version == 3
    assert all(torch.equal(value, state(exact)[name]) for name, value in state(base).items())


def test_an_unusable_device_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ModelError, match="'cuda' cannot be used"):
        base_of().prepare("float32", "eager", "cuda")


def test_the_default_plan_changes_nothing_of_a_fresh_base(tiny_base: Path) -> None:
    base, plan = load(tiny_base), Plan()
    before = state(base)
    base.prepare(plan.dtype, plan.attention, plan.device)
    assert all(value.dtype == before[name].dtype for name, value in state(base).items())
