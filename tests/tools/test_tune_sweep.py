"""Test the phases of a tuning sweep with a small XLA op."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Backend
from pallas_kernels.kv_cache import triton
from tools.tune_cases import Case, Op
from tools.tune_programs import Inputs, compile_all, lower_loop, num_calls, seconds_a_call
from tools.tune_sweep import Outcome, compare_results, sweep

DOES_NOT_LOWER, DOES_NOT_COMPILE, IS_WRONG, FAILS_LATE = 1, 2, 3, 4
DEFAULT_CHUNK = triton.MoveConfig().chunk


def _doubled(x):
    """Return `2 * x`. With some values of the launch parameter `chunk`, fail or return `3 * x`."""
    chunk = triton.move_config("write", head_size=8, itemsize=4).chunk
    if chunk == DOES_NOT_LOWER:
        raise NotImplementedError("no such tile\nand more")
    if chunk == DOES_NOT_COMPILE:
        return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    if chunk == IS_WRONG:
        return x * 3
    return x * 2 + jnp.float32(chunk) - jnp.float32(chunk)


def _case(name: str, size: int, log: list) -> Case:
    def make(seed: int):
        log.append(("make", name))
        return jnp.full(size, seed, jnp.float32), (jnp.arange(size, dtype=jnp.float32),)

    def run(state, x, *, backend):
        log.append(("trace", name))
        return state + 1, _doubled(x)

    def expect(state, x):
        log.append(("reference", name))
        return [2 * x]

    return Case(name, make, run, expect, lambda given: [given[1]])


def _op(log: list) -> Op:
    cases = [_case("long", 64, log), _case("short", 32, log)]
    grid = {"chunk": (1, 2)}
    return Op("write", 8, 4, grid, cases, [_case("small", 5, log)], tolerance=1e-6)


class Clock:
    """A fake timer that runs a program once.

    The timer returns 1 s for the first program of each case, which has the default launch
    parameters. It returns 0.5 s for other programs.
    """

    def __init__(self, log: list, broken: Callable[[int], bool] = lambda call: False) -> None:
        self.log, self.calls, self.first, self.broken = log, 0, {}, broken

    def __call__(self, program: Any, inputs: Inputs) -> float:
        self.calls += 1
        self.log.append(("time", self.calls))
        inputs.run(program, 1)
        if self.broken(self.calls):
            for leaf in jax.tree.leaves(inputs.states):
                leaf.delete()
            raise RuntimeError("out of resource: shared memory\nand more")
        shape = inputs.states[0].shape
        return 1.0 if program is self.first.setdefault(shape, program) else 0.5


def _chunks(*values: int) -> list[dict[str, int]]:
    return [{"chunk": value} for value in values]


def test_failing_candidate_does_not_reject_other_candidates():
    log: list = []
    clock = Clock(log)
    tried = _chunks(DOES_NOT_LOWER, DOES_NOT_COMPILE, IS_WRONG, 16)
    *rejected, good = sweep(_op(log), tried, Backend.XLA, clock)
    assert rejected[0].rejected == "no such tile"
    assert "no_such_kernel" in rejected[1].rejected
    assert rejected[2].rejected.startswith("wrong results in 'small'")
    assert not any(outcome.eligible or outcome.ratios for outcome in rejected)
    assert good == Outcome({"chunk": 16}, {"long": 0.5, "short": 0.5})
    # In each of the cases "long" and "short", the sweep times the default launch parameters twice
    # and the good candidate once.
    assert clock.calls == 2 * 3


def test_sweep_compiles_all_programs_before_it_times_them(capsys: pytest.CaptureFixture[str]):
    log: list = []
    sweep(_op(log), _chunks(16, 32), Backend.XLA, Clock(log))
    order = [what for what, _ in log]
    last_trace = max(at for at, what in enumerate(order) if what == "trace")
    assert last_trace < order.index("reference") < order.index("time")
    assert order.count("reference") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["write:", phase] for phase in ("lower", "compile", "check", "time")
    ]


def test_inputs_are_made_once_per_case():
    log: list = []
    op = _op(log)
    sweep(op, _chunks(16, 32, 64), Backend.XLA, Clock(log))
    first = next(at for at, (what, _) in enumerate(log) if what == "reference")
    timed = ["time" if what == "time" else name for what, name in log[first + 1 :]]
    runs = [name for at, name in enumerate(timed) if at == 0 or timed[at - 1] != name]
    assert runs == ["long", "time", "short", "time"]
    made = 1 + num_calls(op.cases[0])  # The first call of `make` only determines the shapes.
    assert [timed.count(name) for name in ("long", "short")] == [made, made]


def test_inputs_of_a_failed_program_are_made_again():
    log: list = []
    clock = Clock(log, broken=lambda call: call == 2)
    failed, good = sweep(_op(log), _chunks(FAILS_LATE, 16), Backend.XLA, clock)
    assert failed.rejected == "out of resource: shared memory"
    assert good.ratios == {"long": 0.5, "short": 0.5}


def test_default_launch_parameters_are_timed_twice_and_the_better_time_counts():
    log: list = []
    times = iter([8.0, 3.0, 2.0, 4.0, 3.0, 6.0])

    def clock(program: Any, inputs: Inputs) -> float:
        inputs.run(program, 1)
        return next(times)

    (outcome,) = sweep(_op(log), _chunks(16), Backend.XLA, clock)
    assert outcome.ratios == {"long": 3 / 2, "short": 3 / 4}


def test_candidates_equal_to_the_default_launch_parameters_are_skipped():
    log: list = []
    outcomes = sweep(_op(log), _chunks(DEFAULT_CHUNK, 16, 16), Backend.XLA, Clock(log))
    assert [outcome.override for outcome in outcomes] == _chunks(16)
    assert sweep(_op(log), _chunks(DEFAULT_CHUNK), Backend.XLA, Clock(log)) == []


def test_sweep_raises_if_the_kernel_fails_with_the_default_launch_parameters():
    log: list = []
    op = _op(log)
    broken = dataclasses.replace(op.checks[0], run=lambda state, x, backend: (state, x))
    with pytest.raises(
        RuntimeError, match="write: the kernel fails with the default launch parameters: wrong"
    ):
        sweep(dataclasses.replace(op, checks=[broken]), _chunks(16), Backend.XLA, Clock(log))


def test_programs_are_compiled_concurrently():
    both = threading.Barrier(2, timeout=30)

    class Waits:
        def compile(self):
            both.wait()
            return self

    programs: Any = {"one": Waits(), "two": Waits()}
    assert compile_all(programs, 2) == (programs, {})


def test_timed_program_donates_only_the_arrays_that_the_op_updates():
    case = _case("long", 64, [])
    program, inputs = lower_loop(case, Backend.XLA).compile(), Inputs.of(case)
    taken, (argument,) = inputs.states[0], inputs.arguments[0]
    assert seconds_a_call(program, inputs, repeats=1) > 0
    assert taken.is_deleted()
    assert not inputs.states[0].is_deleted()
    assert not argument.is_deleted()
    assert len(inputs.states) == num_calls(case)


def test_timed_program_calls_the_op_fewer_times_if_the_arrays_are_larger():
    assert num_calls(_case("long", 64, [])) == 16
    assert num_calls(_case("huge", 1 << 28, [])) == 4
    assert num_calls(_case("large", 1 << 22, [])) == 8


def test_wrong_result_of_a_candidate_is_detected():
    compare_results("a case", [jnp.ones(3)], [jnp.full(3, 1.01)], tolerance=0.02)
    for wrong in (jnp.full(3, 1.1), jnp.full(3, jnp.nan)):
        with pytest.raises(ValueError, match="wrong results in 'a case'"):
            compare_results("a case", [wrong], [jnp.ones(3)], tolerance=0.02)
