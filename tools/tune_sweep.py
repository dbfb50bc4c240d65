"""Run the phases of a sweep of `tools.tune`: the host's work first, then the device's.

    lower     all candidates, sequentially
    compile   all programs, concurrently
    check     each program against the reference, on small inputs
    time      case by case, the default launch parameters first and last

A candidate is a set of launch parameters to try. A function of the kernel, the heuristic, computes
the default launch parameters.

Programs with equal text are compiled and timed once. Candidates have equal programs if they do not
change the launch parameters of a case, or if the kernel does not use the changed ones. A candidate
is left out if its programs equal those of an earlier candidate or of the defaults.
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
    """Result of checking and timing one candidate.

    Attributes:
        override: The fields that the candidate replaces.
        ratios: (time with the candidate / time with the default launch parameters), by case; empty
            if the candidate was rejected.
        rejected: The reason of the rejection, or an empty string.
    """

    override: Override
    ratios: Mapping[str, float]
    rejected: str = ""

    @property
    def mean(self) -> float:
        """Geometric mean of `ratios` over the cases; infinite if the candidate was rejected."""
        if not self.ratios:
            return math.inf
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    @property
    def eligible(self) -> bool:
        """Whether the candidate may replace the default launch parameters."""
        return self.mean < 1 - MIN_GAIN and max(self.ratios.values()) <= 1 + MAX_LOSS


@dataclasses.dataclass(frozen=True)
class Trial:
    """Launch parameters (a candidate or the defaults), and the program of each case.

    A case is a problem size to time, or a small input for a check of the results.

    Attributes:
        override: The fields that the candidate replaces; empty for the defaults.
        programs: The string that identifies the program of each case. The string is the lowered
            text of the program, or a description if lowering failed.
    """

    override: Override
    programs: dict[Case, str] = dataclasses.field(default_factory=dict)


def sweep(
    op: Op, tried: Iterable[Override], backend: Backend, clock: Clock = seconds_a_call
) -> list[Outcome]:
    """Check and time candidates, and print how long each phase takes.

    Args:
        op: The op to tune.
        tried: The candidates.
        backend: The backend of the op.
        clock: Function that takes a compiled program and inputs, and returns the seconds of a call.

    Returns:
        An outcome for each candidate whose programs differ from the programs of earlier candidates
        and of the defaults.

    Raises:
        RuntimeError: the kernel fails with the default launch parameters.
    """
    work = Sweep(op, tried, backend, clock)
    for phase in (work.lower, work.compile, work.check, work.time):
        start = time.perf_counter()
        phase()
        print(f"{op.name}: {phase.__name__} {time.perf_counter() - start:.1f} s", flush=True)
        if why := work.fault(work.heuristic):
            raise RuntimeError(
                f"{op.name}: the kernel fails with the default launch parameters: {why}"
            )
        if not work.candidates:
            break
    return work.outcomes()


class Sweep:
    """The phases of the sweep of an op.

    Attributes:
        heuristic: The default launch parameters, with which the candidates are compared.
        candidates: The candidates. `lower` removes each candidate whose programs are the programs
            of an earlier candidate or of the defaults.
        faults: Error messages of failed programs, by the key of the program.
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
        """Return the first error of a trial's programs, or an empty string."""
        faults = (self.faults.get(key, "") for key in trial.programs.values())
        return next(filter(None, faults), "")

    def lower(self) -> None:
        """Lower the programs of the defaults and of all candidates, and drop equal candidates."""
        for case in self.op.cases:
            self._lower_case(case, lower_loop)
        for case in self.op.checks:
            self._lower_case(case, lower_call)
        own = {(*self.heuristic.programs.values(),): self.heuristic}
        for trial in self.candidates:
            own.setdefault((*trial.programs.values(),), trial)
        self.candidates = [trial for trial in own.values() if trial is not self.heuristic]

    def compile(self) -> None:
        """Compile every lowered program, on one thread per processor."""
        self._compiled, refused = compile_all(self._lowered, os.cpu_count() or 1)
        self.faults |= {key: _reason(error) for key, error in refused.items()}

    def check(self) -> None:
        """Compare the results of each program with the reference, on the small inputs."""
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
        """Time one case after another, so that only the inputs of one case need memory."""
        for case in self.op.cases:
            self._time_case(case)

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each candidate."""
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
            # A candidate replaces some fields of the default launch parameters. The resulting
            # launch parameters are therefore known without tracing.
            planned = tuple(dataclasses.replace(config, **trial.override) for config in plan)
            if planned not in known:
                known[planned], _ = self._lower_one(case, build, trial.override)
            trial.programs[case] = known[planned]

    def _lower_one(self, case, build, override: Override) -> tuple[str, tuple]:
        """Lower the program of a case while `override` replaces launch parameters of the op.

        Returns:
            The key of the program, and the launch parameters chosen for the op.
        """
        try:
            with using(self.op, override) as plan:
                lowered = build(case, self.backend)
        except Exception as error:  # The op may not support a tile size of the candidate.
            key = f"{case.name} with {dict(override)}"
            self.faults[key] = _reason(error)
            return key, ()
        key = lowered.as_text()
        self._lowered[key] = lowered
        return key, tuple(plan)

    def _programs(self, case: Case) -> list[str]:
        """Return the keys (program texts) of the distinct programs for a case.

        The first program uses the default launch parameters. The others use the launch parameters
        of the candidates. Candidates with a failed program are left out.
        """
        trials = [t for t in (self.heuristic, *self.candidates) if not self.fault(t)]
        return [*dict.fromkeys(trial.programs[case] for trial in trials)]

    def _time_case(self, case: Case) -> None:
        inputs = Inputs.of(case)
        base = self.heuristic.programs[case]
        # Time the program with the default launch parameters first and last, and keep the shorter
        # time. The clock speed of the device may change between the two measurements.
        for key in [*self._programs(case), base]:
            try:
                seconds = self.clock(self._compiled[key], inputs)
            except Exception as error:
                self.faults[key] = _reason(error)
                # The failed program has consumed (donated) the states, so make new ones.
                inputs = Inputs.of(case)
            else:
                self._seconds[key] = min(seconds, self._seconds.get(key, math.inf))

    def _ratios(self, trial: Trial) -> dict[str, float]:
        base = self.heuristic.programs
        return {
            case.name: self._seconds[trial.programs[case]] / self._seconds[base[case]]
            for case in self.op.cases
        }


def compare_results(case: str, given: list, expected: list, tolerance: float) -> None:
    """Raise ValueError unless all values agree within an absolute or relative `tolerance`."""
    for one, other in zip(given, expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = float(np.max(np.abs(one - other) / (1 + np.abs(other)), initial=0.0))
        if not worst <= tolerance:  # the negation makes the condition true for NaN
            raise ValueError(f"wrong results in {case!r}: off by {worst:.3g}")


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
