"""Answers at the terminal: printed as they come, measured, one after another in a conversation."""

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
    """Prompts put to one engine, answers printed as they come.

    Attributes:
        engine: The engine that answers.
        answer: The text of the last answer, as far as it came; of several the first one's.
    """

    def __init__(self, engine: "Engine", params: SamplingParams, *, stats: bool):
        self.engine = engine
        self.answer = ""
        self._params = params
        self._stats = stats

    def ask_in_chat(self, prompt: str, history: Sequence[HistoryMessage] = ()) -> bool:
        """As `ask`, through the chat template, with the messages before the prompt."""
        messages = [*history, {"role": "user", "content": prompt}]
        return self.ask(self.engine.render_chat(messages))

    def ask(self, prompt: str | list[int]) -> bool:
        """Print the answer, or several one after the other; False if Ctrl-C cut it short.

        Raises what the engine raises. With several, stderr tells before each which one it is. The
        first is printed as it comes, the others when those before them have ended; what a beam
        search found is printed at its end.

        The first Ctrl-C takes effect between two steps of the engine; a second one does not wait.
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
        """Step until the answers have ended or `stop` is set."""
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
    """Several growing answers on one terminal: one at a time, in order.

    Attributes:
        texts: The answers so far; only of several is told which one it is.
    """

    def __init__(self, num_answers: int):
        self.texts = [""] * num_answers
        self._is_ended = [False] * num_answers
        self._current_index = -1

    def print_delta(self, delta: TextDelta) -> None:
        """Print what it brings now, or when its answer's turn comes."""
        self.texts[delta.index] += delta.text
        self._is_ended[delta.index] |= delta.finished
        if self._current_index < 0:
            self._begin_next_answer()
        elif delta.index == self._current_index:
            print(delta.text, end="", flush=True)
        while self._current_index < len(self.texts) - 1 and self._is_ended[self._current_index]:
            self._begin_next_answer()

    def end_line(self) -> None:
        """Nothing more comes: end the line. To be called once: each call ends one."""
        printed = self.texts[self._current_index] if self._current_index >= 0 else ""
        if printed and not printed.endswith("\n"):
            print(flush=True)

    def _begin_next_answer(self) -> None:
        """Begin the next answer with what came of it so far: `print_delta` has noted that before."""
        self.end_line()  # of the answer before it
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
    """Inside, the first Ctrl-C sets the flag instead of raising KeyboardInterrupt."""
    flag = threading.Event()

    def handle(*_: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield flag
        return
    previous_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def converse(session: Session) -> int:
    """Take turns with the person at the terminal until Ctrl-D; returns the exit code.

    Ctrl-C during an answer ends that answer only. A turn that fails is forgotten.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import gives input() line editing and history)
    print("Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
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
    """Times one answer and keeps the pool's figures while it is made."""

    def __init__(self, engine: "Engine", params: SamplingParams):
        from jpaged.observe.pool_text import (
            BusyPoolSampler,  # with numpy, which --help does without
        )

        self._engine = engine
        self._is_unstreamed = not params.is_streamable
        self._start_stats: EngineStats = engine.stats()
        self._busy_stats = self._start_stats
        self._pool = BusyPoolSampler(engine)
        self._start_time = self._read_clock()
        self._token_times: list[tuple[float, int]] = []  # when, how many tokens
        self._finish_reason: str | None = None

    def record(self, deltas: Sequence[TextDelta]) -> None:
        """Note what a step brought."""
        if num_tokens := sum(len(delta.token_ids) for delta in deltas):
            self._token_times.append((self._read_clock(), num_tokens))
        for delta in deltas:
            self._finish_reason = delta.finish_reason
        stats = self._engine.stats()
        if stats.num_running:
            self._busy_stats = stats
            self._pool.record(stats)

    def report(self) -> str:
        """The figures, a line each."""
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
                f"waste     {busy.num_waste_slots} of {format_count(num_slots, 'slot')} in last blocks "
                f"({busy.waste:.1%})",
                f"pressure  {format_count(num_preemptions, 'preemption')}",
                *self._pool.format_lines(),
            )
        )

    def _read_clock(self) -> float:
        """Seconds; those spent on looking at the pool are not the engine's."""
        return time.perf_counter() - self._pool.seconds_spent

    @property
    def _num_tokens(self) -> int:
        return sum(count for _, count in self._token_times)

    def _format_speed(self) -> str:
        if not self._token_times:
            return "no token came"
        first, last = self._token_times[0], self._token_times[-1]
        if self._is_unstreamed:
            return f"answers after {last[0] - self._start_time:.3f} s"
        text = f"first token after {first[0] - self._start_time:.3f} s"
        if last[0] > first[0]:
            rate = (self._num_tokens - first[1]) / (last[0] - first[0])
            text += f", then {rate:.1f} tokens/s"
        return text


def format_error(error: Exception) -> str:
    """An error's message on one line, or its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
