"""Training on images: in the same trainer, with the same bits in a stack as alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference.vision import SIDE, picture, write_image_model, write_seeing_model

from coterie.data.images import ImageSet, image_set
from coterie.data.sequences import tokenise_sequences
from coterie.errors import ModelError
from coterie.experiments.bases import images_for, shown, sight_for
from coterie.maths.keys import root_key
from coterie.models.image_bases import load_image_base, load_seeing_language_base
from coterie.models.loading import Base
from coterie.protocol import Fit, Fitted, LowRank, Model
from coterie.training.asks import Ask, Done, Plan, TrainSettings
from coterie.training.evaluation import calibrate, evaluate, gradient, predict
from coterie.training.fit import fit

SETTINGS = TrainSettings(batch_size=8, steps=3, lr=1e-2)


@pytest.fixture(scope="module", params=["dinov2", "clip"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = write_image_model(tmp_path_factory.mktemp("model"), request.param)
    return load_image_base(folder, targets=None, num_labels=3, head_key=root_key(1))


def images(base: Base, numbers: range) -> ImageSet:
    sees = base.vision
    assert sees is not None
    labels = [number % 3 for number in numbers]
    shown = [picture(label, number) for label, number in zip(labels, numbers, strict=True)]
    return image_set(shown, labels, num_classes=3, size=sees.size, mean=sees.mean, std=sees.std, tokens=sees.tokens)


def adapter(base: Base, seed: int, rank: int = 2) -> Model:
    key = root_key(seed)
    return Model(
        lora={
            name: LowRank(
                key.fold(name, "B").normal((layer.d_out, rank), 0.1), key.fold(name).normal((rank, layer.d_in), 0.1)
            )
            for name, layer in base.layers.items()
        }
    )


def ask(base: Base, client: int) -> Ask:
    data = images(base, range(100 * client, 100 * client + 12 + client))
    return Ask(f"c{client}", Fit(adapter(base, client)), "base", base.head, data, root_key(9).fold(client))


def test_a_stack_of_clients_ends_with_the_bits_of_each_alone(base: Base) -> None:
    asks = [ask(base, client) for client in range(3)]
    together = fit(base, asks, SETTINGS, Plan(clients_per_step=3, padding_rank=2))
    for one, found in zip(asks, together, strict=True):
        (alone,) = fit(base, [one], SETTINGS, Plan(padding_rank=2))
        assert isinstance(found, Done) and isinstance(alone, Done)
        assert isinstance(found.answer, Fitted) and isinstance(alone.answer, Fitted)
        for name, value in alone.answer.model.parameters.items():
            assert torch.equal(found.answer.model.parameters[name], value), name
        assert found.head is not None and alone.head is not None
        assert torch.equal(found.head["classifier.weight"], alone.head["classifier.weight"])


@pytest.mark.parametrize("tiles", [False, True], ids=["one-size", "tiles"])
def test_questions_about_images_have_the_same_bits_in_a_stack_as_alone(tmp_path: Path, tiles: bool) -> None:
    everything = r"model\.(language_model|vision_tower)\..*"
    seeing = load_seeing_language_base(write_seeing_model(tmp_path, tiles=tiles), targets=everything)
    task_of = ("is the film good", " yes", " no")
    asks = []
    for client in range(2):
        numbers = range(20 * client, 20 * client + 10)
        answers = [task_of[1 + number % 2] for number in numbers]
        data = tokenise_sequences([task_of[0]] * len(numbers), answers, seeing.tokenizer, 64)
        # In the first client's batches all images are squares, in the other's they have several shapes.
        pictures = [picture(number % 2, number, wide=SIDE + number // 20 * (number % 3) * SIDE) for number in numbers]
        images = images_for(pictures, sight_for(seeing))
        shown_data = shown(data, images, torch.arange(len(numbers)), seeing)
        model = adapter(seeing, client)
        asks.append(Ask(f"c{client}", Fit(model), "base", None, shown_data, root_key(9).fold(client)))
    together = fit(seeing, asks, SETTINGS, Plan(clients_per_step=2, padding_rank=2))
    assert any("vision_tower" in name for name in seeing.layers)
    for one, found in zip(asks, together, strict=True):
        (alone,) = fit(seeing, [one], SETTINGS, Plan(padding_rank=2))
        assert isinstance(found, Done) and isinstance(alone, Done)
        assert isinstance(found.answer, Fitted) and isinstance(alone.answer, Fitted)
        for name, value in alone.answer.model.parameters.items():
            assert torch.equal(found.answer.model.parameters[name], value), name


def test_training_tells_the_classes_apart(base: Base) -> None:
    data = images(base, range(60))
    settings = replace(SETTINGS, steps=40)
    (done,) = fit(base, [Ask("a", Fit(adapter(base, 0)), "base", base.head, data, root_key(2))], settings, Plan())
    assert isinstance(done, Done) and isinstance(done.answer, Fitted)
    fresh = images(base, range(300, 330))
    before = evaluate(base, Model(), base.head, fresh, 16)
    after = evaluate(base, done.answer.model, done.head, fresh, 16)
    assert after.accuracy > 0.9 > before.accuracy and after.loss < before.loss


def test_scores_are_those_of_the_plain_network(base: Base) -> None:
    data = images(base, range(7))
    found = predict(base, Model(), base.head, data, 3, features=True)
    pixels = data.batch(range(7), 0)["pixel_values"]
    with torch.no_grad(), base.slots.bound(1, None, {name: value[None] for name, value in base.head.items()}):
        logits = base.network(pixel_values=pixels).logits
    assert torch.allclose(found.logits, logits, atol=1e-5)
    score = evaluate(base, Model(), base.head, data, 3)
    assert score.loss == pytest.approx(float(F.cross_entropy(logits, data.labels)), abs=1e-5)
    assert found.embeddings is not None
    head = found.embeddings @ base.head["classifier.weight"].T + base.head["classifier.bias"]
    assert torch.allclose(head, found.logits, atol=1e-4)


def test_gradients_are_those_of_autograd(base: Base) -> None:
    data, model = images(base, range(6)), adapter(base, 0)
    found = gradient(base, model, base.head, data, ["lora.*.B"], "all", SETTINGS, 4, root_key(0))
    name = next(iter(base.layers))
    B = model["lora"][name].B.clone().requires_grad_()
    moved = {**model["lora"], name: replace(model["lora"][name], B=B)}
    head = {key: value[None] for key, value in base.head.items()}
    with base.slots.bound(1, Model.stack([Model(lora=moved)]), head):
        logits = base.network(pixel_values=data.batch(range(6), 0)["pixel_values"]).logits
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, data.labels), B)
    assert torch.allclose(found[f"lora.{name}.B"], expected, atol=1e-6)


def test_calibration_counts_every_place_of_an_image(base: Base) -> None:
    data = images(base, range(5))
    grams = calibrate(base, Model(), base.head, data, 2)
    seen: list[torch.Tensor] = []
    name = next(iter(base.layers))
    hook = base.slots.layers[name].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        base.network(pixel_values=data.batch(range(5), 0)["pixel_values"])
    hook.remove()
    rows = seen[0].double().flatten(0, -2)
    assert rows.shape[0] == 5 * 17 and torch.allclose(grams[name], rows.T @ rows, rtol=1e-4, atol=1e-4)


def test_images_are_refused_by_a_model_of_texts(base: Base) -> None:
    from training.small import base_of, bert

    data = images(base, range(4))
    with pytest.raises(ModelError, match="images do not suit a classifier"):
        evaluate(base_of(bert()), Model(), None, data, 4)
    assert data.pixels.shape[-1] == SIDE and np.unique(data.labels.numpy()).tolist() == [0, 1, 2]
