"""QSVD: query, key and value as one matrix with one V, ranks by what each singular value is worth to the loss.

QSVD, arXiv 2510.16292. W_q, W_k, W_v stand one below the other, (3 m, n), or as many rows as they really have; one SVD
gives three U and a V that is common to them. Each singular value is scored by sigma |dL/dsigma|, the gradient as the
root mean square over batches of text; the best scores over all layers are kept, until k (3 m + n) parameters of each
add up to the ratio. Only a language model has such a loss.
Deviations: quantisation is left out; no layer keeps less than one term; layers other than query, key and value, of
which the paper does not speak, get ASVD at the uniform ratio; inputs are scaled as ASVD does, unless `scaling` says
otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from coterie.compress.asvd import channel_scaled
from coterie.compress.base import Compressor, Group, Loss, Ranking, language_loss, said
from coterie.compress.calibration import batched
from coterie.compress.factored import shape
from coterie.compress.inputs import Inputs
from coterie.compress.ranked import Ranked, ranked_svd
from coterie.compress.ranks import parameters, rank_of
from coterie.compress.svd_llm import whitened
from coterie.errors import ModelError
from coterie.protocol.parties import Layer

TRIPLES = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin"))
"""How networks call query, key and value."""

FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv")
"""How networks call one layer that is all three."""


def attention_groups(layers: Mapping[str, Layer]) -> list[Group]:
    """Query, key and value of each place that has all three among `layers`, and layers that are all three in one."""
    by_place: dict[str, dict[str, str]] = defaultdict(dict)
    for name in layers:
        place, _, last = name.rpartition(".")
        by_place[place][last] = name
    found: list[Group] = []
    for parts in by_place.values():
        found += [tuple(parts[last] for last in triple) for triple in TRIPLES if set(triple) <= set(parts)]
        found += [(parts[last],) for last in FUSED if last in parts]
    return found


def term_gradients(
    network: nn.Module, lists: Mapping[Group, Ranked], windows: Tensor, loss: Loss
) -> dict[Group, Tensor]:
    """sigma_j |dL/dsigma_j| of every term, the gradient as the root mean square over batches: (q,) by group.

    With terms u_j v_j that hold sigma_j, sigma_j dL/dsigma_j = u_j^T (dL/dW) v_j. Each dL/dW is dropped as soon as
    it has been looked at.
    """
    squares = {group: torch.zeros(len(terms), dtype=torch.float64) for group, terms in lists.items()}
    sums: dict[Group, Tensor] = {}
    hooks: list[Any] = []

    def hook(group: Group, module: nn.Module, U: Tensor, V: Tensor) -> Any:
        def after(parameter: Tensor) -> None:
            assert parameter.grad is not None
            gradient = parameter.grad.mT if hasattr(module, "nf") else parameter.grad
            found = ((U.mT.to(gradient.dtype) @ gradient) * V.to(gradient.dtype)).sum(dim=-1)
            sums[group] = sums.get(group, torch.zeros(())) + found.double().cpu()
            parameter.grad = None

        return after

    watched: list[nn.Parameter] = []
    for group, terms in lists.items():
        modules = [network.get_submodule(name) for name in group]
        for module, U in zip(modules, terms.rows([shape(module).d_out for module in modules]), strict=True):
            weight = cast(nn.Parameter, module.weight)
            weight.requires_grad_(True)
            watched.append(weight)
            after = hook(group, module, U, terms.V)
            hooks.append(weight.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
    device = watched[0].device
    batches = batched(windows)
    try:
        with torch.enable_grad():
            for batch in batches:
                sums.clear()
                loss(network, batch.to(device)).backward()  # type: ignore[no-untyped-call]
                for group, found in sums.items():
                    squares[group] += found.square()
    finally:
        for handle in hooks:
            handle.remove()
        for weight in watched:
            weight.requires_grad_(False)
            weight.grad = None
    return {group: (total / len(batches)).sqrt() for group, total in squares.items()}


@dataclass(frozen=True)
class QSVD(Compressor):
    """One decomposition for query, key and value, ranks by gradient (arXiv 2510.16292).

    scaling: of the inputs before the joint SVD: not at all, by ASVD's diagonal, or whitened as in SVD-LLM.
    """

    title = "QSVD"
    paper = "arXiv 2510.16292"
    ranks_by_lists = True

    scaling: Literal["none", "diagonal", "whitened"] = "diagonal"

    def groups(self, layers: Mapping[str, Layer]) -> list[Group]:
        """Raises ModelError where nothing among the layers is query, key and value."""
        joint = attention_groups(layers)
        if not joint:
            raise ModelError(
                f"QSVD joins query, key and value, and finds no three of them among {', '.join(list(layers)[:4])}…; "
                "choose all of them, or another method"
            )
        taken = {name for group in joint for name in group}
        return joint + [(name,) for name in layers if name not in taken]

    def planned(
        self, network: nn.Module, layers: Mapping[str, Layer], windows: Tensor, ratio: float, loss: Loss | None
    ) -> dict[Group, int]:
        """As of any method; a network that has no such loss is refused here, before anything is decomposed."""
        ranks = super().planned(network, layers, windows, ratio, loss)
        with torch.no_grad():
            (loss or language_loss)(network, windows[:1].to(next(network.parameters()).device))
        return ranks

    def terms(self, group: Group, W: Tensor, inputs: Inputs) -> Ranked:
        if not _joint(group) or self.scaling == "diagonal":
            return channel_scaled(W, inputs.magnitude, 0.5)
        return ranked_svd(W) if self.scaling == "none" else whitened(W, inputs.gram)

    def looks_at_the_network(self, group: Group) -> bool:
        return _joint(group)

    def scores(
        self, network: nn.Module, lists: Mapping[Group, Ranked], windows: Tensor, loss: Loss | None
    ) -> dict[Group, Tensor]:
        return term_gradients(network, lists, windows, loss or language_loss)

    def ranks(self, ranking: Ranking, ratio: float) -> dict[Group, int]:
        joint = {group: terms.scores for group, terms in ranking.lists.items() if _joint(group)}
        ranks = {group: rank_of(said(group), ranking.shape(group), ratio) for group in ranking.lists}
        return ranks | best_scores(joint, {group: ranking.shape(group) for group in joint}, ratio)


def best_scores(scores: Mapping[Group, Tensor], shapes: Mapping[Group, Layer], ratio: float) -> dict[Group, int]:
    """How many of each group's scores (q,), descending, are among the best of all that the parameters pay for.

    Each group keeps its first; sets of a smaller ratio are contained in those of a larger one.
    """
    budget = ratio * sum(shape.d_out * shape.d_in for shape in shapes.values())
    ranks = dict.fromkeys(scores, 1)
    spent = sum(parameters(shapes[group], 1) for group in scores)
    rest = [
        (-float(score), index, group) for group, all_ in scores.items() for index, score in enumerate(all_) if index
    ]
    for _, _, group in sorted(rest, key=lambda found: found[:2]):
        spent += parameters(shapes[group], 1)
        if spent > budget * (1 + 1e-12):
            break
        ranks[group] += 1
    return ranks


def _joint(group: Group) -> bool:
    return len(group) > 1 or group[0].rpartition(".")[2] in FUSED
