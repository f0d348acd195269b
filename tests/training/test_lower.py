"""Passes that begin at the lowest adapter: equal to plain ones, and the same bits whatever was stored before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.vision import picture, write_image_model, write_seeing_model
from torch import Tensor, nn
from training.small import (
    KEY,
    PLAIN,
    STEPS,
    WORDS,
    ask,
    base_of,
    bert,
    farthest,
    filled,
    gpt2,
    identical,
    llama,
    lora,
    sequences,
    stacks,
    tensors,
    texts,
)
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    LlamaForCausalLM,
)

from coterie.data.images import image_set
from coterie.data.pictured import with_pictures
from coterie.data.sequences import DataSet, tokenise_sequences
from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.models.image_bases import load_image_base, load_seeing_language_base
from coterie.models.loading import Base, from_language_network, inputs_of
from coterie.protocol import BaseLog, Calibrate, Evaluate, Fit, Gradient, Imitation, Model, Predict
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.executor import Executor
from coterie.training.lower import StoredLower, lower_of, rows_of
from coterie.training.lower_choice import Reading, difference, token_count, with_stored_lower
from coterie.training.pool import PoolExecutor

SGD = replace(STEPS, optimizer="sgd", lr=0.05, momentum=0.5)
STORED = replace(PLAIN, lower_memory=64)


@dataclass(frozen=True)
class World:
    """A base of which so many blocks are below all adapters, and data sets of so many examples by name."""

    base: Base
    below: int
    data: Callable[[int, str], DataSet]
    head: bool = True


def upper(network: nn.Module, *names: str) -> list[str]:
    """The layers of those names but for the blocks of the first half."""
    found = [name for name, _ in network.named_modules() if name.endswith(names)]
    return found[len(found) // 2 :]


def encoder() -> World:
    network = bert(num_hidden_layers=4)
    return World(base_of(network, upper(network, "query", "value")), 2, texts)


def decoder() -> World:
    network = llama(LlamaForCausalLM, layers=4)
    base = from_language_network(network, None, upper(network, "q_proj", "down_proj"), attention="eager")
    return World(base, 2, sequences, head=False)


def classifying_decoder() -> World:
    network = gpt2()
    return World(base_of(network, upper(network, "c_attn")), 1, texts)


def images(base: Base, count: int, name: str) -> DataSet:
    sees = base.vision
    assert sees is not None
    start = int(KEY.fold(name).bits(1)[0] % 1000)
    labels = [number % 3 for number in range(count)]
    pictures = [picture(label, start + number) for number, label in enumerate(labels)]
    return image_set(pictures, labels, num_classes=3, size=sees.size, mean=sees.mean, std=sees.std, tokens=sees.tokens)


def vit(folder: Path) -> World:
    write_image_model(folder, "vit")
    whole = load_image_base(folder, targets=None, num_labels=3, head_key=root_key(1))
    base = load_image_base(folder, targets=list(whole.layers)[2:], num_labels=3, head_key=root_key(1))
    return World(base, 1, lambda count, name: images(base, count, name))


def seeing(folder: Path) -> World:
    write_seeing_model(folder)
    names = [name for name in load_seeing_language_base(folder, targets="all-linear").layers if "language" in name]
    base = load_seeing_language_base(folder, targets=names[len(names) // 2 :])

    def asked(count: int, name: str) -> DataSet:
        start = int(KEY.fold(name).bits(1)[0] % 1000)
        answers = [(" yes", " no")[number % 2] for number in range(count)]
        prompts = ["is the film good" if number % 3 else "good film" for number in range(count)]
        data = tokenise_sequences(prompts, answers, base.tokenizer, 64)
        sees = base.vision
        assert sees is not None and sees.placeholder is not None
        pictures = image_set(
            [picture(number % 3, start + number) for number in range(count)],
            [0] * count,
            num_classes=1,
            size=sees.size,
            mean=sees.mean,
            std=sees.std,
            tokens=sees.places,
        )
        return with_pictures(data, pictures, torch.arange(count), sees.placeholder, base.tokenizer.bos_token_id)

    return World(base, 1, asked, head=False)


MADE: dict[str, Callable[[], World]] = {
    "encoder": encoder,
    "decoder": decoder,
    "classifying decoder": classifying_decoder,
}


@pytest.fixture(params=[*MADE, "vit", "seeing"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param in MADE:
        return MADE[request.param]()
    return {"vit": vit, "seeing": seeing}[request.param](tmp_path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def asks(world: World, ranks: tuple[int, ...] = (2, 4, 3), **fields: Any) -> list[Ask]:
    """Clients of unequal ranks, data and numbers of steps."""
    counts = (22, 9, 17)
    return [
        ask(
            world.base,
            Fit(lora(world.base, rank, f"c{i}"), **({"steps": 4 + i} | fields)),
            f"c{i}",
            world.data(counts[i], f"c{i}"),
            world.head,
        )
        for i, rank in enumerate(ranks)
    ]


def questions(world: World) -> list[Ask]:
    """Everything that can be asked beside a Fit."""
    model, data = lora(world.base, 4), world.data(21, "asked")
    requests = [
        Evaluate(model, "test"),
        Predict(model, "test", features=True),
        Gradient(model, "train", wrt=("lora.*",), batch="all"),
        Calibrate(model, "train"),
    ]
    return [ask(world.base, request, "asked", data, world.head) for request in requests]


def trained(executor: Executor, given: list[Ask]) -> list[Done]:
    found = executor.answer(given)
    for one in found:
        assert isinstance(one, Done), one
    return [one for one in found if isinstance(one, Done)]


def executor(world: World, plan: Plan, settings: TrainSettings = SGD) -> Executor:
    return Executor({"base": world.base}, settings, plan)


@contextmanager
def counted(block: nn.Module) -> Iterator[list[int]]:
    """For passes inside: the number of examples each time that a block computes."""
    rows: list[int] = []
    inner = next(part for part in block.modules() if "Norm" in type(part).__name__)
    hook = inner.register_forward_hook(lambda _, __, given: rows.append(len(given)))
    try:
        yield rows
    finally:
        hook.remove()


def lowest(world: World) -> nn.Module:
    """The first of the lower blocks."""
    data = world.data(1, "lowest")
    batch = data.batch([0], int(data.lengths[0]))
    found = lower_of(world.base, world.base.network.forward, inputs_of(world.base, batch))
    assert found is not None and len(found.blocks) == world.below
    return found.blocks[0]


def kept(found: Executor) -> dict[tuple[str, bytes], Tensor]:
    assert found._lower is not None
    return found._lower.store._held


def test_training_is_plain_training_within_1e_6_in_fp32(world: World) -> None:
    plain, stored = (trained(executor(world, plan), asks(world)) for plan in (PLAIN, STORED))
    for given, one, other in zip(asks(world), plain, stored, strict=True):
        assert farthest(tensors(one), tensors(other)) <= 1e-6
        assert one.answer.mean_loss == pytest.approx(other.answer.mean_loss, abs=1e-5)
        assert farthest(given.request.initial.parameters, one.answer.model.parameters) > 1e-3


def test_training_is_plain_training_within_1e_10_in_fp64(world: World) -> None:
    plain, stored = (
        trained(executor(world, replace(plan, dtype="float64"), STEPS), asks(world)) for plan in (PLAIN, STORED)
    )
    # Llama's norms are computed in float32 whatever the dtype, and a batch's pixels are float32.
    tolerance = 1e-5 if world.base.is_language else 1e-10
    for one, other in zip(plain, stored, strict=True):
        assert farthest(tensors(one), tensors(other)) <= tolerance


def test_answers_are_plain_answers(world: World) -> None:
    plain, stored = (trained(executor(world, plan), questions(world)) for plan in (PLAIN, STORED))
    score, said, slope, gram = (one.answer for one in plain)
    score_, said_, slope_, gram_ = (one.answer for one in stored)
    assert score.loss == pytest.approx(score_.loss, abs=1e-5) and score.accuracy == score_.accuracy
    assert torch.allclose(said.logits, said_.logits, atol=1e-4) and torch.equal(said.labels, said_.labels)
    assert torch.allclose(said.embeddings, said_.embeddings, atol=1e-4)
    for one, other in ((slope, slope_), (gram, gram_)):
        assert one.keys() == other.keys() and one
        for name, value in one.items():
            assert torch.allclose(value, other[name], atol=1e-5 * max(1.0, float(value.abs().max()))), name


def test_lower_blocks_compute_each_example_once_alone(world: World) -> None:
    run, block = executor(world, STORED), lowest(world)
    all_ = 22 + 9 + 17
    with counted(block) as rows:
        trained(run, asks(world, epochs=3, steps=None))
        each = len(rows) // (all_ + 1)  # norms of a block; the first example passes once more, to look for the blocks
        assert len(rows) == each * (all_ + 1) and set(rows) == {1}
        trained(run, asks(world, ranks=(4, 2, 2)))
        assert len(rows) == each * (all_ + 1)
        trained(run, questions(world))
        trained(run, questions(world)[::-1])
    assert len(rows) == each * (all_ + 21 + 1) and len(kept(run)) == all_ + 21
    assert "forward" not in vars(block) and "forward" not in vars(world.base.network)


def test_what_is_stored_are_the_bits_of_an_example_alone_whatever_its_company(world: World) -> None:
    data = world.data(21, "company")
    found = []
    for size in (1, 4, 21):
        run = executor(world, replace(STORED, eval_batch_size=size))
        order = data.select(list(range(20, -1, -1))) if size == 4 else data
        trained(run, [ask(world.base, Predict(lora(world.base, 2), "test"), "p", order, world.head)])
        found.append(kept(run))
    assert len(found[0]) == 21 and found[0].keys() == found[1].keys() == found[2].keys()
    for name, states in found[0].items():
        assert torch.equal(states, found[1][name]) and torch.equal(states, found[2][name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", MADE)
def test_bits_depend_neither_on_order_nor_on_what_was_stored_nor_on_a_stack(made: str, dtype: str) -> None:
    world = MADE[made]()
    plan = replace(STORED, dtype=dtype, lower_disk=16)
    first = executor(world, plan)
    expected = trained(first, asks(world))
    first.close()
    again = executor(MADE[made](), replace(plan, clients_per_step=3))  # which finds on disk what the first left
    with stacks() as seen:
        trained(again, questions(world))
        found = trained(again, asks(world)[::-1])[::-1]
        assert max(seen) == 3
    fresh = executor(MADE[made](), replace(plan, lower_disk=0))
    trained(fresh, [one for one in asks(world) if one.party == "c1"])
    found += trained(fresh, asks(world))
    empty = executor(MADE[made](), replace(plan, lower_disk=0, clients_per_step=3))
    with stacks() as seen:
        found += trained(empty, asks(world))
        assert max(seen) == 3
    assert all(identical(a, b) for a, b in zip(expected * 3, found, strict=True))


@pytest.mark.usefixtures("forked_workers")
def test_bits_do_not_depend_on_the_number_of_workers(own_cache: Path) -> None:
    world = encoder()
    plan = replace(STORED, clients_per_step=2, lower_memory=1, lower_disk=16)
    expected = trained(executor(world, plan), [*asks(world), *questions(world)])
    pool = PoolExecutor({"base": encoder().base}, SGD, replace(plan, workers=2))
    try:
        for _ in range(2):
            found = trained(pool, [*asks(world), *questions(world)])
            for one, other in zip(expected[:3], found[:3], strict=True):
                assert identical(one, other)
            assert expected[3].answer == found[3].answer
            assert torch.equal(expected[4].answer.logits, found[4].answer.logits)
    finally:
        pool.close()


@pytest.mark.parametrize("made", MADE)
def test_dropout_parts_and_layers_computed_again_change_no_bit_of_it(made: str) -> None:
    world = MADE[made]()
    settings = replace(SGD, dropout=0.2, accumulation=2)
    kept_, again = (
        trained(executor(world, STORED, replace(settings, checkpointing=one)), asks(world)) for one in (False, True)
    )
    plain = trained(executor(world, PLAIN, settings), asks(world))
    for one, other, far in zip(kept_, again, plain, strict=True):
        assert identical(one, other) and farthest(tensors(one), tensors(far)) <= 1e-6


def test_with_an_adapter_in_the_first_block_nothing_is_stored_and_no_bit_changes() -> None:
    world = World(base_of(bert(num_hidden_layers=4), ["0.attention.self.query", "3.attention.self.value"]), 0, texts)
    run = executor(world, replace(STORED, lower_disk=16))
    found = trained(run, [*asks(world), *questions(world)])
    run.close()
    expected = trained(executor(world, PLAIN), [*asks(world), *questions(world)])
    assert all(identical(a, b) for a, b in zip(expected[:3], found[:3], strict=True))
    assert not kept(run) and not list(run._lower.store.folder.rglob("*")) if run._lower else False


def test_what_imitates_the_states_of_a_lower_block_is_computed_whole() -> None:
    world, teacher = encoder(), base_of(bert(num_hidden_layers=4, intermediate_size=64))
    loss = Imitation(Model(spec="teacher"), at="bert.encoder.layer.1")
    given = ask(world.base, Fit(lora(world.base, 4), loss=loss, steps=3), "c", texts(12), head=False)
    plain, stored = (
        trained(Executor({"base": world.base, "teacher": teacher}, SGD, plan), [given])[0] for plan in (PLAIN, STORED)
    )
    assert identical(plain, stored) and plain.answer.mean_loss > 0.01


def test_a_patch_of_the_base_counts_and_none_can_lie_below_what_is_stored() -> None:
    world = encoder()
    plain, stored = executor(world, PLAIN), executor(encoder(), STORED)
    before = trained(stored, asks(world))  # whose activations stay
    lower_layers = list(world.base.layers)[:1]
    patch = lora(world.base, 4, "patch", scale=20.0)["lora"]
    log = BaseLog().add({name: patch[name] for name in lower_layers})
    for one in (plain, stored):
        one.set_base(log, "base")
    expected, found = trained(plain, asks(world)), trained(stored, asks(world))
    for one, other, old in zip(expected, found, before, strict=True):
        assert farthest(tensors(one), tensors(other)) <= 1e-6 < 1e-3 < farthest(tensors(old), tensors(other))
    below = lower_layers[0].replace(".2.", ".1.")
    with pytest.raises(ModelError, match="no adapted layer"):
        stored.set_base(BaseLog().add({below: patch[lower_layers[0]]}), "base")
    # Where that layer is adapted too, so that it can be patched, it is no longer below.
    network = bert(num_hidden_layers=4)
    lowest(World(base_of(network, [below, *world.base.layers]), 1, texts))


def test_other_weights_or_another_lowest_adapter_share_nothing(own_cache: Path) -> None:
    plan = replace(STORED, lower_memory=0, lower_disk=16)
    world = encoder()
    changed = bert(num_hidden_layers=4)
    changed.get_parameter("bert.encoder.layer.0.output.dense.weight").data[0, 0] += 1
    others = [
        World(base_of(changed, list(world.base.layers)), 2, texts),
        World(base_of(bert(num_hidden_layers=4), list(world.base.layers)[2:]), 3, texts),
        World(base_of(bert(num_hidden_layers=4, num_attention_heads=4), list(world.base.layers)), 2, texts),
    ]
    for number, each in enumerate([world, *others]):
        run = executor(each, plan)
        with counted(lowest(each)) as rows:
            stored = trained(run, asks(each))
        assert len(rows) > 40
        run.close()
        assert len(list((own_cache / "lower").iterdir())) == number + 2  # and a lock
        plain = trained(executor(each, PLAIN), asks(each))
        assert all(farthest(tensors(a), tensors(b)) <= 1e-6 for a, b in zip(plain, stored, strict=True))


def test_a_later_run_computes_nothing_below(own_cache: Path) -> None:
    plan = replace(STORED, lower_disk=16)
    first = executor(encoder(), plan)
    trained(first, asks(encoder()))
    first.close()
    world = encoder()
    with counted(lowest(world)) as rows:
        trained(executor(world, plan), asks(world))
        assert rows == [1]  # to look for the blocks
        trained(executor(world, replace(plan, threads=2)), asks(world)[:1])  # whose last bits may be others
    torch.set_num_threads(1)
    assert len(rows) > 1 + 9


def test_keys_of_examples_depend_on_their_tokens_alone() -> None:
    data = texts(12, "keys")
    width = int(data.lengths.max())
    wide, narrow = rows_of(data_inputs(data.batch(range(12), width + 5))), rows_of(data_inputs(data.batch([3], width)))
    assert wide[3].key == narrow[0].key and wide[3].length == int(data.lengths[3])
    assert len({row.key for row in wide}) == 12
    ids, mask = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]])
    variants = [
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": torch.tensor([[6, 5, 7, 0]]), "attention_mask": mask},
        {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1]])},
        {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 0]])},
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)},
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.tensor([[0, 0, 1, 0]])},
        {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.zeros(1, 3, 2, 2)},
        {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.full((1, 3, 2, 2), -0.0)},
    ]
    assert len({rows_of(one)[0].key for one in variants}) == len(variants)
    behind = {"input_ids": torch.tensor([[5, 6, 7, 9]]), "attention_mask": mask}
    assert rows_of(behind)[0].key == rows_of(variants[0])[0].key
    with pytest.raises(ModelError, match="padded on the right"):
        rows_of({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])})


def data_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


class Mixing(nn.Module):
    """A block that adds the mean over all places, padding included."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given: Tensor = self.block(hidden_states, *args, **kwargs)
        return given + given.mean(dim=1, keepdim=True)


def mixing() -> Base:
    network = bert(num_hidden_layers=4)
    blocks = network.get_submodule("bert.encoder.layer")
    blocks[0] = Mixing(blocks[0])  # type: ignore[operator,index]
    return base_of(network, upper(network, "query", "value"))


def albert() -> Base:
    """A network whose blocks run twice each."""
    config = AlbertConfig(
        vocab_size=WORDS,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_hidden_groups=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
        num_labels=3,
    )
    network = filled(AlbertForSequenceClassification(config))
    return base_of(network, [name for name, _ in network.named_modules() if "groups.1." in name and "query" in name])


def reading(base: Base, data: DataSet) -> Reading:
    return Reading(base, data, token_count(data))


def test_blocks_that_run_twice_are_computed_as_ever() -> None:
    world = World(albert(), 0, texts)
    run = executor(world, STORED)
    found, expected = trained(run, asks(world)), trained(executor(world, PLAIN), asks(world))
    assert not kept(run) and all(identical(a, b) for a, b in zip(expected, found, strict=True))


def test_the_choice_depends_on_what_there_is_to_gain() -> None:
    data = texts(60, "choice")
    good = reading(encoder().base, data)

    def chosen(seen: float = 5.0, memory: int = 8, disk: int = 0, one: Reading = good, wanted: Any = "auto") -> Plan:
        return with_stored_lower(PLAIN, [one], wanted, memory, disk, seen)

    assert chosen() == replace(PLAIN, lower_memory=8)
    assert chosen(memory=0, disk=9) == replace(PLAIN, lower_disk=9)
    assert chosen(seen=1.5) == PLAIN and chosen(seen=1.5, wanted="stored") == replace(PLAIN, lower_memory=8)
    large = replace(good, tokens=8 * 2**20 // (32 * 4) + 1)
    assert chosen(one=large) == PLAIN and chosen(one=large, disk=9) != PLAIN
    first = reading(base_of(bert(), ["0.attention.self.query"]), data)
    assert chosen(one=first) == PLAIN == chosen(one=first, wanted="stored")


def test_a_network_that_mixes_padding_in_is_noticed() -> None:
    base, data = mixing(), texts(60, "mixing")
    assert difference(base, data) > 0.01 > 1e-5 > difference(encoder().base, data)
    assert with_stored_lower(PLAIN, [reading(base, data)], "auto", 8, 8, 9.0) == PLAIN
    with pytest.raises(ModelError, match="BertForSequenceClassification answers otherwise"):
        with_stored_lower(PLAIN, [reading(base, data)], "stored", 8, 8, 9.0)


def test_a_choice_leaves_the_base_and_the_cache_alone(own_cache: Path) -> None:
    base = encoder().base

    def forwards() -> list[Any]:
        return [vars(part).get("forward") for part in base.network.modules()]

    before = forwards()
    with_stored_lower(PLAIN, [reading(base, texts(30, "alone"))], "auto", 8, 8, 9.0)
    assert not own_cache.exists() and forwards() == before
    assert StoredLower(STORED).plan is STORED
