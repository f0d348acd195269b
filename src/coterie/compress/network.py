"""A whole network: its layers ranked while text streams through it, then cut to factors in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.compress.base import Compressor, Group, Loss, Ranking
from coterie.compress.calibration import Advance, Stream, blocks
from coterie.compress.factored import FactoredLinear, matrix, put, shape
from coterie.compress.inputs import Inputs, energy
from coterie.compress.ranked import OutputLoss, Ranked, order_of
from coterie.compress.ranks import check_ratio, parameters
from coterie.compress.svd_llm import fitted_left
from coterie.errors import ModelError
from coterie.protocol.parties import Layer


@dataclass(frozen=True)
class Compressed:
    """What a network was cut to: ranks by layer, layers that share their V, and ||(W - U V) X|| / ||W X|| by layer.

    X is the calibration text's input to the layer: in the network as it was, or, where U was fitted anew, in the
    compressed one.
    """

    ranks: dict[str, int]
    shared: list[list[str]]
    errors: dict[str, float]
    parameters: int
    parameters_before: int


def layers_in_blocks(network: nn.Module, names: Sequence[str]) -> dict[str, Layer]:
    """Those of the named layers that lie in the network's blocks, with their shapes, in the order of the blocks.

    Raises:
        ModelError: no blocks, or none of these layers in them.
    """
    found = [name for block in blocks(network) for name in names if name.startswith(f"{block}.")]
    if not found:
        raise ModelError(
            f"none of the chosen layers ({', '.join(list(names)[:4])}) lies in a block of {type(network).__name__}; "
            "embeddings, poolers and heads are never compressed"
        )
    return {name: shape(network.get_submodule(name)) for name in found}


def rank_layers(
    network: nn.Module,
    names: Sequence[str],
    method: Compressor,
    windows: Tensor,
    ratio: float,
    *,
    loss: Loss | None = None,
    advance: Advance | None = None,
) -> Ranking:
    """Decompose layers of a network, which stays as it is, block by block along the inputs that text gives them.

    Beside the network, memory holds the hidden states of all windows at one place, the Gram matrices of one block's
    inputs, and the lists made so far, in the network's dtype.

    Args:
        network: a transformer with one list of blocks, in eval mode.
        names: of plain linear layers.
        windows: token ids (N, L), without padding.
        ratio: the largest that models will be cut to.
        loss: of the methods that look at the whole network; the language model's own by default.
        advance: told the blocks that are done.

    Raises:
        ConfigError: a ratio outside (0, 1].
        ModelError: layers outside the blocks, a rank below 1, blocks that do not run one by one.
    """
    check_ratio(ratio)
    layers = layers_in_blocks(network, names)
    planned = method.planned(network, layers, windows, ratio, loss)
    stream = Stream(network, windows)
    lists: dict[Group, Ranked] = {}
    losses: dict[str, OutputLoss] = {}
    errors: dict[str, Tensor] = {}
    for index, block in enumerate(stream.blocks):
        inside = {group: rank for group, rank in planned.items() if group[0].startswith(f"{block}.")}
        weights = {group: torch.cat([_matrix(network, name) for name in group]) for group in inside}
        watched = {group: method.inputs(weights[group], rank) for group, rank in inside.items()}
        stream.step(block, {group[0]: inputs for group, inputs in watched.items()})
        for group, inputs in watched.items():
            terms = method.terms(group, weights[group], inputs)
            if not method.ranks_by_lists:
                terms = terms.cut(min(planned[group], len(terms)))
            lists[group] = terms.to(weights[group].dtype)
            for name, W, U in _members(group, weights[group], terms, layers):
                lost = OutputLoss.of(W, U, terms.V, inputs.gram)
                errors[name] = lost.errors().cpu()
                if method.looks_at_the_network(group):
                    losses[name] = lost
        if advance is not None:
            advance(index + 1, len(stream.blocks))
    again = {group: terms for group, terms in lists.items() if method.looks_at_the_network(group)}
    for group, scores in method.scores(network, again, windows, loss).items():
        lists[group] = lists[group].by(scores.to(lists[group].scores.device))
        for name in group:
            errors[name] = losses[name].errors(order_of(scores).to(losses[name].cross.device)).cpu()
    return Ranking(lists, layers, errors, ratio, planned)


def cut(
    network: nn.Module,
    ranking: Ranking,
    method: Compressor,
    ratio: float,
    windows: Tensor | None = None,
    *,
    advance: Advance | None = None,
) -> Compressed:
    """Put factors in the place of the ranked layers, in place; no matrix stays behind.

    windows: the calibration text, needed where the method fits U anew, `Compressor.refits`.

    Raises:
        ConfigError: a ratio outside (0, 1].
        ModelError: a ratio above the one that was decomposed for, a rank below 1, or a refit without text.
    """
    check_ratio(ratio)
    ranks = method.ranks(ranking, ratio)
    for group, rank in ranks.items():
        if rank > len(ranking.lists[group]):
            raise ModelError(
                f"layer {group[0]}: rank {rank} at ratio {ratio:g}, and only {len(ranking.lists[group])} terms were "
                f"made, at ratio {ranking.ratio:g}; decompose at the largest ratio"
            )
    if method.refits:
        if windows is None:
            raise ModelError(f"{method.title} with update needs the calibration text again")
        errors = _cut_and_fitted(network, ranking, ranks, windows, advance)
    else:
        for group, rank in ranks.items():
            _place(network, group, ranking.lists[group].cut(rank), ranking.layers)
        errors = {name: ranking.error(name, rank) for group, rank in ranks.items() for name in group}
    return Compressed(
        ranks={name: rank for group, rank in ranks.items() for name in group},
        shared=[list(group) for group in ranks if len(group) > 1],
        errors=errors,
        parameters=sum(parameters(ranking.shape(group), rank) for group, rank in ranks.items()),
        parameters_before=sum(layer.d_out * layer.d_in for layer in ranking.layers.values()),
    )


def _cut_and_fitted(
    network: nn.Module, ranking: Ranking, ranks: Mapping[Group, int], windows: Tensor, advance: Advance | None
) -> dict[str, float]:
    """Cut block by block, each U fitted to what the blocks before, cut and fitted, let through."""
    stream = Stream(network, windows)
    errors: dict[str, float] = {}
    for index, block in enumerate(stream.blocks):
        inside = [group for group in ranks if group[0].startswith(f"{block}.")]
        weights = {group: torch.cat([_matrix(network, name) for name in group]) for group in inside}
        for group in inside:
            _place(network, group, ranking.lists[group].cut(ranks[group]), ranking.layers)
        watched = {group: Inputs() for group in inside}
        stream.watch(block, {group[0]: inputs for group, inputs in watched.items()})
        for group, inputs in watched.items():
            terms = ranking.lists[group].cut(ranks[group])
            U = fitted_left(weights[group], terms.V, inputs.gram)
            fitted = Ranked(U.to(terms.U.dtype), terms.V, terms.scores)
            for name, W, own in _members(group, weights[group], fitted, ranking.layers):
                network.get_submodule(name).U.data = own.contiguous()
                lost = energy(W.double() - own.double() @ terms.V.double(), inputs.gram)
                whole = energy(W, inputs.gram)
                errors[name] = lost / whole if whole > 0 else 0.0
        stream.step(block)
        if advance is not None:
            advance(index + 1, len(stream.blocks))
    return {name: errors[name] for group in ranks for name in group}


def _place(network: nn.Module, group: Group, terms: Ranked, layers: Mapping[str, Layer]) -> None:
    """Factors for the layers of a group, which share their V; storage of their own, so that the list can go."""
    V = nn.Parameter(terms.V.clone(memory_format=torch.contiguous_format), requires_grad=False)
    for name, U in zip(group, terms.rows([layers[name].d_out for name in group]), strict=True):
        bias = getattr(network.get_submodule(name), "bias", None)
        kept = U.clone(memory_format=torch.contiguous_format)
        put(network, name, FactoredLinear(kept, V, None if bias is None else bias.detach()))


def _members(
    group: Group, W: Tensor, terms: Ranked, layers: Mapping[str, Layer]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    sizes = [layers[name].d_out for name in group]
    yield from zip(group, torch.split(W, sizes), terms.rows(sizes), strict=True)


def _matrix(network: nn.Module, name: str) -> Tensor:
    return matrix(network.get_submodule(name)).detach()
