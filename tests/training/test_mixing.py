"""Terms that inputs share: the passes one by one, whatever the batch, and where a mix has no place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from training.small import (
    EXACT,
    KEY,
    answers,
    ask,
    base_of,
    bert,
    choices,
    gpt2,
    gpt2_lm,
    language_base_of,
    llama,
    llama_lm,
    sequences,
    texts,
)

from coterie.errors import ModelError
from coterie.maths.keys import root_key
from coterie.protocol import (
    Calibrate,
    Evaluate,
    Fit,
    Gradient,
    LowRank,
    Mix,
    Model,
    Predict,
    copied,
    input_features,
)
from coterie.wire.codec import decode, encode

TEXTS = texts(17, "mixed")
NETWORKS: list[Any] = [bert, gpt2, llama]


def adapter(base: Any, name: str, rank: int = 3) -> dict[str, LowRank]:
    key = KEY.fold("adapter", name)
    return {
        layer: LowRank(
            key.fold(layer, "B").normal((shape.d_out, rank), 0.4, dtype=torch.float64),
            key.fold(layer, "A").normal((rank, shape.d_in), 0.4, dtype=torch.float64),
            0.8,
        )
        for layer, shape in base.layers.items()
    }


def classifier(make: Any) -> Any:
    base = base_of(make(), None if make is bert else "all-linear")
    base.prepare("float64", "eager", "cpu")
    return base


def said(base: Any, request: Any, data: Any = TEXTS, head: bool = True, size: int = 64) -> Any:
    (done,) = answers(base, [ask(base, request, data=data, head=head)], plan=replace(EXACT, eval_batch_size=size))
    if isinstance(done, Exception):
        raise done
    return done.answer


def anchors_of(base: Any, local: dict[str, LowRank], data: Any = TEXTS, head: bool = True, count: int = 5) -> Tensor:
    seen = said(base, Predict(Model(local=local), "train", features=True, sample=count), data, head)
    return input_features(seen.embeddings, seen.examples)


def shared(lora: dict[str, LowRank], local: dict[str, LowRank], share: float) -> Model:
    """The two adapters with these shares as ordinary terms, by their scales."""
    return Model(
        lora={n: replace(t, scale=t.scale * (1 - share)) for n, t in lora.items()},
        local={n: replace(t, scale=t.scale * share) for n, t in local.items()},
    )


@pytest.mark.parametrize("make", NETWORKS)
def test_each_text_has_the_logits_of_the_two_adapters_in_its_own_shares(make: Any) -> None:
    base = classifier(make)
    lora, local = adapter(base, "lora"), adapter(base, "local")
    anchors = anchors_of(base, local)
    mixed = said(base, Predict(Model(lora=lora, local=local, mix=Mix(anchors, 0.7)), "test"), size=5)
    features = said(base, Predict(Model(local=local), "test", features=True)).embeddings
    shares = []
    for place in range(len(TEXTS)):
        cosines = [float(F.cosine_similarity(features[place].double(), one.double(), dim=0)) for one in anchors]
        shares.append(0.7 * max(0.0, sum(cosines) / len(cosines)))
        alone = said(base, Predict(shared(lora, local, shares[-1]), "test"), TEXTS.select([place]))
        assert torch.allclose(mixed.logits[place], alone.logits[0], atol=1e-5)
    assert max(shares) - min(shares) > 0.01


@pytest.mark.parametrize("make", [gpt2_lm, llama_lm])
def test_a_sequence_has_one_share_which_the_last_token_of_its_prompt_decides(make: Any) -> None:
    base = language_base_of(make())
    base.prepare("float64", "eager", "cpu")
    data = sequences(9)
    lora, local = adapter(base, "lora"), adapter(base, "local")
    anchors = anchors_of(base, local, data, head=False, count=4)
    mixed = said(base, Predict(Model(lora=lora, local=local, mix=Mix(anchors, 0.9)), "test"), data, False, size=4)
    seen = said(base, Predict(Model(local=local), "test", features=True), data, False)
    first = input_features(seen.embeddings, seen.examples)
    assert len(first) == len(data) and len(seen.embeddings) == int(data.labelled.sum())
    for place in range(len(data)):
        share = 0.9 * max(0.0, float(F.cosine_similarity(first[place][None], anchors).mean()))
        alone = said(base, Predict(shared(lora, local, share), "test"), data.select([place]), False)
        assert torch.allclose(mixed.logits[mixed.examples == place], alone.logits, atol=1e-4)


def test_options_share_as_their_question_does() -> None:
    base = language_base_of(llama_lm())
    base.prepare("float64", "eager", "cpu")
    data = choices(4)
    lora, local = adapter(base, "lora"), adapter(base, "local")
    model = Model(lora=lora, local=local, mix=Mix(anchors_of(base, local, sequences(9), head=False), 0.9))
    whole = said(base, Predict(model, "test"), data, False, size=3)
    alone = torch.cat([said(base, Predict(model, "test"), data.select([i]), False).logits for i in (0, 2)])
    assert torch.allclose(whole.logits[[0, 2]][:, : alone.shape[1]], alone, atol=1e-4)


def test_a_share_of_nothing_is_the_far_term_and_likeness_itself_is_the_weight() -> None:
    base = classifier(bert)
    lora, local = adapter(base, "lora"), adapter(base, "local")
    one = TEXTS.select([3])
    own = anchors_of(base, local, one)
    model = Model(lora=lora, local=local, mix=Mix(own, 1.0))
    for weight, plain in ((0.0, Model(lora=lora)), (1.0, Model(local=local)), (0.4, shared(lora, local, 0.4))):
        found = said(base, Predict(replace_mix(model, replace(model.mix, weight=weight)), "test"), one)
        assert torch.allclose(found.logits, said(base, Predict(plain, "test"), one).logits, atol=1e-5)
    away = said(base, Predict(replace_mix(model, replace(model.mix, anchors=-own)), "test"), one)
    assert torch.allclose(away.logits, said(base, Predict(Model(lora=lora), "test"), one).logits, atol=1e-6)
    turned = said(base, Predict(replace_mix(model, Mix(own, 1.0, "lora", "local", "local")), "test"), one)
    assert torch.allclose(turned.logits, said(base, Predict(Model(lora=lora), "test"), one).logits, atol=1e-5)


def replace_mix(model: Model, mix: Mix | None) -> Model:
    return Model(mix=mix, **model.terms)


def test_terms_equal_to_each_other_give_the_same_whatever_their_shares() -> None:
    base = classifier(bert)
    lora = adapter(base, "lora")
    model = Model(lora=lora, local=lora, mix=Mix(anchors_of(base, lora), 0.8))
    expected = said(base, Evaluate(Model(lora=lora), "test"))
    assert said(base, Evaluate(model, "test")).loss == pytest.approx(expected.loss, abs=1e-9)


def test_other_terms_act_in_full() -> None:
    base = classifier(bert)
    lora, local, extra = (adapter(base, name) for name in ("lora", "local", "extra"))
    anchors = anchors_of(base, local)
    model = Model(lora=lora, local=local, shared=extra, mix=Mix(anchors, 0.0))
    found = said(base, Predict(model, "test"))
    assert torch.allclose(found.logits, said(base, Predict(Model(lora=lora, shared=extra), "test")).logits, atol=1e-5)


def test_a_mixed_model_is_neither_trained_nor_measured() -> None:
    base = classifier(bert)
    lora = adapter(base, "lora")
    model = Model(lora=lora, local=lora, mix=Mix(torch.ones(2, 32), 0.5))
    for request in (Fit(model), Gradient(model, "train"), Calibrate(model, "train")):
        with pytest.raises(
            ModelError, match="a model that is mixed by nearness to anchors answers, but is not trained"
        ):
            said(base, request)


def test_a_mix_speaks_of_terms_that_are_there() -> None:
    with pytest.raises(ModelError, match="the mix speaks of the term 'local', which this model lacks"):
        Model(lora={}, mix=Mix(torch.ones(1, 2), 0.5))


def test_a_sample_is_drawn_anew_and_never_larger_than_the_data() -> None:
    base = classifier(bert)
    asks = [ask(base, Predict(Model(), "train", sample=5), data=TEXTS, key=root_key(i)) for i in (1, 1, 2)]
    first, again, other = (done.answer.logits for done in answers(base, asks))
    assert torch.equal(first, again) and not torch.equal(first, other) and len(first) == 5
    assert len(said(base, Predict(Model(), "train", sample=100)).logits) == len(TEXTS)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_shares_of_a_stack_are_each_clients_own_and_lie_between_nothing_and_the_weight(
    clients: int, inputs: int, anchors: int, seed: int
) -> None:
    key = root_key(seed)
    mixes = [Mix(key.fold("anchors", i).normal((anchors, 6)), 0.1 + 0.3 * i) for i in range(clients)]
    features = key.fold("features").normal((clients, inputs, 6))
    stacked = Mix.stack(mixes)
    found = stacked.shares(features)
    for i, mix in enumerate(mixes):
        own = mix.shares(features[i])
        assert torch.allclose(found["local"][i], own["local"]) and torch.allclose(found["lora"][i], own["lora"])
        assert float(own["local"].min()) >= 0 and float(own["local"].max()) <= float(mix.weight) + 1e-6
        assert torch.allclose(own["local"] + own["lora"], torch.ones(inputs))
        back = stacked.unstack(i, mix)
        assert torch.equal(back.anchors, mix.anchors) and back.weight == mix.weight


def test_a_mixed_model_survives_the_wire_copies_and_stacks() -> None:
    base = classifier(bert)
    lora, local = adapter(base, "lora"), adapter(base, "local")
    model = Model(lora=lora, local=local, mix=Mix(torch.ones(2, 4), 0.5, "lora", "local", "local"))
    for made in (
        decode(encode(model)),
        copied(model),
        model.with_parameters(model.parameters),
        Model.stack([model, model]).unstack(1, model),
    ):
        assert encode(made) == encode(model)
    assert model.signature != replace_mix(model, None).signature and model.only("lora").mix is None
