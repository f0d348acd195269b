"""SeFoRA-Plus: SeFoRA's message, read with less loss."""

from __future__ import annotations

import pytest
import torch
from conformance.harness import Outcome, best, cards, deployed, gap, ideal, play, random_training

from coterie.algorithms import Algorithm, SeFoRA, SeFoRAPlus
from coterie.errors import ConfigError
from coterie.experiments.methods import algorithm
from coterie.protocol import Layer
from coterie.wire.codec import encode

LAYERS = {"first": Layer(40, 30), "second": Layer(32, 32)}
EQUAL = dict.fromkeys("abcd", 1.0)


def errors(method: Algorithm, spread: float, seeds: range = range(8)) -> list[float]:
    """Relative losses of four clients of rank 4 whose factors are one common pair plus `spread` of their own."""

    def trained(seed: int) -> object:
        own = random_training(seed)

        def made(name: str, model: object) -> object:
            mine, common = own(name, model).parameters, own("common", model).parameters  # type: ignore[arg-type]
            mixed = {part: common[part] + spread * mine[part] for part in mine}
            return model.with_parameters(mixed)  # type: ignore[attr-defined]

        return made

    found = []
    for seed in seeds:
        outcome = play(method, cards(dict.fromkeys("abcd", 4), layers=LAYERS), trained(seed), number=seed + 1)  # type: ignore[arg-type]
        found.append(lost(method, outcome))
    return found


def lost(method: Algorithm, outcome: Outcome) -> float:
    made, whole = deployed(method, outcome), ideal(outcome, EQUAL)
    assert made is not None
    return (
        sum(float((made[x] - whole[x]).square().sum()) for x in whole)
        / sum(float(w.square().sum()) for w in whole.values())
    ) ** 0.5


@pytest.mark.parametrize(("spread", "at_most"), [(1.0, 0.8), (10.0, 0.7)])
def test_at_the_very_bytes_of_sefora_it_loses_far_less_where_clients_differ(spread: float, at_most: float) -> None:
    plain, plus = errors(SeFoRA(), spread), errors(SeFoRAPlus(oversample=0), spread)
    assert sum(plus) < at_most * sum(plain)


def test_where_clients_agree_the_two_lose_about_the_same() -> None:
    """Neither is better on the whole: medians of draws, since at k = r + 2 a mean is that of its worst draw."""
    seeds = range(24)
    plain, plus = (sorted(errors(one, 0.3, seeds))[12] for one in (SeFoRA(), SeFoRAPlus(oversample=0)))
    assert 0.8 * plain < plus < 1.2 * plain


def test_dissimilar_clients_break_sefora_and_not_sefora_plus() -> None:
    assert max(errors(SeFoRA(), 10.0)) > 1.0 > max(errors(SeFoRAPlus(), 10.0))


def test_without_oversampling_the_upload_is_sefora_s_to_the_bit() -> None:
    members = cards({"a": 1, "b": 4}, layers=LAYERS)
    one = play(SeFoRA(), members, random_training())
    two = play(SeFoRAPlus(oversample=0), members, random_training())
    assert encode(one.payloads) == encode(two.payloads)


def test_what_has_rank_r_comes_back_exactly_whatever_the_oversampling() -> None:
    members = cards({"a": 2, "b": 2}, layers=LAYERS)
    for oversample in (0, 1, 5):
        method = SeFoRAPlus(rank=4, oversample=oversample)
        outcome = play(method, members, random_training())
        made = deployed(method, outcome)
        assert made is not None and gap(made, ideal(outcome, {"a": 1.0, "b": 1.0})) < 1e-5


def test_with_columns_for_the_whole_rank_it_is_the_best_rank_r_product() -> None:
    members = cards(dict.fromkeys("abcd", 2), layers=LAYERS)
    method = SeFoRAPlus(oversample=6)
    outcome = play(method, members, random_training())
    made = deployed(method, outcome)
    assert made is not None and gap(made, best(ideal(outcome, EQUAL), 2)) < 1e-5


def test_the_deployed_B_is_orthonormal_and_of_rank_r() -> None:
    outcome = play(SeFoRAPlus(), cards({"a": 1, "b": 4}, layers=LAYERS), random_training())
    for term in outcome.state.lora.values():
        assert term.rank == 4 and torch.allclose(term.B.mT @ term.B, torch.eye(4), atol=1e-6)


def test_bytes_are_those_of_the_wider_sketch() -> None:
    layer, one = Layer(1024, 768), cards({"a": 16})[0]
    assert SeFoRAPlus().bytes_up(layer, one) == (18 * 1024 + 20 * 768) * 4
    assert SeFoRAPlus(oversample=4, k=28).bytes_up(layer, one) == (20 * 1024 + 28 * 768) * 4
    assert SeFoRAPlus().bytes_down(layer, one) == SeFoRA().bytes_down(layer, one)


def test_options_out_of_range_are_told() -> None:
    with pytest.raises(ConfigError, match="oversample must not be negative"):
        algorithm("sefora-plus", {"oversample": -1})
    with pytest.raises(ConfigError, match="k must be above 19 for rank 16"):
        algorithm("sefora-plus", {"rank": 16, "k": 19})
