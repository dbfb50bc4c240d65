"""What an engine launches, step by step: for tests and benchmarks that look at its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged.core.plan import StepPlan
from jpaged.runtime.model_runner import ModelRunner, UnsampledStep
from jpaged.runtime.programs import ProgramName
from jpaged.runtime.results import StepHandle

_WRAPPED_ATTRIBUTES = "programs", "launch_layers", "launch_burst"


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: a step, or a burst of them.

    Attributes:
        plans: What its steps compute; of a burst several.
        programs: Names of the compiled programs that were called, in their order: a kind and its
            shape, such as ("decode", 8), ("prefill", (64, 8)) or ("sample", (8, level)).
    """

    plans: tuple[StepPlan, ...]
    programs: list[ProgramName] = field(default_factory=list)

    def batch_size(self, program_name: str) -> int | None:
        """Sequences to which its program of a kind (decode, decode_burst, sample) is padded; None
        if it called none."""
        for name, key in self.programs:
            if name == program_name:
                return key[0] if isinstance(key, tuple) else key
        return None


class StepRecorder:
    """Records the launches of an engine while this context is open; `Engine.record_steps` makes it.

    Args:
        runner: The engine's.
        before: Called with each launch's plans before it.

    Attributes:
        launches: In their order.
    """

    def __init__(
        self,
        runner: ModelRunner,
        before: Callable[[Sequence[StepPlan]], object] = lambda plans: None,
    ):
        self.launches: list[RecordedLaunch] = []
        self._runner, self._before_launch = runner, before
        self._original_attributes: dict[str, Any] | None = None  # None while it is closed
        self._launch: Any = None

    def __enter__(self) -> "StepRecorder":
        """Begin to record; RuntimeError if it is open already."""
        if self._original_attributes is not None:
            raise RuntimeError("this recorder is open already: make another one")
        runner = self._runner
        self._original_attributes = {
            name: vars(runner)[name] for name in _WRAPPED_ATTRIBUTES if name in vars(runner)
        }
        launch_layers, launch_burst = runner.launch_layers, runner.launch_burst
        programs = runner.programs.items()
        runner.programs = {name: self._wrap_program(name, program) for name, program in programs}

        def launch_and_record(plan: StepPlan, sampling: Any) -> UnsampledStep:
            self._record_plans([plan])
            return launch_layers(plan, sampling)

        def launch_burst_and_record(plans: list[StepPlan], sampling: Any) -> list[StepHandle]:
            self._record_plans(plans)
            return launch_burst(plans, sampling)

        runner.launch_layers, runner.launch_burst = launch_and_record, launch_burst_and_record
        self._launch = launch_and_record
        return self

    def __exit__(self, *_: object) -> None:
        """Record no longer; RuntimeError if another recorder was opened since and is open."""
        if self._original_attributes is None:
            return
        if self._runner.launch_layers is not self._launch:
            raise RuntimeError("another recorder was opened since: close that one first")
        for name in _WRAPPED_ATTRIBUTES:
            delattr(self._runner, name)  # methods of the class are found again
        vars(self._runner).update(self._original_attributes)
        self._original_attributes = None

    def _record_plans(self, plans: Sequence[StepPlan]) -> None:
        self._before_launch(plans)
        self.launches.append(RecordedLaunch(tuple(plans)))

    def _wrap_program(self, name: ProgramName, program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            if self.launches:
                self.launches[-1].programs.append(name)
            return program(*arguments, **keywords)

        return run
