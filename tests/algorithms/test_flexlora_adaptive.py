"""FlexLoRA with rank updates: FlexLoRA without one, who is sent which rank, what the server learns."""

from __future__ import annotations

from typing import Any

import torch
from conformance.harness import LAYERS, Outcome, best, cards, dense, gap, ideal, play, random_training

from algorithms.test_rank_update import decaying
from coterie.algorithms import FlexLoRA, FlexLoRAAdaptive
from coterie.algorithms.rank_update import ranks_of
from coterie.protocol import Federation

MEMBERS = cards({"a": 2, "b": 4})


def following(method: FlexLoRAAdaptive, before: Outcome | None, number: int, training: Any, **options: Any) -> Outcome:
    last: dict[str, Any] = {} if before is None else {"state": before.state, "memories": before.memories}
    return play(method, options.pop("members", MEMBERS), training, number=number, **last, **options)


def test_flexlora_without_an_update_is_flexlora_to_the_bit() -> None:
    members = cards({"a": 1, "b": 2, "c": 4})
    adaptive, plain = play(FlexLoRAAdaptive(), members, random_training()), play(FlexLoRA(), members, random_training())
    for name, term in plain.state.lora.items():
        assert torch.equal(adaptive.state.lora[name].B, term.B) and torch.equal(adaptive.state.lora[name].A, term.A)


def test_flexlora_s_ranks_shrink_in_an_update_round_stay_and_grow_again_at_the_next() -> None:
    members, method = cards({"a": 2, "b": 4}), FlexLoRAAdaptive(update_every=2)
    outcome, seen = None, []
    for number, share in ((1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1), (5, 0.9), (6, 0.1)):
        last = outcome
        outcome = play(
            method,
            members,
            decaying(share),
            number=number,
            state=last.state if last else None,
            memories=last.memories if last else None,
        )
        entered = {name: ranks_of(model["lora"])["first"] for name, model in outcome.fitted.items()}
        sent = {name: ranks_of(payload)["first"] for name, payload in outcome.payloads.items()}
        seen.append((entered, sent))
    full, one, three = {"a": 2, "b": 4}, {"a": 1, "b": 1}, {"a": 2, "b": 4}
    assert seen == [(full, full), (full, full), (full, one), (one, one), (full, three), (three, three)]
    assert outcome is not None and outcome.memories == {"a": {}, "b": {}}
    told = method.measures(outcome.state, None, dict.fromkeys("ab"))  # type: ignore[arg-type]
    assert told == {"average_rank": 3.0}


def test_a_shrunk_client_is_sent_the_best_product_of_its_rank() -> None:
    method = FlexLoRAAdaptive(update_every=1)
    first = following(method, None, 1, random_training())
    second = following(method, first, 2, decaying(0.1))
    third = following(FlexLoRAAdaptive(update_every=9), second, 3, random_training())
    shrunk = [best(ideal(second, {name: 1.0}), 1) for name in ("a", "b")]
    whole = {layer: (shrunk[0][layer] + shrunk[1][layer]) / 2 for layer in LAYERS}
    for name in ("a", "b"):
        assert ranks_of(third.downloads[name]) == dict.fromkeys(LAYERS, 1)
        assert gap({layer: dense(term) for layer, term in third.downloads[name].items()}, best(whole, 1)) < 1e-5


def test_who_was_absent_in_an_update_round_keeps_the_rank_that_the_server_knows() -> None:
    method = FlexLoRAAdaptive(update_every=1)
    first = following(method, None, 1, random_training())
    second = following(method, first, 2, decaying(0.1))
    third = following(method, second, 3, random_training(), members=MEMBERS[:1])
    assert third.state.ranks == {"a": dict.fromkeys(LAYERS, 2), "b": dict.fromkeys(LAYERS, 1)}


def test_per_layer_every_layer_has_a_rank_of_its_own() -> None:
    def steep_first(name: str, model: Any) -> Any:
        flat, steep = decaying(1.0)(name, model), decaying(0.1)(name, model)
        return type(model)(lora={"first": steep["lora"]["first"], "second": flat["lora"]["second"]})

    for per_layer, wanted in ((True, {"first": 1, "second": 4}), (False, {"first": 4, "second": 4})):
        method = FlexLoRAAdaptive(update_every=1, per_layer=per_layer)
        outcome = following(method, following(method, None, 1, random_training()), 2, steep_first)
        assert outcome.state.ranks["b"] == wanted


def test_the_average_rank_is_over_those_who_answered() -> None:
    method = FlexLoRAAdaptive()
    state = following(method, None, 1, random_training()).state
    federation = Federation(tuple(MEMBERS), 1)
    assert method.measures(state, federation, dict.fromkeys("ab")) == {"average_rank": 3.0}  # type: ignore[arg-type]
    assert method.measures(state, federation, dict.fromkeys("b")) == {"average_rank": 4.0}  # type: ignore[arg-type]
