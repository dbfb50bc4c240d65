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

_RESIDENT_SECONDS = 0.01
"""Seconds between two measurements of the resident memory: one takes some 15 us."""

_HEAP_SECONDS = 1.0
"""Seconds between two measurements of the heap: one takes 15 to 30 ms where much is free."""

FEWEST_LEXER_TOKENS = 1024
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


def _trim() -> None:
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
        self._is_short, self._until = False, 0.0
        self._measured_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def is_short(self) -> bool:
        """Whether lexers take more than `bounds.LEXER_MEMORY`, free memory included."""
        if (now := time.monotonic()) >= self._until:
            self._until = now + _RESIDENT_SECONDS
            taken = _resident_bytes() - self._resident - self._fragments
            self._is_short = taken > bounds.LEXER_MEMORY
        return self._is_short

    def settle(self) -> bool:
        """Return `is_short` after free memory went back to the system, once a second at most.

        Takes tens of milliseconds where much memory is free.
        """
        with self._lock:
            if self.is_short and time.monotonic() - self._measured_at >= _HEAP_SECONDS:
                _trim()
                resident = _resident_bytes() - self._resident
                self._fragments = max(0, resident - (heap_bytes() - self._heap))
                self._measured_at, self._until = time.monotonic(), 0.0
            return self.is_short

    def release(self) -> None:
        """Return free memory to the system. No lexer is left."""
        _trim()
        self._fragments, self._until = 0, 0.0


class Use(Enum):
    """How an answer uses a lexer."""

    OWN = auto()  # no other answer uses it; later answers will
    SHARED = auto()  # other answers use it
    PRIVATE = auto()  # no other answer uses it, now or later


@dataclass(eq=False)
class Lexer:
    """A grammar compiled once.

    Attributes:
        start: llguidance's matcher, at the start; its copies share its lexer.
        num_tokens: Number of tokens of the finished answers that used it.
        is_broken: Whether it exceeded a limit, so that every copy of `start` fails.
    """

    start: Any
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
        is_cheap: Whether compiling is quick: there may be `bounds.LEXERS` lexers, else one.
    """

    def __init__(self, first: Any, make: Callable[[], Any], is_cheap: bool):
        self._made = [Lexer(first)]
        self._spare = [*self._made]
        self.make, self.is_cheap = make, is_cheap
        self._most = bounds.LEXERS if is_cheap else 1
        # If a shared lexer breaks, all its answers need another at the same time.
        self._most_tokens: float = float("inf") if is_cheap else bounds.SHARED_TOKENS
        self._num_shared = 0
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # others do not wait for it: it may take seconds

    @property
    def num_made(self) -> int:
        """Those that there are."""
        return len(self._made)

    @property
    def num_spare(self) -> int:
        """Those that no answer has."""
        return len(self._spare)

    def take(self, is_short: bool = False) -> tuple[Lexer, Use]:
        """Return a lexer for an answer, and how the answer uses it; `give` takes it back.

        Compile another lexer if none is spare. Where memory is short, share one if there is one.
        """
        if (found := self._find(is_short)) is not None:
            return found
        with self._compiling:
            if (found := self._find(is_short)) is not None:
                return found
            lexer = Lexer(self.make())
            with self._lock:
                self._made.append(lexer)
            return lexer, Use.OWN

    def must_compile(self) -> bool:
        """Return whether `take` would take long: no lexer is usable, and compiling is not quick."""
        return not self.is_cheap and not any(map(self._is_usable, [*self._made]))

    def _find(self, is_short: bool) -> tuple[Lexer, Use] | None:
        """Return as `take`, or None if it must compile a lexer."""
        with self._lock:
            self._made = [it for it in self._made if self._is_usable(it)]
            while self._spare:
                lexer = self._spare.pop()
                if lexer in self._made:
                    return lexer, Use.OWN
            if self._made and (is_short or len(self._made) >= self._most):
                self._num_shared += 1
                return self._made[self._num_shared % len(self._made)], Use.SHARED
            return None

    def _is_usable(self, lexer: Lexer) -> bool:
        return not lexer.is_broken and lexer.num_tokens <= self._most_tokens

    def give(self, lexer: Lexer, use: Use, consumed: list[int]) -> None:
        """Take back the lexer of an answer that is over and consumed some tokens."""
        # No lock: the garbage collector calls it, anywhere.
        lexer.num_tokens += len(consumed)
        if use is Use.OWN:
            self._spare.append(lexer)

    def note_broken(self, lexer: Lexer, num_consumed: int) -> None:
        """Note that a lexer exceeded a limit, in an answer that consumed `num_consumed` tokens."""
        if not lexer.is_broken:
            lexer.is_broken = True
            num_tokens = max(FEWEST_LEXER_TOKENS, (lexer.num_tokens + num_consumed) // 2)
            self._most_tokens = min(self._most_tokens, num_tokens)

    def note_left(self, lexer: Lexer) -> None:
        """Give a lexer to no more answers."""
        with self._lock:
            if lexer in self._made:
                self._made.remove(lexer)

    def drop_spare(self, least: int) -> list[Lexer]:
        """Remove and return spare lexers while more than `least` lexers are left.

        To free them may take a millisecond for each MiB: the caller does it without a lock.
        """
        dropped: list[Lexer] = []
        with self._lock:
            while self._spare and len(self._made) > least:
                dropped.append(self._spare.pop())
                if dropped[-1] in self._made:
                    self._made.remove(dropped[-1])
        return dropped
