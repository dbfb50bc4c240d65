"""Print answers to the terminal while they are generated, with statistics or as a conversation."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jpaged.errors import format_count
from jpaged.outputs import TextDelta
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.observe.statistics import EngineStats

HistoryMessage = Mapping[str, Any]


class Session:
    """A terminal session with one engine, which prints answers while they are generated.

    Attributes:
        engine: Engine that generates the answers.
        answer: Text of the answer to the last prompt, or of the first answer if `n` is above 1. The
            text is incomplete after Ctrl-C or an error.

    Args:
        engine: Engine that generates the answers.
        params: Sampling parameters of every prompt.
        stats: Whether to print statistics to stderr after each prompt.
    """

    def __init__(self, engine: "Engine", params: SamplingParams, *, stats: bool):
        self.engine = engine
        self.answer = ""
        self._params = params
        self._stats = stats

    def ask_in_chat(self, prompt: str, history: Sequence[HistoryMessage] = ()) -> bool:
        """Send a user message with the earlier messages in `history`, and print the answer.

        Returns:
            False if Ctrl-C interrupted the answer.
        """
        messages = [*history, {"role": "user", "content": prompt}]
        return self.ask(self.engine.render_chat(messages))

    def ask(self, prompt: str | list[int]) -> bool:
        """Send a prompt, and print the answer or answers.

        Several answers are printed in order, each below a heading on stderr. Generated text of an
        answer is printed immediately if all earlier answers are complete. Otherwise, the text is
        printed once the earlier answers are complete. The answers of a beam search are printed at
        the end of the search.

        The first Ctrl-C takes effect between two steps of the engine. A second Ctrl-C takes effect
        immediately.

        Returns:
            False if Ctrl-C interrupted the answer.

        Raises:
            RuntimeError: The request failed.
            Exception: Any error of `Engine.add_request` or `Engine.advance`.
        """
        answer_stats = AnswerStats(self.engine, self._params) if self._stats else None
        printer, is_complete = AnswerPrinter(self._params.n), False
        try:
            with interrupt_flag() as interrupted:
                self._run_request(prompt, printer, answer_stats, interrupted)
                is_complete = not interrupted.is_set()
        except KeyboardInterrupt:
            pass
        finally:
            printer.end_line()
            self.answer = printer.texts[0]
        if answer_stats is not None:
            print(answer_stats.report(), file=sys.stderr)
        return is_complete

    def _run_request(
        self,
        prompt: str | list[int],
        printer: "AnswerPrinter",
        answer_stats: "AnswerStats | None",
        stop: threading.Event,
    ) -> None:
        """Run the engine until the answers are complete or `stop` is set."""
        request_id, finished = self.engine.add_request(prompt, self._params), False
        try:
            while not finished and not stop.is_set():
                self.engine.advance()
                updates = [it for it in self.engine.take_deltas() if it.request_id == request_id]
                deltas = [delta for it in updates for delta in it.deltas]
                for delta in deltas:
                    printer.print_delta(delta)
                if answer_stats is not None:
                    answer_stats.record(deltas)
                for it in updates:
                    if it.error is not None:
                        raise RuntimeError(f"the request failed: {it.error}")
                    finished |= it.finished
        finally:
            self.engine.abort(request_id)


class AnswerPrinter:
    """Prints the answers to one prompt to the terminal, one after the other.

    Attributes:
        texts: Text of each answer so far.
    """

    def __init__(self, num_answers: int):
        self.texts = [""] * num_answers
        self._is_ended = [False] * num_answers
        self._current_index = -1

    def print_delta(self, delta: TextDelta) -> None:
        """Print the new text of an answer, or keep the text until earlier answers are complete."""
        self.texts[delta.index] += delta.text
        self._is_ended[delta.index] |= delta.finished
        if self._current_index < 0:
            self._begin_next_answer()
        elif delta.index == self._current_index:
            print(delta.text, end="", flush=True)
        while self._current_index < len(self.texts) - 1 and self._is_ended[self._current_index]:
            self._begin_next_answer()

    def end_line(self) -> None:
        """Print a newline unless the current answer ends with a newline. Call once per answer."""
        printed = self.texts[self._current_index] if self._current_index >= 0 else ""
        if printed and not printed.endswith("\n"):
            print(flush=True)

    def _begin_next_answer(self) -> None:
        """Print the heading of the next answer, and the text that the answer already has."""
        self.end_line()
        self._current_index += 1
        if len(self.texts) > 1:
            print(
                f"answer {self._current_index + 1} of {len(self.texts)}:",
                file=sys.stderr,
                flush=True,
            )
        print(self.texts[self._current_index], end="", flush=True)


@contextlib.contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """Yield a flag that the first Ctrl-C sets instead of raising KeyboardInterrupt.

    A second Ctrl-C raises KeyboardInterrupt. Outside the main thread, Ctrl-C never sets the flag.
    """
    flag = threading.Event()

    def handle(*_: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    previous_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def converse(session: Session) -> int:
    """Read messages from the terminal and answer each one, until Ctrl-D. Return the exit code.

    Ctrl-C during an answer only ends the answer. If an answer fails, the error is printed, and the
    conversation continues as if the user had not sent the message.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (the import adds line editing and history to input())
    print("Press Ctrl-D to end the conversation, Ctrl-C to stop an answer.", file=sys.stderr)
    history: list[HistoryMessage] = []
    while True:
        try:
            text = input(">>> ").strip()
        except EOFError:
            print()
            return 0
        if not text:
            continue
        try:
            session.ask_in_chat(text, history)
        except Exception as error:
            print(f"error: {format_error(error)}", file=sys.stderr)
        else:
            history.append({"role": "user", "content": text})
            history.append({"role": "assistant", "content": session.answer})


class AnswerStats:
    """Statistics of the answers to one prompt: token times, and the use of the block pool."""

    def __init__(self, engine: "Engine", params: SamplingParams):
        # Import `pool_text` here, because it imports numpy, which would delay --help.
        from jpaged.observe.pool_text import BusyPoolSampler

        self._engine = engine
        self._is_unstreamed = not params.is_streamable
        self._start_stats: EngineStats = engine.stats()
        self._busy_stats = self._start_stats
        self._pool = BusyPoolSampler(engine)
        self._start_time = self._read_clock()
        self._token_times: list[tuple[float, int]] = []  # time, number of tokens
        self._finish_reason: str | None = None

    def record(self, deltas: Sequence[TextDelta]) -> None:
        """Record the deltas of an engine step, and the state of the pool after the step."""
        if num_tokens := sum(len(delta.token_ids) for delta in deltas):
            self._token_times.append((self._read_clock(), num_tokens))
        for delta in deltas:
            self._finish_reason = delta.finish_reason
        stats = self._engine.stats()
        if stats.num_running:
            self._busy_stats = stats
            self._pool.record(stats)

    def report(self) -> str:
        """Return the statistics as text, one statistic per line."""
        now, start, busy = self._engine.stats(), self._start_stats, self._busy_stats
        num_slots = busy.num_used_blocks * busy.block_size
        num_preemptions = now.num_preemptions - start.num_preemptions
        return "\n".join(
            (
                f"tokens    {now.num_prompt_tokens - start.num_prompt_tokens} prompt, "
                f"{self._num_tokens} generated ({self._finish_reason or 'interrupted'})",
                f"speed     {self._format_speed()}",
                f"blocks    {busy.num_used_blocks} used at the end, peak {now.peak_used_blocks}, "
                f"total {now.num_blocks} (of {format_count(now.block_size, 'token')})",
                f"prefix    {now.num_cached_tokens - start.num_cached_tokens} of the prompt's "
                f"tokens cached, {format_count(now.num_cached_blocks, 'free block')} cached",
                f"waste     {busy.num_waste_slots} of {format_count(num_slots, 'slot')} in last "
                f"blocks ({busy.waste:.1%})",
                f"pressure  {format_count(num_preemptions, 'preemption')}",
                *self._pool.format_lines(),
            )
        )

    def _read_clock(self) -> float:
        """Return the current time in seconds, minus the time spent on block-pool statistics."""
        return time.perf_counter() - self._pool.seconds_spent

    @property
    def _num_tokens(self) -> int:
        return sum(count for _, count in self._token_times)

    def _format_speed(self) -> str:
        if not self._token_times:
            return "no tokens"
        first, last = self._token_times[0], self._token_times[-1]
        if self._is_unstreamed:
            return f"answers after {last[0] - self._start_time:.3f} s"
        text = f"first token after {first[0] - self._start_time:.3f} s"
        if last[0] > first[0]:
            rate = (self._num_tokens - first[1]) / (last[0] - first[0])
            text += f", then {rate:.1f} tokens/s"
        return text


def format_error(error: Exception) -> str:
    """Return the message of an error in one line, or its type's name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
