"""The phases of a sweep of `tools.tune`: all that takes the host's time first, then the device, in
quiet.

    lower     every candidate, one after the other
    compile   every program, side by side
    check     each program against the reference, on small inputs
    time      case by case, the heuristic first and last

Programs with the same text are one: of a case whose plan a candidate does not change, or changes
in what the kernel makes nothing of. So a candidate with no program of its own is left out.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from jax.stages import Compiled, Lowered

from pallas_kernels import Backend
from tools.tune_cases import Case, Op
from tools.tune_programs import (
    Inputs,
    Override,
    compile_all,
    lower_call,
    lower_loop,
    seconds_a_call,
    using,
)

MIN_GAIN = 0.01
MAX_LOSS = 0.01

Clock = Callable[[Callable, Inputs], float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        ratios: Its time over the heuristic's, by case; empty if it was rejected.
        rejected: Why, or an empty string.
    """

    override: Override
    ratios: Mapping[str, float]
    rejected: str = ""

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios; infinite if it was rejected."""
        if not self.ratios:
            return math.inf
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def eligible(self) -> bool:
        """Whether it may override the heuristic."""
        return self.mean < 1 - MIN_GAIN and max(self.ratios.values()) <= 1 + MAX_LOSS


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate, or the heuristic, and the key of its program in each case and check."""

    override: Override
    programs: dict[Case, str] = dataclasses.field(default_factory=dict)


def sweep(
    op: Op, tried: Iterable[Override], backend: Backend, clock: Clock = seconds_a_call
) -> list[Outcome]:
    """Check and time candidates, and print how long each phase takes.

    Args:
        op: What is tuned.
        tried: The candidates.
        backend: What runs them.
        clock: Seconds of a call in a compiled program, with a case's inputs.

    Returns:
        An outcome for each candidate that has a program of its own.

    Raises:
        RuntimeError: the heuristic's own programs fail.
    """
    work = Sweep(op, tried, backend, clock)
    for phase in (work.lower, work.compile, work.check, work.time):
        start = time.perf_counter()
        phase()
        print(f"{op.name}: {phase.__name__} {time.perf_counter() - start:.1f} s", flush=True)
        if why := work.fault(work.heuristic):
            raise RuntimeError(f"{op.name}: the heuristic's own programs fail: {why}")
        if not work.candidates:
            break
    return work.outcomes()


class Sweep:
    """An op's sweep, phase by phase.

    Attributes:
        heuristic: What candidates are compared with.
        candidates: After `lower`, those with a program of their own.
        faults: Why programs failed, by their keys, whatever the phase.
    """

    def __init__(self, op: Op, tried: Iterable[Override], backend: Backend, clock: Clock) -> None:
        self.op, self.backend, self.clock = op, backend, clock
        self.heuristic = Trial({})
        self.candidates = [Trial(override) for override in tried]
        self.faults: dict[str, str] = {}
        self._lowered: dict[str, Lowered] = {}
        self._compiled: dict[str, Compiled] = {}
        self._seconds: dict[str, float] = {}

    def fault(self, trial: Trial) -> str:
        """Why it is rejected, or an empty string."""
        faults = (self.faults.get(key, "") for key in trial.programs.values())
        return next(filter(None, faults), "")

    def lower(self) -> None:
        """Every program that differs in plan, and leave out candidates that have none."""
        for case in self.op.cases:
            self._lower_case(case, lower_loop)
        for case in self.op.checks:
            self._lower_case(case, lower_call)
        own = {(*self.heuristic.programs.values(),): self.heuristic}
        for trial in self.candidates:
            own.setdefault((*trial.programs.values(),), trial)
        self.candidates = [trial for trial in own.values() if trial is not self.heuristic]

    def compile(self) -> None:
        """Every program that lowered, on as many threads as there are processors."""
        self._compiled, refused = compile_all(self._lowered, os.cpu_count() or 1)
        self.faults |= {key: _reason(error) for key, error in refused.items()}

    def check(self) -> None:
        """Compare with the reference, whose results are computed once."""
        for case in self.op.checks:
            state, arguments = case.make(0)
            expected = case.reference(state, *arguments)
            for key in self._programs(case):
                try:
                    given = case.shown(self._compiled[key](state, *arguments))
                    compare_results(case.name, given, expected, self.op.tolerance)
                except Exception as error:
                    self.faults[key] = _reason(error)

    def time(self) -> None:
        """Each case with one set of inputs, made once: those of one case at a time."""
        for case in self.op.cases:
            self._time_case(case)

    def outcomes(self) -> list[Outcome]:
        """What became of the candidates."""
        return [
            Outcome(trial.override, {} if why else self._ratios(trial), why)
            for trial in self.candidates
            for why in [self.fault(trial)]
        ]

    def _lower_case(self, case: Case, build: Callable[[Case, Backend], Lowered]) -> None:
        base, plan = self._lower_one(case, build, {})
        self.heuristic.programs[case] = base
        known = {plan: base}
        for trial in self.candidates:
            # An entry replaces fields of whatever the heuristic chooses: so this is its plan.
            planned = tuple(dataclasses.replace(config, **trial.override) for config in plan)
            if planned not in known:
                known[planned], _ = self._lower_one(case, build, trial.override)
            trial.programs[case] = known[planned]

    def _lower_one(self, case, build, override: Override) -> tuple[str, tuple]:
        """A program's key, and the configs that were chosen for the op in it."""
        try:
            with using(self.op, override) as plan:
                lowered = build(case, self.backend)
        except Exception as error:  # a tile that does not lower
            key = f"{case.name} with {dict(override)}"
            self.faults[key] = _reason(error)
            return key, ()
        key = lowered.as_text()
        self._lowered[key] = lowered
        return key, tuple(plan)

    def _programs(self, case: Case) -> list[str]:
        """The case's, the heuristic's first, without those of rejected candidates."""
        trials = [t for t in (self.heuristic, *self.candidates) if not self.fault(t)]
        return [*dict.fromkeys(trial.programs[case] for trial in trials)]

    def _time_case(self, case: Case) -> None:
        inputs = Inputs.of(case)
        base = self.heuristic.programs[case]
        # Twice, for its better time: neither a clock still cold nor one gone warm may harm it.
        for key in [*self._programs(case), base]:
            try:
                seconds = self.clock(self._compiled[key], inputs)
            except Exception as error:
                self.faults[key] = _reason(error)
                inputs = Inputs.of(case)  # what it took is gone, or came back as its failure
            else:
                self._seconds[key] = min(seconds, self._seconds.get(key, math.inf))

    def _ratios(self, trial: Trial) -> dict[str, float]:
        base = self.heuristic.programs
        return {
            case.name: self._seconds[trial.programs[case]] / self._seconds[base[case]]
            for case in self.op.cases
        }


def compare_results(case: str, given: list, expected: list, tolerance: float) -> None:
    """Raise ValueError unless all values agree within `tolerance`, absolute or relative."""
    for one, other in zip(given, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = float(np.max(np.abs(one - other) / (1 + np.abs(other)), initial=0.0))
        if not worst <= tolerance:  # NaN is wrong as well
            raise ValueError(f"wrong results in {case!r}: off by {worst:.3g}")


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
