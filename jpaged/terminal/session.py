"""Answers at the terminal: printed as they come, measured, one after another in a conversation."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jpaged.errors import counted
from jpaged.outputs import TextDelta
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

    def ask_in_chat(self, prompt: str, history: Sequence[Message] = ()) -> bool:
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
        watch = Watch(self.engine, self._params) if self._stats else None
        page, complete = Page(self._params.n), False
        try:
            with interrupt_flag() as interrupted:
                self._answer(prompt, page, watch, interrupted)
                complete = not interrupted.is_set()
        except KeyboardInterrupt:
            pass
        finally:
            page.end()
            self.answer = page.texts[0]
        if watch is not None:
            print(watch.report(), file=sys.stderr)
        return complete

    def _answer(
        self, prompt: str | list[int], page: "Page", watch: "Watch | None", stop: threading.Event
    ) -> None:
        """Step until the answers have ended or `stop` is set."""
        request_id, finished = self.engine.add_request(prompt, self._params), False
        try:
            while not finished and not stop.is_set():
                self.engine.advance()
                news = [it for it in self.engine.take_deltas() if it.request_id == request_id]
                deltas = [delta for it in news for delta in it.deltas]
                for delta in deltas:
                    page.show(delta)
                if watch is not None:
                    watch.see(deltas)
                for it in news:
                    if it.error is not None:
                        raise RuntimeError(f"the request failed: {it.error}")
                    finished |= it.finished
        finally:
            self.engine.abort(request_id)


class Page:
    """Several growing answers on one terminal: one at a time, in order.

    Attributes:
        texts: The answers so far; only of several is told which one it is.
    """

    def __init__(self, num_answers: int):
        self.texts = [""] * num_answers
        self._ended = [False] * num_answers
        self._turn = -1

    def show(self, delta: TextDelta) -> None:
        """Print what it brings now, or when its answer's turn comes."""
        self.texts[delta.index] += delta.text
        self._ended[delta.index] |= delta.finished
        if self._turn < 0:
            self._next()
        elif delta.index == self._turn:
            print(delta.text, end="", flush=True)
        while self._turn < len(self.texts) - 1 and self._ended[self._turn]:
            self._next()

    def end(self) -> None:
        """Nothing more comes: end the line. To be called once: each call ends one."""
        shown = self.texts[self._turn] if self._turn >= 0 else ""
        if shown and not shown.endswith("\n"):
            print(flush=True)

    def _next(self) -> None:
        """Begin the next answer with what came of it so far: `show` has noted that before."""
        self.end()  # of the answer before it
        self._turn += 1
        if len(self.texts) > 1:
            print(f"answer {self._turn + 1} of {len(self.texts)}:", file=sys.stderr, flush=True)
        print(self.texts[self._turn], end="", flush=True)


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
    history: list[Message] = []
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
            print(f"error: {one_line(error)}", file=sys.stderr)
        else:
            history.append({"role": "user", "content": text})
            history.append({"role": "assistant", "content": session.answer})


class Watch:
    """Times one answer and keeps the pool's figures while it is made."""

    def __init__(self, engine: "Engine", params: SamplingParams):
        from jpaged.observe.pool_text import BusyPool  # with numpy, which --help does without

        self._engine = engine
        self._comes_whole = not params.is_streamable
        self._before: EngineStats = engine.stats()
        self._busy = self._before
        self._pool = BusyPool(engine)
        self._started = self._now()
        self._times: list[tuple[float, int]] = []  # when, how many tokens
        self._finish_reason: str | None = None

    def see(self, deltas: Sequence[TextDelta]) -> None:
        """Note what a step brought."""
        if num_tokens := sum(len(delta.token_ids) for delta in deltas):
            self._times.append((self._now(), num_tokens))
        for delta in deltas:
            self._finish_reason = delta.finish_reason
        stats = self._engine.stats()
        if stats.num_running:
            self._busy = stats
            self._pool.see(stats)

    def report(self) -> str:
        """The figures, a line each."""
        now, before, busy = self._engine.stats(), self._before, self._busy
        num_slots = busy.num_used_blocks * busy.block_size
        num_preemptions = now.num_preemptions - before.num_preemptions
        return "\n".join(
            (
                f"tokens    {now.num_prompt_tokens - before.num_prompt_tokens} prompt, "
                f"{self._num_tokens} generated ({self._finish_reason or 'interrupted'})",
                f"speed     {self._speed()}",
                f"blocks    {busy.num_used_blocks} used at the end, peak {now.peak_used_blocks}, "
                f"total {now.num_blocks} (of {counted(now.block_size, 'token')})",
                f"prefix    {now.num_cached_tokens - before.num_cached_tokens} of the prompt's "
                f"tokens cached, {counted(now.num_cached_blocks, 'free block')} cached",
                f"waste     {busy.num_waste_slots} of {counted(num_slots, 'slot')} in last blocks "
                f"({busy.waste:.1%})",
                f"pressure  {counted(num_preemptions, 'preemption')}",
                *self._pool.lines(),
            )
        )

    def _now(self) -> float:
        """Seconds; those spent on looking at the pool are not the engine's."""
        return time.perf_counter() - self._pool.seconds

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
