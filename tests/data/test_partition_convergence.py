"""Shares of examples converge to the Dirichlet draws, and these have that distribution, within derived bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_distribution

from coterie.data.holdings import statistics
from coterie.data.partition import Partition, dirichlet, quantity
from coterie.maths.apportion import dirichlet_shares
from coterie.maths.keys import Key, root_key

few = settings(deadline=None, max_examples=30)
BETAS = [0.1, 0.5, 1.0, 10.0]
MISTAKE = 1e-6
"""The probability with which a correct draw would miss a bound."""


def class_shares(parts: Partition, labels: np.ndarray) -> np.ndarray:
    """(classes, clients): of each class, the share that each client holds."""
    histogram = np.array(statistics(parts, labels)["histogram"]).T
    return histogram / histogram.sum(axis=1, keepdims=True)


@few
@given(st.integers(0, 2**32), st.sampled_from([1e-3, *BETAS, 1e3]), st.integers(1, 12), st.integers(1, 400))
def test_of_each_class_every_client_holds_its_draw_up_to_one_example(
    seed: int, beta: float, clients: int, each: int
) -> None:
    """So that the shares converge to the draw as 1 / n: whole numbers by largest remainder are off by less than one."""
    labels, key = np.repeat([0, 1, 2], each), root_key(seed)
    found = class_shares(dirichlet(labels, clients, beta, key, minimum=0), labels)
    drawn = np.stack([dirichlet_shares(clients, beta, key.fold("shares", kind)) for kind in range(3)])
    assert np.abs(found - drawn).max() < (1 + 1e-9) / each


@few
@given(st.integers(0, 2**32), st.sampled_from(BETAS), st.integers(1, 5), st.sampled_from([0, 3]))
def test_a_minimum_moves_no_more_than_what_the_poor_lack(seed: int, beta: float, clients: int, minimum: int) -> None:
    labels, key = np.repeat([0, 1], 500), root_key(seed)
    histogram = [
        np.array(statistics(dirichlet(labels, clients, beta, key, least), labels)["histogram"])
        for least in (0, minimum)
    ]
    lacked = np.maximum(minimum - histogram[0].sum(axis=1), 0).sum()
    assert np.abs(histogram[1] - histogram[0]).sum() == 2 * lacked


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("by", ["class", "size"])
def test_the_share_of_one_client_has_the_beta_distribution_of_a_dirichlet_draw(beta: float, by: str) -> None:
    """By the inequality of Dvoretzky, Kiefer and Wolfowitz (Massart's constant): with probability 1 - MISTAKE the
    empirical distribution of n draws is nowhere farther off than sqrt(ln(2 / MISTAKE) / (2 n)). A count is off by
    less than one example, which moves the distribution's argument, not its value."""
    clients, draws, each = 5, 400, 1000
    key = root_key(11)
    if by == "class":
        labels = np.repeat(np.arange(draws), each)
        shares = class_shares(dirichlet(labels, clients, beta, key, minimum=0), labels)[:, 0]
    else:
        labels = np.zeros(each, dtype=np.int64)
        parts = [quantity(labels, clients, beta, key.fold(draw), minimum=0) for draw in range(draws)]
        shares = np.array([len(part[0]) / each for part in parts])
    bound = math.sqrt(math.log(2 / MISTAKE) / (2 * draws))
    exact = beta_distribution(beta, (clients - 1) * beta)
    ordered, steps = np.sort(shares), np.arange(draws + 1) / draws
    assert (steps[1:] - exact.cdf(ordered + 1 / each)).max() < bound
    assert (exact.cdf(ordered - 1 / each) - steps[:-1]).max() < bound


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 10.0, 1000.0])
def test_how_concentrated_a_class_is_follows_from_beta(beta: float) -> None:
    """sum_i p_i^2 of a class has the mean (beta + 1) / (K beta + 1): 1 (one client has all) for beta -> 0, 1 / K (all
    have the same) for beta -> infinity. It lies in [0, 1], so by Hoeffding's inequality the mean over C classes is off
    by less than sqrt(ln(2 / MISTAKE) / (2 C)); whole numbers add less than 2 / n."""
    clients, classes, each = 10, 600, 200
    labels = np.repeat(np.arange(classes), each)
    shares = class_shares(dirichlet(labels, clients, beta, root_key(12), minimum=0), labels)
    expected = (beta + 1) / (clients * beta + 1)
    bound = math.sqrt(math.log(2 / MISTAKE) / (2 * classes)) + 2 / each
    assert abs((shares**2).sum(axis=1).mean() - expected) < bound
    # The ends are far enough apart for the bound to tell them.
    assert bound < 0.13 and (beta > 0.01 or expected > 0.9) and (beta < 1000 or expected < 0.11)


def skew(beta: float, key: Key) -> float:
    labels = np.arange(6000) % 3
    return float(statistics(dirichlet(labels, 10, beta, key), labels)["mean_from_pooled"])


@few
@given(st.integers(0, 2**32))
def test_for_a_large_beta_clients_have_the_pooled_label_shares(seed: int) -> None:
    """The share p of a class has a standard deviation below 1 / (K sqrt(beta)), so of K p, which is about 1, below
    1 / sqrt(beta). Normalised over three classes that leaves, to first order, sqrt(2 / 3) / (3 sqrt(beta)): 0.0027 for
    beta = 1e4. Allowed are seven of it and one example in 200; the distance is at most 3 / 2 of the largest one."""
    assert skew(1e4, root_key(seed)) < 3 / 2 * (7 * 0.0027 + 1 / 200)


@few
@given(st.integers(0, 2**32))
def test_a_small_beta_is_more_skewed_than_a_large_one(seed: int) -> None:
    key = root_key(seed)
    assert skew(1e-3, key) > 0.4 > skew(1e3, key)
