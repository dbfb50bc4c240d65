"""Test parameters of the tiers: the default tier runs a covering set and fewer random examples."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

TIER = "JPAGED_TEST_TIER"
"""Name of the environment variable with the tier, which conftest.py sets before tests are
imported."""


def num_examples(in_full_tier: int) -> int:
    """Return `in_full_tier` in the full tier, and a quarter of it in the default tier.

    Args:
        in_full_tier: Number of random examples that a test runs in the full tier.
    """
    is_full = os.environ.get(TIER) == "full"
    return in_full_tier if is_full else -(-in_full_tier // 4)


def covering(
    *axes: Iterable[Any], strength: int = 2, keep: Callable[..., bool] = lambda *_: False
) -> list[Any]:
    """Return all combinations of the options' values as parameters for `pytest.mark.parametrize`.

    The default tier runs a covering set, a small set of combinations that contains every pair of
    values of two options. The other combinations are marked `full`. A greedy algorithm chooses the
    set, which is the same in every run.

    Args:
        axes: The values of each option, plain or as `pytest.param` with an id and marks.
        strength: 2 if the set must contain every pair of values of two options. 1 if the set must
            only contain every value of each option. 0 if the set must only contain one combination,
            unless `keep` chooses some.
        keep: Function of the values of a combination. If it returns True, the combination is in the
            covering set.
    """
    params = [[_as_param(value) for value in axis] for axis in axes]
    combinations = list(itertools.product(*(range(len(axis)) for axis in params)))
    chosen = {
        each
        for each in combinations
        if keep(*(params[axis][i].values[0] for axis, i in enumerate(each)))
    }
    missing = {it for each in combinations for it in _tuples(each, strength)}
    for each in chosen:
        missing.difference_update(_tuples(each, strength))
    while missing:
        best = max(
            combinations, key=lambda each: len(missing.intersection(_tuples(each, strength)))
        )
        chosen.add(best)
        missing.difference_update(_tuples(best, strength))
    return [_joined(params, each, each in chosen) for each in combinations]


def _as_param(value: Any) -> Any:
    return value if hasattr(value, "marks") and hasattr(value, "values") else pytest.param(value)


def _tuples(combination: Sequence[int], strength: int) -> set[tuple[tuple[int, int], ...]]:
    """Return each pair of values in `combination` if `strength` is 2, and each single value if
    `strength` is 1. If `strength` is 0, return an empty tuple only.

    A value is represented by two numbers: the index of the option, and the index of the value.
    """
    return set(itertools.combinations(enumerate(combination), min(strength, len(combination))))


def _joined(params: Sequence[Sequence[Any]], combination: Sequence[int], is_chosen: bool) -> Any:
    parts = [axis[i] for axis, i in zip(params, combination, strict=True)]
    marks = [mark for part in parts for mark in part.marks]
    ids = None
    if all(part.id is not None for part in parts):
        ids = "-".join(str(part.id) for part in parts)
    values = [value for part in parts for value in part.values]
    return pytest.param(*values, id=ids, marks=marks if is_chosen else [*marks, pytest.mark.full])
