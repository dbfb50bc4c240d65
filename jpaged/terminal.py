"""Answers at the terminal: printed as they come, measured, one after another in a conversation."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from jpaged.outputs import RequestOutput, TextDelta
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.observe.statistics import EngineStats

Message = Mapping[str, Any]


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

    def ask_in_chat(self, prompt: str, history: list[Message] | None = None) -> bool:
        """As `ask`, through the chat template, with the messages before the prompt."""
        messages = [*(history or ()), _message("user", prompt)]
        return self.ask(self.engine.render_chat(messages))

    def ask(self, prompt: str | list[int]) -> bool:
        """Print the answer, or several one after the other; False if Ctrl-C cut it short.

        Raises what the engine raises. With several, stderr tells before each which one it is. The
        first is printed as it comes, the others when those before them have ended; what a beam
        search found is printed at its end.

        The first Ctrl-C takes effect between two deltas, so that it never breaks into a step of
        the engine; a second one does not wait.
        """
        watch = Watch(self.engine, self._comes_whole) if self._stats else None
        self.answer = ""
        page = Page(self._params.n)
        try:
            with _interrupt_flag() as interrupted:
                self._print_answers(prompt, page, watch, interrupted)
            complete = not interrupted.is_set()
        except KeyboardInterrupt:
            complete = False
        finally:
            page.end()
        if watch is not None:
            print(watch.report(), file=sys.stderr)
        return complete

    def _print_answers(
        self,
        prompt: str | list[int],
        page: "Page",
        watch: "Watch | None",
        interrupted: threading.Event,
    ) -> None:
        start = self._search if self._comes_whole else self._stream
        with contextlib.closing(start(prompt)) as deltas:  # closing it early aborts the request
            for delta in deltas:
                if delta.index == 0:
                    self.answer += delta.text
                page.show(delta)
                if watch is not None:
                    watch.see(delta)
                if interrupted.is_set():
                    return

    @property
    def _comes_whole(self) -> bool:
        """Whether which answers are shown is known only at the end."""
        return bool(self._params.beam_width) or self._params.num_samples > self._params.n

    def _stream(self, prompt: str | list[int]) -> Generator[TextDelta]:
        return cast("Generator[TextDelta]", self.engine.stream(prompt, self._params))

    def _search(self, prompt: str | list[int]) -> Generator[TextDelta]:
        """Whole answers as a stream: an empty delta a step, and at the end the answers."""
        request_id = self.engine.add_request(prompt, self._params)
        try:
            while self.engine.has_unfinished_requests:
                found = self.engine.step()
                yield TextDelta("")
                for output in found:
                    if output.finished:
                        yield from _whole_answers(output)
        finally:
            self.engine.abort(request_id)


def _whole_answers(output: RequestOutput) -> Iterator[TextDelta]:
    for found in output.outputs:
        ids, reason = tuple(found.token_ids), found.finish_reason
        yield TextDelta(found.text, ids, finish_reason=reason, index=found.index)


class Page:
    """Several growing answers on one terminal: one at a time, in order.

    Args:
        num_answers: How many there will be; only of several is told which one it is.
    """

    def __init__(self, num_answers: int):
        self._num_answers = num_answers
        self._texts = [""] * num_answers  # of those that wait for their turn
        self._ended = [False] * num_answers
        self._turn = -1
        self._last = "\n"  # what stands before the cursor, or nothing at all

    def show(self, delta: TextDelta) -> None:
        """Print what it brings now, or when its answer's turn comes."""
        if self._turn < 0:
            self._next()
        self._ended[delta.index] |= delta.finish_reason is not None
        if delta.index != self._turn:
            self._texts[delta.index] += delta.text
            return
        self._write(delta.text)
        while self._turn < self._num_answers - 1 and self._ended[self._turn]:
            self._next()

    def end(self) -> None:
        """Nothing more comes: end the line."""
        if self._last != "\n":
            print(flush=True)
            self._last = "\n"

    def _next(self) -> None:
        self.end()
        self._turn += 1
        if self._num_answers > 1:
            print(f"answer {self._turn + 1} of {self._num_answers}:", file=sys.stderr, flush=True)
        self._write(self._texts[self._turn])

    def _write(self, text: str) -> None:
        print(text, end="", flush=True)
        self._last = text[-1:] or self._last


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Inside, the first Ctrl-C sets the flag instead of raising KeyboardInterrupt."""
    flag = threading.Event()

    def handle(*_: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield flag
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


def converse(session: Session) -> int:
    """Take turns with the person at the terminal until Ctrl-D; returns the exit code.

    Ctrl-C during an answer ends that answer only. A turn that fails is forgotten.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import gives input() line editing and history)
    print("Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    messages: list[Message] = []
    while True:
        try:
            text = input(">>> ").strip()
        except EOFError:
            print()
            return 0
        if text:
            messages = _take_turn(session, messages, text)


def _take_turn(session: Session, history: list[Message], text: str) -> list[Message]:
    try:
        session.ask_in_chat(text, history)
    except Exception as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return history
    return [*history, _message("user", text), _message("assistant", session.answer)]


class Watch:
    """Times one answer and keeps the pool's figures while it is made."""

    def __init__(self, engine: "Engine", comes_whole: bool):
        from jpaged.observe.pool_text import BusyPool  # with numpy, which --help does without

        self._engine = engine
        self._comes_whole = comes_whole  # the answers come all at once
        self._before: EngineStats = engine.stats()
        self._busy = self._before
        self._pool = BusyPool(engine)
        self._started = self._now()
        self._times: list[tuple[float, int]] = []  # when, how many tokens
        self._finish_reason: str | None = None

    def see(self, delta: TextDelta) -> None:
        """Note a delta."""
        if delta.token_ids:
            self._times.append((self._now(), len(delta.token_ids)))
        self._finish_reason = delta.finish_reason
        stats = self._engine.stats()
        if stats.num_running:
            self._busy = stats
            self._pool.see(stats)

    def report(self) -> str:
        """The figures, a line each."""
        now, busy = self._engine.stats(), self._busy
        num_slots = busy.num_used_blocks * busy.block_size
        return "\n".join(
            (
                f"tokens    {now.num_prompt_tokens - self._before.num_prompt_tokens} prompt, "
                f"{self._num_tokens} generated ({self._finish_reason or 'interrupted'})",
                f"speed     {self._speed()}",
                f"blocks    {busy.num_used_blocks} used at the end, peak {now.peak_used_blocks}, "
                f"total {now.num_blocks} (of {now.block_size} tokens)",
                f"prefix    {self._num_cached_tokens(now)} of the prompt's tokens cached, "
                f"{now.num_cached_blocks} free blocks cached",
                f"waste     {busy.num_waste_slots} of {num_slots} slots in last blocks "
                f"({busy.waste:.1%})",
                f"pressure  {now.num_preemptions - self._before.num_preemptions} preemptions",
                *self._pool.lines(),
            )
        )

    def _now(self) -> float:
        """Seconds; those spent on looking at the pool are not the engine's."""
        return time.perf_counter() - self._pool.seconds

    def _num_cached_tokens(self, now: "EngineStats") -> int:
        return now.num_cached_tokens - self._before.num_cached_tokens

    @property
    def _num_tokens(self) -> int:
        return sum(count for _, count in self._times)

    def _speed(self) -> str:
        if not self._times:
            return "no token came"
        first, last = self._times[0], self._times[-1]
        if self._comes_whole:
            return f"answers after {last[0] - self._started:.3f} s"
        text = f"first token after {first[0] - self._started:.3f} s"
        if last[0] > first[0]:
            rate = (self._num_tokens - first[1]) / (last[0] - first[0])
            text += f", then {rate:.1f} tokens/s"
        return text


def one_line(error: Exception) -> str:
    """An error's message on one line, or its kind if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
