"""The contract of a compressor: how a weight becomes ranked terms, and how many of them each layer keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coterie.compress.inputs import Inputs
from coterie.compress.ranked import Ranked
from coterie.compress.ranks import rank_of
from coterie.errors import ModelError
from coterie.protocol.parties import Layer

Group = tuple[str, ...]
"""Layers of one input that are decomposed as one matrix, their rows one below the other; mostly a single layer."""

_NOTHING = -100
"""The label of a place where nothing is predicted."""

Loss = Callable[[nn.Module, Tensor], Tensor]
"""(network, windows (b, L)) -> the scalar loss by which terms are scored and positions learnt."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """All chosen layers as ranked lists, of which models of several ratios are slices.

    lists: by group. layers: the shapes, by layer. errors: ||(W - U_k V_k) X|| of the calibration text for k = 0, 1, …
    by layer, (q + 1,) float64. planned: by group, the ranks at `ratio` that were known before the lists were made;
    lists end there, unless the method's ranks depend on the lists.
    """

    lists: Mapping[Group, Ranked]
    layers: Mapping[str, Layer]
    errors: Mapping[str, Tensor]
    ratio: float
    planned: Mapping[Group, int]

    def shape(self, group: Group) -> Layer:
        """The stacked matrix of a group."""
        return stacked_shape(group, self.layers)

    def error(self, layer: str, rank: int) -> float:
        """||(W - U_k V_k) X|| / ||W X||, 0 where the layer gives nothing."""
        errors = self.errors[layer]
        return float(errors[rank] / errors[0]) if float(errors[0]) > 0 else 0.0


class Compressor(ABC):
    """A method of compression, in the order in which it is asked."""

    title: ClassVar[str]
    paper: ClassVar[str]
    ranks_by_lists: ClassVar[bool] = False
    """Whether `ranks` looks at the lists, which are kept whole then."""

    def groups(self, layers: Mapping[str, Layer]) -> list[Group]:
        """Which layers are decomposed together; each alone, unless a method joins some."""
        return [(name,) for name in layers]

    def planned(
        self, network: nn.Module, layers: Mapping[str, Layer], windows: Tensor, ratio: float, loss: Loss | None
    ) -> dict[Group, int]:
        """The ranks at a ratio before anything is decomposed: that of `rank_of`, unless a method learns them."""
        return {group: rank_of(said(group), stacked_shape(group, layers), ratio) for group in self.groups(layers)}

    def inputs(self, W: Tensor, rank: int) -> Inputs:
        """What is to be kept of the inputs of a layer W (d_out, d_in) that shall get `rank` terms: their moments."""
        return Inputs()

    @abstractmethod
    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        """W (d_out, d_in) as a ranked list, in float64."""

    def looks_at_the_network(self, group: Group) -> bool:
        """Whether `scores` ranks a group's terms anew."""
        return False

    def scores(
        self, network: nn.Module, lists: Mapping[Group, Ranked], windows: Tensor, loss: Loss | None
    ) -> dict[Group, Tensor]:
        """New scores (q,) of the terms of the groups that `looks_at_the_network` names; lists: of these."""
        return {}

    def ranks(self, ranking: Ranking, ratio: float) -> dict[Group, int]:
        """How many terms each group keeps; the same share of every layer's parameters, unless a method says else."""
        return {group: rank_of(said(group), ranking.shape(group), ratio) for group in ranking.lists}

    @property
    def refits(self) -> bool:
        """Whether U is fitted anew, block by block, to the inputs that a compressed network really has."""
        return False


def stacked_shape(group: Group, layers: Mapping[str, Layer]) -> Layer:
    """The shape of a group's layers one below the other."""
    return Layer(sum(layers[name].d_out for name in group), layers[group[0]].d_in)


def said(group: Group) -> str:
    """A group in an error message."""
    return " + ".join(group)


def language_loss(network: nn.Module, windows: Tensor) -> Tensor:
    """The mean cross-entropy of every next token of the windows (b, L), but those below 0, which are of images.

    Raises:
        ModelError: a network that predicts no tokens.
    """
    logits = getattr(network(input_ids=windows), "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != windows.shape:
        raise ModelError(
            f"{type(network).__name__} predicts no next token, and this method asks for a language model's loss; "
            "choose svd, asvd, svd-llm, svd-llm-v2 or dobi with learned=false"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    following = windows[:, 1:].flatten()
    following = following.where(following >= 0, _NOTHING)
    return torch.nn.functional.cross_entropy(logits[:, :-1].to(wide).flatten(0, 1), following, ignore_index=_NOTHING)
