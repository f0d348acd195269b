"""How well trained experts reconstruct clients' updates beyond the exact model: residuals and coordinates, B.2.

Blocks may be anything of one shape, here the B of one layer: experts (M, l, r), updates (N, l, r), weights (N, M) that
sum to one in each row. What the paper defines for three experts is done for any number of at least two. All is computed
in fp64, on differences from the experts' mean, which no such weights change and which keep their digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.theory.fedsee.extraction import mixtures
from coterie.theory.fedsee.geometry import barycentres, diameter, distances


def residuals(updates: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """R_i(w) = ||B_i - sum_m w_im B_m||_F / D (N,), D the largest distance of two experts.

    Raises:
        ValueError: experts that are all the same, which have no D.
    """
    updates, experts = _centred(updates, experts)
    apart = updates - barycentres(weights.double(), experts)
    found: Tensor = apart.flatten(1).norm(dim=1) / _extent(experts)
    return found


def affine_weights(updates: Tensor, experts: Tensor) -> Tensor:
    """The weights (N, M) of the nearest point of the experts' affine hull; of several equal ones the shortest."""
    updates, experts = _centred(updates, experts)
    edges = (experts[1:] - experts[0]).flatten(1)
    beyond = torch.linalg.lstsq(edges.T, (updates - experts[0]).flatten(1).T, driver="gelsd").solution.T
    return torch.cat([1 - beyond.sum(dim=1, keepdim=True), beyond], dim=1)


def convex_weights(updates: Tensor, experts: Tensor) -> Tensor:
    """alpha hat (N, M), the weights of the nearest point of the experts' simplex."""
    updates, experts = _centred(updates, experts)
    extent = _extent(experts)
    return mixtures(updates / extent, experts / extent, torch.eye(experts.shape[-1], dtype=torch.float64))


def derangements(weights: Tensor) -> Tensor:
    """The shuffled controls (M - 1, N, M): every entry moved on by 1 to M - 1 experts, so that none keeps its own."""
    return torch.stack([weights.roll(shift, dims=1) for shift in range(1, weights.shape[1])])


def plane_coordinates(points: Tensor, experts: Tensor) -> Tensor:
    """The points (N, l, r) projected onto the experts' affine hull and written in its coordinates over D, (N, M - 1).

    The first expert is the origin; axis m goes from it towards expert m + 1, less what lies along earlier axes. So the
    experts' own distances stay, over D.

    Raises:
        ValueError: experts that do not span M - 1 dimensions.
    """
    points, experts = _centred(points, experts)
    extent = _extent(experts)
    edges = (experts[1:] - experts[0]).flatten(1) / extent
    axes, triangle = torch.linalg.qr(edges.T)
    lengths = triangle.diagonal()
    if float(lengths.abs().min()) < 1e-9:
        raise ValueError(f"{len(experts)} experts that span fewer than {len(experts) - 1} dimensions have no plane")
    found: Tensor = ((points - experts[0]).flatten(1) / extent) @ (axes * lengths.sign())
    return found


def _centred(updates: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    wide = experts.double()
    middle = wide.mean(dim=0)
    return updates.double() - middle, wide - middle


def _extent(experts: Tensor) -> float:
    """D of `residuals`."""
    if len(experts) < 2 or not float(distances(experts, experts).max()) > 0:
        raise ValueError("residuals are told in the largest distance of two experts, which must not be zero")
    return diameter(experts)
