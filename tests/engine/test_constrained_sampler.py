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
    now += 0.004  # a step
    budget.begin_wait(0.0)
    now += 1.0  # waiting does not count as part of the step
    budget.end_wait()
    budget.begin_wait(0.0)
    assert is_spent(0.0)  # only heavy rows are late
    assert not is_spent(0.125)
    now += 0.0006  # one row in eight: half a millisecond
    assert is_spent(0.125)
    assert not is_spent(0.25)
    now += 0.0005
    assert is_spent(0.25)
    assert not is_spent(0.3)
    now += 0.0030  # many rows: a whole step
    assert is_spent(0.3)
    assert not budget.is_spent(0.3, has_unconstrained_rows=False)
    budget.begin_wait(0.002)  # the host has waited for the device
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
    now += 0.26 * 0.05  # the time between steps is 0
    assert is_spent(0.25)
