"""Pools of llguidance's lexers, and a measure of the memory that all lexers take.

A lexer holds the compiled regular expressions and texts of a grammar. The lexer adds a state for
each new text in an answer and keeps the state, so the lexer grows with the answers that use it.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from pathlib import Path
from typing import Any

from jpaged.structured_outputs import bounds

_RESIDENT_INTERVAL_S = 0.01
"""Minimum seconds between two measurements of this process's resident memory.

A measurement takes about 15 us."""

_HEAP_INTERVAL_S = 1.0
"""Minimum seconds between two measurements of this process's heap.

A measurement takes 15 to 30 ms if the heap has much free memory."""

MIN_LEXER_TOKENS = 1024
"""Minimum number of tokens that a lexer matches before a `LexerPool` replaces the lexer.

A lexer that exceeds a limit of llguidance is replaced earlier."""


class _Mallinfo(ctypes.Structure):
    """Result of glibc's `mallinfo2`."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


@cache
def _libc() -> Any:
    """Load the C library, and declare the result types of the functions that this module calls."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # glibc before 2.33 and musl lack `mallinfo2`
        libc.mallinfo2.restype = _Mallinfo
    return libc


def heap_bytes() -> int:
    """Return the number of heap bytes that this process has allocated."""
    try:
        found = _libc().mallinfo2().numbers
    except AttributeError:
        return _resident_bytes()
    # The sum of two fields: uordblks (used bytes of arenas) and hblkhd (bytes of large mappings).
    return found[7] + found[4]


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes, without shared pages."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def _trim_heap() -> None:
    """Return free heap memory to the operating system."""
    with suppress(AttributeError):  # only glibc has `malloc_trim`
        _libc().malloc_trim(0)


class LexerMemory:
    """Measures the memory of all lexers as the growth of this process since the object was created.

    llguidance does not report the size of a lexer, and the process allocates little other memory.
    """

    def __init__(self):
        self._resident, self._heap = _resident_bytes(), heap_bytes()
        self._fragments = 0  # number of free bytes that malloc cannot return to the system
        self._is_full, self._valid_until = False, 0.0
        self._measured_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether the lexers take more than `bounds.MAX_LEXER_BYTES`.

        Memory of deleted lexers may count too, until `trim_if_full` returns the memory to the
        operating system.
        """
        if (now := time.monotonic()) >= self._valid_until:
            self._valid_until = now + _RESIDENT_INTERVAL_S
            taken = _resident_bytes() - self._resident - self._fragments
            self._is_full = taken > bounds.MAX_LEXER_BYTES
        return self._is_full

    def trim_if_full(self) -> bool:
        """Release free memory to the operating system if the lexers take too much memory. Return
        whether they still do, as `is_full` does.

        Memory is released at most once per second. Releasing much memory takes tens of
        milliseconds.
        """
        with self._lock:
            if self.is_full and time.monotonic() - self._measured_at >= _HEAP_INTERVAL_S:
                _trim_heap()
                resident = _resident_bytes() - self._resident
                self._fragments = max(0, resident - (heap_bytes() - self._heap))
                self._measured_at, self._valid_until = time.monotonic(), 0.0
            return self.is_full

    def release(self) -> None:
        """Release free memory to the operating system after all lexers were dropped."""
        _trim_heap()
        self._fragments, self._valid_until = 0, 0.0


class LexerUse(Enum):
    """How an answer uses a lexer: whether other answers may use the same lexer, now or later."""

    EXCLUSIVE = auto()  # one answer at a time uses the lexer, and later answers reuse it
    SHARED = auto()  # several answers use the lexer at the same time
    PRIVATE = auto()  # only one answer ever uses the lexer


@dataclass(eq=False)
class Lexer:
    """A lexer that llguidance has compiled from a grammar. A grammar may have several lexers.

    Attributes:
        initial_matcher: llguidance's matcher before the first token. All copies of this matcher use
            the same lexer.
        num_tokens: Number of tokens of finished answers that the lexer has matched.
        is_broken: Whether the lexer exceeded a limit of llguidance. All copies of `initial_matcher`
            then fail.
    """

    initial_matcher: Any
    num_tokens: int = 0
    is_broken: bool = False


class LexerPool:
    """Pool of lexers of one grammar.

    An answer gets an unused lexer, or a new lexer if the pool may grow. Otherwise, the answer
    shares a lexer. The masks of answers that share a lexer are made one after another, because a
    lexer has a lock.

    A lexer keeps the states of finished answers, and llguidance does not report the number of
    states. Therefore, the pool counts tokens. After a lexer has exceeded a limit of llguidance at n
    tokens, the pool replaces each lexer of the grammar at n / 2 tokens.

    Args:
        first: llguidance's matcher of the compiled grammar, before the first token.
        compile_matcher: Function that compiles the grammar again and returns a new matcher.
        is_cheap: Whether compiling is fast. If so, the pool has up to `bounds.MAX_GRAMMAR_LEXERS`
            lexers, otherwise one.
    """

    def __init__(self, first: Any, compile_matcher: Callable[[], Any], is_cheap: bool):
        self._lexers = [Lexer(first)]
        self._spare = [*self._lexers]
        self.compile_matcher, self.is_cheap = compile_matcher, is_cheap
        self._max_lexers = bounds.MAX_GRAMMAR_LEXERS if is_cheap else 1
        # Replace a shared lexer early. If a shared lexer exceeds a limit of llguidance, all answers
        # that share the lexer need a new lexer.
        self._max_tokens: float = float("inf") if is_cheap else bounds.MAX_SHARED_TOKENS
        self._num_shared = 0
        self._lock = threading.Lock()
        # A thread holds `_compile_lock` while it compiles a lexer, which may take seconds. A thread
        # holds `_lock` only for short updates.
        self._compile_lock = threading.Lock()

    @property
    def num_lexers(self) -> int:
        """Number of lexers in the pool."""
        return len(self._lexers)

    @property
    def num_spare(self) -> int:
        """Number of lexers that no answer uses."""
        return len(self._spare)

    def acquire(self, is_memory_full: bool = False) -> tuple[Lexer, LexerUse]:
        """Return a lexer for an answer, and whether other answers share the lexer (`LexerUse`).

        If all lexers are in use and the pool may grow, compile a lexer. If `is_memory_full`, share
        an existing lexer instead. The caller must `release` the lexer.
        """
        if (found := self._find_usable(is_memory_full)) is not None:
            return found
        with self._compile_lock:
            if (found := self._find_usable(is_memory_full)) is not None:
                return found
            lexer = Lexer(self.compile_matcher())
            with self._lock:
                self._lexers.append(lexer)
            return lexer, LexerUse.EXCLUSIVE

    def must_compile(self) -> bool:
        """Return whether `acquire` would have to compile a lexer and the compilation would be slow.

        Return False if the grammar is cheap to compile (`is_cheap`).
        """
        return not self.is_cheap and not any(map(self._is_usable, [*self._lexers]))

    def _find_usable(self, is_memory_full: bool) -> tuple[Lexer, LexerUse] | None:
        """Find an existing lexer for `acquire`.

        Returns:
            The lexer and its `LexerUse`, or None if a new lexer must be compiled.
        """
        with self._lock:
            self._lexers = [it for it in self._lexers if self._is_usable(it)]
            while self._spare:
                lexer = self._spare.pop()
                if lexer in self._lexers:
                    return lexer, LexerUse.EXCLUSIVE
            if self._lexers and (is_memory_full or len(self._lexers) >= self._max_lexers):
                self._num_shared += 1
                return self._lexers[self._num_shared % len(self._lexers)], LexerUse.SHARED
            return None

    def _is_usable(self, lexer: Lexer) -> bool:
        return not lexer.is_broken and lexer.num_tokens <= self._max_tokens

    def release(self, lexer: Lexer, use: LexerUse, consumed: list[int]) -> None:
        """Take back the lexer of a finished answer. `consumed` holds the answer's tokens."""
        # Do not take `_lock`, because the garbage collector may call this method in a thread that
        # holds `_lock`.
        lexer.num_tokens += len(consumed)
        if use is LexerUse.EXCLUSIVE:
            self._spare.append(lexer)

    def note_broken(self, lexer: Lexer, num_consumed: int) -> None:
        """Record that a lexer exceeded a limit of llguidance, such as the number of states.

        `num_consumed` is the number of tokens that the lexer has matched for the answer in which
        the error occurred.
        """
        if not lexer.is_broken:
            lexer.is_broken = True
            num_tokens = max(MIN_LEXER_TOKENS, (lexer.num_tokens + num_consumed) // 2)
            self._max_tokens = min(self._max_tokens, num_tokens)

    def retire(self, lexer: Lexer) -> None:
        """Remove a lexer from the pool, so that new answers do not get it."""
        with self._lock:
            if lexer in self._lexers:
                self._lexers.remove(lexer)

    def drop_spare(self, min_lexers: int) -> list[Lexer]:
        """Remove and return unused lexers until at most `min_lexers` lexers are in the pool.

        The caller must free the returned lexers while it holds no lock, because freeing takes up to
        a millisecond per MiB.
        """
        dropped: list[Lexer] = []
        with self._lock:
            while self._spare and len(self._lexers) > min_lexers:
                dropped.append(self._spare.pop())
                if dropped[-1] in self._lexers:
                    self._lexers.remove(dropped[-1])
        return dropped
