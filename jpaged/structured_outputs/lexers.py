"""Pools of compiled grammars, and the memory that they take.

llguidance calls a grammar's compiled tokenizer rules a lexer. A lexer keeps a state for every text
that an answer has had, so it grows with its answers.
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
"""Seconds between two measurements of the resident memory: one takes some 15 us."""

_HEAP_INTERVAL_S = 1.0
"""Seconds between two measurements of the heap: one takes 15 to 30 ms where much is free."""

MIN_LEXER_TOKENS = 1024
"""Minimum number of tokens after which a lexer that is not broken is replaced."""


class _Mallinfo(ctypes.Structure):
    """What `mallinfo2` returns."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


@cache
def _libc() -> Any:
    """Return the C library, with the result types of the functions used here."""
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):  # glibc before 2.33, musl
        libc.mallinfo2.restype = _Mallinfo
    return libc


def heap_bytes() -> int:
    """Return the bytes that this process has allocated."""
    try:
        found = _libc().mallinfo2().numbers
    except AttributeError:
        return _resident_bytes()
    return found[7] + found[4]  # uordblks, hblkhd: in arenas, and mapped alone


def _resident_bytes() -> int:
    """Return the bytes in memory that are this process's alone."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def _trim_heap() -> None:
    """Return free memory to the system."""
    with suppress(AttributeError):  # not glibc
        _libc().malloc_trim(0)


class LexerMemory:
    """Measure the memory of all lexers, as the growth of this process since it read the vocabulary.

    llguidance does not tell how large a lexer is, and the mask process allocates little else.
    """

    def __init__(self):
        self._resident, self._heap = _resident_bytes(), heap_bytes()
        self._fragments = 0  # free bytes that cannot be returned to the system
        self._is_full, self._valid_until = False, 0.0
        self._measured_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether lexers take more than `bounds.MAX_LEXER_BYTES`, free memory included."""
        if (now := time.monotonic()) >= self._valid_until:
            self._valid_until = now + _RESIDENT_INTERVAL_S
            taken = _resident_bytes() - self._resident - self._fragments
            self._is_full = taken > bounds.MAX_LEXER_BYTES
        return self._is_full

    def trim_if_full(self) -> bool:
        """Return `is_full` after free memory went back to the system, once a second at most.

        Takes tens of milliseconds where much memory is free.
        """
        with self._lock:
            if self.is_full and time.monotonic() - self._measured_at >= _HEAP_INTERVAL_S:
                _trim_heap()
                resident = _resident_bytes() - self._resident
                self._fragments = max(0, resident - (heap_bytes() - self._heap))
                self._measured_at, self._valid_until = time.monotonic(), 0.0
            return self.is_full

    def release(self) -> None:
        """Return free memory to the system. No lexer is left."""
        _trim_heap()
        self._fragments, self._valid_until = 0, 0.0


class LexerUse(Enum):
    """How an answer uses a lexer."""

    EXCLUSIVE = auto()  # no other answer uses it; later answers will
    SHARED = auto()  # other answers use it
    PRIVATE = auto()  # no other answer uses it, now or later


@dataclass(eq=False)
class Lexer:
    """A grammar compiled once.

    Attributes:
        start: llguidance's matcher, at the start; its copies share its lexer.
        num_tokens: Number of tokens of the finished answers that used it.
        is_broken: Whether it exceeded a limit, so that every copy of `initial_matcher` fails.
    """

    initial_matcher: Any
    num_tokens: int = 0
    is_broken: bool = False


class LexerPool:
    """Pool of compiled copies of one grammar.

    An answer gets a copy of its own while any is free, else shares one. Copies of llguidance's
    matcher share a lexer and its lock, so answers that share a lexer get their masks one at a time.
    A lexer keeps the states of finished answers, and llguidance does not report their number. After
    too many states have broken a lexer, the grammar's lexers are replaced after half as many
    tokens.

    Args:
        first: llguidance's matcher, at the start.
        make: Compiles another.
        is_cheap: Whether compiling is quick: there may be `bounds.MAX_GRAMMAR_LEXERS` lexers, else one.
    """

    def __init__(self, first: Any, compile_matcher: Callable[[], Any], is_cheap: bool):
        self._lexers = [Lexer(first)]
        self._spare = [*self._lexers]
        self.compile_matcher, self.is_cheap = compile_matcher, is_cheap
        self._max_lexers = bounds.MAX_GRAMMAR_LEXERS if is_cheap else 1
        # If a shared lexer breaks, all its answers need another at the same time.
        self._max_tokens: float = float("inf") if is_cheap else bounds.MAX_SHARED_TOKENS
        self._num_shared = 0
        self._lock = threading.Lock()
        self._compile_lock = threading.Lock()  # others do not wait for it: it may take seconds

    @property
    def num_lexers(self) -> int:
        """Those that there are."""
        return len(self._lexers)

    @property
    def num_spare(self) -> int:
        """Those that no answer has."""
        return len(self._spare)

    def acquire(self, is_memory_full: bool = False) -> tuple[Lexer, LexerUse]:
        """Return a lexer for an answer, and how the answer uses it; `release` takes it back.

        Compile another lexer if none is spare. Where memory is short, share one if there is one.
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
        """Return whether `acquire` would take long: no lexer is usable, and compiling is not quick."""
        return not self.is_cheap and not any(map(self._is_usable, [*self._lexers]))

    def _find_usable(self, is_memory_full: bool) -> tuple[Lexer, LexerUse] | None:
        """Return as `acquire`, or None if it must compile a lexer."""
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
        """Take back the lexer of an answer that is over and consumed some tokens."""
        # No lock: the garbage collector calls it, anywhere.
        lexer.num_tokens += len(consumed)
        if use is LexerUse.EXCLUSIVE:
            self._spare.append(lexer)

    def note_broken(self, lexer: Lexer, num_consumed: int) -> None:
        """Note that a lexer exceeded a limit, in an answer that consumed `num_consumed` tokens."""
        if not lexer.is_broken:
            lexer.is_broken = True
            num_tokens = max(MIN_LEXER_TOKENS, (lexer.num_tokens + num_consumed) // 2)
            self._max_tokens = min(self._max_tokens, num_tokens)

    def retire(self, lexer: Lexer) -> None:
        """Give a lexer to no more answers."""
        with self._lock:
            if lexer in self._lexers:
                self._lexers.remove(lexer)

    def drop_spare(self, min_lexers: int) -> list[Lexer]:
        """Remove and return spare lexers while more than `min_lexers` lexers are left.

        To free them may take a millisecond for each MiB: the caller does it without a lock.
        """
        dropped: list[Lexer] = []
        with self._lock:
            while self._spare and len(self._lexers) > min_lexers:
                dropped.append(self._spare.pop())
                if dropped[-1] in self._lexers:
                    self._lexers.remove(dropped[-1])
        return dropped
