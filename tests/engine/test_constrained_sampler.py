"""Test how long a step waits for late masks."""

import time
from functools import partial

import pytest

from jpaged.engine.constrained_sampler import WaitBudget


def test_step_waits_while_waiting_costs_less_than_skipping(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    budget = WaitBudget()
    is_spent = partial(budget.is_spent, has_unconstrained_rows=True)
    now += 0.004  # the duration of a step
    budget.begin_wait(0.0)
    now += 1.0  # waiting does not count as part of the step
    budget.end_wait()
    budget.begin_wait(0.0)
    assert is_spent(0.0)  # only heavy rows are late
    assert not is_spent(0.125)
    # If one row in eight is late, the step waits an eighth of its duration: 0.5 ms.
    now += 0.0006
    assert is_spent(0.125)
    assert not is_spent(0.25)
    now += 0.0005
    assert is_spent(0.25)
    assert not is_spent(0.3)
    # If more than a quarter of the rows are late, the step waits its whole duration: 4 ms.
    now += 0.0030
    assert is_spent(0.3)
    assert not budget.is_spent(0.3, has_unconstrained_rows=False)
    # The host has waited 2 ms for the device, so a step may always wait 2 ms for masks.
    budget.begin_wait(0.002)
    now += 0.0019
    assert not is_spent(0.0)
    now += 0.0002
    assert is_spent(0.0)
    assert not is_spent(0.125)
    now += 60
    assert not budget.is_spent(0.3, has_unconstrained_rows=False)
    budget.begin_wait(0.0)
    budget.end_wait()
    budget.begin_wait(0.0)
    # A step of 60 s counts as 50 ms, the maximum.
    now += 0.26 * 0.05
    assert is_spent(0.25)
