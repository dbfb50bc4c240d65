"""A form of answers, tried where a crash costs one request: in a process of its own."""

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
    """Does with a form what an engine will do: compiles it and masks some tokens.

    Bounds on what forms ask cannot be proven to suffice, so a server has a process try each form
    that is new to it, with less stack, memory and time than the engine gives. Threads are started
    by `run` alone: a process that has made one may fork.

    Args:
        tokenizer: The model's.

    Attributes:
        seconds: Of a processor's time, what a form may take.
        most: What a form may take, in words.
    """

    seconds = bounds.TRIAL_CPU_S
    most = (
        f"{seconds:g} seconds of a processor, {bounds.TRIAL_MEMORY_BYTES // 2**20} MiB of "
        f"memory or {bounds.TRIAL_STACK_BYTES // 2**20} MiB of stack"
    )

    def __init__(self, tokenizer: Tokenizer):
        self._ending_ids = frozenset({tokenizer.eos_token_id or 0})
        # The server knows which forms have passed, and this process is to stay as small as it is.
        self._grammars = GrammarCompiler(
            tokenizer,
            len(tokenizer),
            self._ending_ids,
            stack_bytes=bounds.TRIAL_STACK_BYTES,
            max_cached=0,
        )
        with suppress(GrammarError):  # `run` tells
            self._grammars.prepare()

    def run(self, form: StructuredOutputs) -> None:
        """Try a form. **The process ends** where that takes too much.

        Raises:
            GrammarError: it cannot be enforced.
        """
        left, _ = signal.getitimer(signal.ITIMER_PROF)
        signal.setitimer(signal.ITIMER_PROF, min(left or self.seconds, self.seconds))
        with _limit_memory(bounds.TRIAL_MEMORY_BYTES):
            self._grammars.try_random_answer(form, self._ending_ids)


@contextmanager
def _limit_memory(max_bytes: int) -> Iterator[None]:
    """Let nothing take more than so many bytes in addition to what is taken."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError):  # where the system does not tell, there is no bound
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        taken = pages * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (taken + max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
