"""`GrammarTrial` compiles a new grammar in a separate process, where a crash fails one request."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.matcher import GrammarError
from jpaged.text.tokenizer import Tokenizer


class GrammarTrial:
    """Test run of structured-output specifications, which compiles a specification and makes masks.

    The limits in `bounds` may not detect an expensive specification. Therefore, a server tries each
    new specification in a process with less stack, memory and time than the engine has. Only `run`
    starts threads, so a process may create a `GrammarTrial` and then fork.

    Args:
        tokenizer: The model's tokenizer.

    Attributes:
        seconds: Maximum CPU time of a trial, in seconds.
        limits: The limits of a trial in words, for errors.
    """

    seconds = bounds.TRIAL_CPU_S
    limits = (
        f"{seconds:g} seconds of CPU time, {bounds.TRIAL_MEMORY_BYTES // 2**20} MiB of "
        f"memory or {bounds.TRIAL_STACK_BYTES // 2**20} MiB of stack"
    )

    def __init__(self, tokenizer: Tokenizer):
        self._ending_ids = frozenset({tokenizer.eos_token_id or 0})
        # Do not cache compiled grammars. The server stores the result of each `GrammarTrial`, so
        # the same specification is rarely compiled here twice.
        self._compiler = GrammarCompiler(
            tokenizer,
            len(tokenizer),
            self._ending_ids,
            stack_bytes=bounds.TRIAL_STACK_BYTES,
            max_cached=0,
        )
        with suppress(GrammarError):  # `run` raises the error again
            self._compiler.prepare()

    def run(self, spec: StructuredOutputs) -> None:
        """Try a structured-output specification.

        **The process is killed or crashes** if the specification exceeds the trial's limits.

        Args:
            spec: The specification.

        Raises:
            GrammarError: The specification cannot be enforced.
        """
        left, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, min(left or self.seconds, self.seconds))
        with _limit_memory(bounds.TRIAL_MEMORY_BYTES):
            self._compiler.try_random_answer(spec, self._ending_ids)


@contextmanager
def _limit_memory(max_bytes: int) -> Iterator[None]:
    """Limit the memory that this process allocates in the `with` block to `max_bytes`."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError):  # if /proc is missing, the memory is not limited
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        taken = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (taken + max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
