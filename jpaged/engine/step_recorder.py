"""A recorder of the steps that an engine launches, for tests and benchmarks."""

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
    """One launch of the engine: a step or a burst of steps.

    Attributes:
        plans: Plans of the steps; a burst has several.
        programs: Names of the compiled programs that the launch called, in order. A name is a pair
            of a kind and a key, such as ("decode", 8), ("prefill", (64, 8)) or ("sample", (8,
            level)).
    """

    plans: tuple[StepPlan, ...]
    programs: list[ProgramName] = field(default_factory=list)

    def batch_size(self, program_name: str) -> int | None:
        """Return the padded number of sequences in a program of this launch.

        Args:
            program_name: Kind of the program: "decode", "decode_burst" or "sample".

        Returns:
            The batch size of the first such program; None if the launch called none.
        """
        for name, key in self.programs:
            if name == program_name:
                return key[0] if isinstance(key, tuple) else key
        return None


class StepRecorder:
    """A context manager that records an engine's launches; `Engine.record_steps` returns it.

    Args:
        runner: Model runner of the engine.
        before: Function that is called before each launch, with the plans of the launch.

    Attributes:
        launches: Recorded launches in order.
    """

    def __init__(
        self,
        runner: ModelRunner,
        before: Callable[[Sequence[StepPlan]], object] = lambda plans: None,
    ):
        self.launches: list[RecordedLaunch] = []
        self._runner, self._before_launch = runner, before
        # Methods of the runner that the recorder has replaced, by name; None while it is not
        # recording.
        self._original_attributes: dict[str, Any] | None = None
        self._launch: Any = None

    def __enter__(self) -> "StepRecorder":
        """Start to record. Raise RuntimeError if the recorder is already open."""
        if self._original_attributes is not None:
            raise RuntimeError("this StepRecorder is open already: create another one")
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
        """Stop recording. Raise RuntimeError if a recorder that was opened later is still open."""
        if self._original_attributes is None:
            return
        if self._runner.launch_layers is not self._launch:
            raise RuntimeError("another StepRecorder was opened later: close that one first")
        for name in _WRAPPED_ATTRIBUTES:
            # Deleting the attribute makes the method of the class visible again.
            delattr(self._runner, name)
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
