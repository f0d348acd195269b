"""Clusters of clients: who is alike, what a cluster becomes, and how many experts a federation can have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fixtures import card, t1, t2, term, uploads
from coterie.algorithms.clustered import ExpertCount, centres, cluster_means, mean_of_members, members, nearest_cluster
from coterie.errors import ConfigError
from coterie.maths.keys import root_key
from coterie.protocol import Adapter, Federation, LowRank
from coterie.wire.codec import encode


def pointing(*B: float) -> Adapter:
    """An adapter whose B is this column, beside one A for all."""
    return {"w": term([[one] for one in B], [[1, 1]])}


GROUPS = {"a": pointing(1, 0), "b": pointing(2, 0.1), "c": pointing(0, 1), "d": pointing(0.1, 3), "e": pointing(1, 0.1)}


def test_clients_whose_B_point_alike_are_one_cluster_whatever_their_length() -> None:
    clusters, score = ExpertCount().clustered_by_B(GROUPS)
    assert clusters == {"a": "0", "b": "0", "c": "1", "d": "1", "e": "0"} and score > 0.9


def test_A_does_not_count() -> None:
    turned = {name: {"w": LowRank(one["w"].B, one["w"].A * torch.tensor([1.0, -9.0]))} for name, one in GROUPS.items()}
    turned["a"] = GROUPS["a"]
    assert ExpertCount().clustered_by_B(turned) == ExpertCount().clustered_by_B(GROUPS)


def test_a_number_that_is_given_needs_no_silhouette_and_clients_bound_it() -> None:
    three, score = ExpertCount(experts=3).clustered_by_B(GROUPS)
    assert len(set(three.values())) == 3 and score == 0.0
    two = {name: GROUPS[name] for name in "ac"}
    assert set(ExpertCount(experts=5).clustered_by_B(two)[0].values()) == {"0", "1"}
    assert set(ExpertCount(experts=1).clustered_by_B(GROUPS)[0].values()) == {"0"}


@pytest.mark.parametrize("names", ["a", "ac"])
def test_fewer_than_three_clients_are_one_cluster(names: str) -> None:
    clusters, score = ExpertCount().clustered_by_B({name: GROUPS[name] for name in names})
    assert set(clusters.values()) == {"0"} and score == 0.0


def test_a_cluster_starts_from_the_equal_mean_of_its_members() -> None:
    sent = list(uploads(t1() | {"3": term([[0], [4]], [[0, 2]])}, {"1": 0.5, "2": 0.4, "3": 0.1}))
    made = cluster_means(sent, {"1": "0", "2": "1", "3": "1"})
    assert list(made) == ["0", "1"]
    assert torch.equal(made["0"]["w"].B, t1()["1"].B)
    assert made["1"]["w"].B.tolist() == [[0.0], [2.5]] and made["1"]["w"].A.tolist() == [[0.0, 1.5]]


def test_a_newcomer_joins_the_cluster_whose_B_is_nearest_and_of_equals_the_first() -> None:
    known = centres({name: GROUPS[name] for name in "ac"})
    assert nearest_cluster(known, pointing(0.2, 5)) == "c"
    assert nearest_cluster(known, pointing(9, 1)) == "a"
    assert nearest_cluster(known, pointing(1, 1)) == "a"


def test_members_count_with_their_own_weights_and_those_of_weight_zero_do_not() -> None:
    sent = uploads(t1() | {"3": t1()["1"]}, {"1": 0.6, "2": 0.2, "3": 0.0})
    there = members(sent, lambda one: one.card.id != "2")
    assert [(one.card.id, one.weight) for one in there] == [("1", 1.0)]
    assert not len(members(sent, lambda one: one.card.id == "3"))


def test_a_cluster_moves_to_the_weighted_mean_of_its_members_and_stays_without_any() -> None:
    before = {"w": term([[5], [5]], [[5, 5]])}
    made = mean_of_members(before, uploads(t1(), {"1": 0.75, "2": 0.25}), lambda sent: sent)
    assert made["w"].B.tolist() == [[0.75], [0.25]]
    nobody = members(uploads(t1()), lambda one: False)
    assert mean_of_members(before, nobody, lambda sent: sent) is before


def test_members_of_lower_rank_are_padded_to_the_cluster_s() -> None:
    before = {"w": t2()["2"]}
    made = mean_of_members(before, uploads(t2(), {"1": 1.0, "2": 1.0}), lambda sent: sent)
    assert made["w"].rank == 2 and made["w"].B.tolist() == [[1.0, 0.0], [0.0, 0.5]]


def test_a_layer_that_no_member_has_stays_to_the_bit() -> None:
    before = {"w": t1()["1"], "other": t1()["2"]}
    made = mean_of_members(before, uploads({"1": t1()["1"]}), lambda sent: sent)
    assert encode(made["other"]) == encode(before["other"])


def test_no_more_experts_than_the_clustering_can_find_are_counted() -> None:
    def found(method: ExpertCount, clients: int) -> int:
        members = tuple(card(str(i), 1) for i in range(clients))
        return method.in_federation(Federation(members, 1)).most

    assert [found(ExpertCount(), n) for n in (1, 2, 3, 4, 9)] == [1, 1, 2, 3, 4]
    assert [found(ExpertCount(experts=3), n) for n in (1, 2, 9)] == [1, 2, 3]
    assert ExpertCount().most == 4 and ExpertCount(experts=2).most == 2


def test_numbers_that_cannot_be_meant_are_refused() -> None:
    odd: tuple[dict[str, Any], ...] = ({"max_experts": 1}, {"experts": 0})
    for options in odd:
        with pytest.raises(ConfigError, match="for a single cluster set experts to 1"):
            ExpertCount(**options)


def test_layers_of_different_shapes_are_compared_one_by_one() -> None:
    """The mean over layers: two layers that agree outweigh the long one that does not."""
    key, made = root_key(0), {}
    for name, group in (("a", 0), ("b", 0), ("c", 1), ("d", 1)):
        lora = {layer: key.fold(layer, group).normal((4, 2)) for layer in ("x", "y")} | {
            "long": key.fold(name).normal((400, 2))
        }
        made[name] = {layer: LowRank(B, torch.ones(2, 3)) for layer, B in lora.items()}
    assert ExpertCount().clustered_by_B(made)[0] == {"a": "0", "b": "0", "c": "1", "d": "1"}
