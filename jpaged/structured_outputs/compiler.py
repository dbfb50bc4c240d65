"""Grammars that answers obey: compiled, matched token by token, made into masks for the sampler.

llguidance does the parsing, in Rust and without Python's lock. What is ours: which tokens end an
answer, bounds on what a grammar may cost, and a passage before the grammar that is free.
"""

import ctypes
import json
import mmap
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ErrorKind, RequestError
from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.rewriting import enforced
from jpaged.structured_outputs.syntax import with_schemas
from jpaged.text.tokenizer import Tokenizer

MAX_CACHED = 64
"""Compiled grammars that are kept; one that is not kept is compiled anew."""

_JSON_OPTIONS: Any = {
    # One blank at most where JSON takes any: a model that is unsure would write them for ever.
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    # Without \u: a name has one spelling, so that none comes twice or past additionalProperties.
    "json_allowed_escapes": '"\\bfnrt',
}
"""How JSON is written, as llguidance takes it."""

_THREADS = {"grammars": 2, "kept": 1, "renewed": 2}
"""Number of threads that compile new grammars, that make matchers of compiled grammars, and that
compile a grammar again for a running answer."""

_FEWEST_RENEWAL_TOKENS = 64
"""An answer that fills a new lexer with fewer tokens fails: it has too many states by itself."""

_CHECK_TOKENS = 16
"""Tokens of an answer between two checks of the lexers' memory."""

_RESIDENT_SECONDS = 0.01
"""Seconds between two measurements of the resident memory: one takes some 15 us."""

_HEAP_SECONDS = 1.0
"""Seconds between two measurements of the heap: one takes 15 to 30 ms where much is free."""

_REPEATED_FUEL = 1 << 40
"""Fuel of a grammar that is compiled again, and of tokens that are consumed before the first mask:
both have been within the limits before."""

_TOKENS_PER_REFUEL = 16
"""Tokens that are consumed again with the fuel of one mask, in a lexer that answers share."""

_FEWEST_LEXER_TOKENS = 1024
"""Minimum number of tokens after which a lexer that is not broken is replaced."""

_STATE_BYTES = 1024
"""Bytes of a lexer's state: 560 measured for a string of bounded length."""

_ONE_OF_ADVICE = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf",
    "two cases of oneOf may allow the same value: use anyOf, or give the cases different types, "
    "constants, or constants in a required property",
)
"""An error text of llguidance, which names an option that clients do not have, and the text that
replaces it."""

_MAX_BREAKS = 2
"""Line breaks that may come between the free passage and the grammar."""


class GrammarError(RequestError):
    """A grammar cannot be compiled, is too complex to be matched, or forbids a token."""


def _limits(**changed: Any) -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**{**bounds.LIMITS, **changed})


def _source(form: StructuredOutputs) -> str:
    """The grammar as llguidance takes it."""
    from llguidance import LLMatcher

    match form.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(_schema_text(json.loads(form.json or "")))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_schema_text({"type": "object"}))
        case "regex":
            return LLMatcher.grammar_from_regex(form.regex or "")
        case "choice":
            # One terminal: as rules each choice would count as an item of the parser's row.
            choices = " | ".join(json.dumps(each) for each in form.choice or ())
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case _:
            return LLMatcher.grammar_from_lark(with_schemas(form.grammar or "", _schema_text))


def _schema_text(schema: Any) -> str:
    """A schema as llguidance takes it."""
    if isinstance(schema, dict):
        schema = {**enforced(schema), "x-guidance": _JSON_OPTIONS}
    return json.dumps(schema, separators=(",", ":"))


def _step(matcher: Any) -> None:
    """Match some token that may come, and look at what may follow it."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    if len(found := np.flatnonzero(bits)):
        matcher.consume_token(int(found[0]))
        matcher.compute_bitmask()


def _refused(form: StructuredOutputs, words: str) -> GrammarError:
    words = words.replace("<non-verbose/>", "").replace(*_ONE_OF_ADVICE)
    reason = " ".join(words.split())[:300]
    return GrammarError(f"structured_outputs.{form.kind}", f"cannot be enforced: {reason}")


def broken_matcher(tokens: "_Tokens") -> Any:
    """Return a matcher of llguidance's that refuses each token at once."""
    from llguidance import LLMatcher

    return LLMatcher(tokens.inner, "", log_level=0)


def _consume_again(tokens: "_Tokens", inner: Any, consumed: list[int]) -> bool:
    """Let llguidance's matcher consume tokens; return whether it allows all of them."""
    from llguidance import LLExecutor

    # llguidance releases Python's lock only where it is to match the tokens of two.
    executor, broken = LLExecutor(1), broken_matcher(tokens)
    return all(executor.consume_token_par([(inner, it), (broken, it)])[0] for it in consumed)


class Matcher:
    """How far one answer has come in a grammar. Not thread-safe.

    Attributes:
        ending_ids: Tokens that end the answer, where the grammar lets it end.
        is_stopped: Nothing but the end may follow.
        tokens: What is known of the tokenizer.
        pace: How long the grammar's masks take.
        inner: llguidance's own matcher.
        needs_lexer: `fill` must replace the lexer before it makes the next mask. That takes as long
            as compiling the grammar, so it does not belong in a thread that others wait for.
    """

    def __init__(self, grammar: "Grammar", ending_ids: frozenset[int]):
        self.ending_ids, self.is_stopped = ending_ids, False
        self._form, self.tokens, self._grammar = grammar.form, grammar.tokens, grammar
        self.pace = grammar.pace
        self.needs_lexer = False
        self._consumed: list[int] = []
        self._num_lexers = 0  # that it has had
        self._private_since: int | None = None  # len(_consumed) when it got a private lexer
        self._hold(*grammar.lexers.take(grammar.memory.is_short))
        self.inner: Any = self._lexer.start.deep_copy()
        self._free: bytes | None = b"" if self._form.after is not None else None
        self._is_opening = self._form.opening is not None and bool(grammar.opening_ids)
        self._opening_ids = grammar.opening_ids
        self._num_opened = 0
        self._num_breaks = _MAX_BREAKS

    @property
    def is_free(self) -> bool:
        """Whether all but the end may follow: the grammar has not begun."""
        return self._free is not None and not self._is_opening

    @property
    def is_begun(self) -> bool:
        """Whether the grammar alone decides: its free passage is over, line breaks too."""
        return self._free is None and not self._is_opening and self._num_breaks == _MAX_BREAKS

    def accept(self, token_id: int) -> None:
        """Take in the answer's next token; one that ends the answer changes nothing.

        Raises:
            GrammarError: it may not follow.
        """
        if token_id in self.ending_ids:
            return
        if self._is_opening and self._opens_on(token_id):
            return
        if self._free is not None:
            self._look_for_the_end(token_id)
            return
        if self._num_breaks < _MAX_BREAKS and token_id in self.tokens.break_ids:
            self._num_breaks += self.tokens.break_ids[token_id]
            return
        self._num_breaks = _MAX_BREAKS
        self._consume([token_id])

    def is_matched(self, token_id: int) -> bool:
        """Whether `accept` is `inner` consuming the token, then `outcome`."""
        return self.is_begun and not self.needs_lexer and token_id not in self.ending_ids

    def _opens_on(self, token_id: int) -> bool:
        """Whether a token goes on with the passage's opening; if not, there is no such passage."""
        if token_id != self._opening_ids[self._num_opened]:
            self._is_opening, self._free = False, None
            return False
        self._num_opened += 1
        self._is_opening = self._num_opened < len(self._opening_ids)
        return True

    def _look_for_the_end(self, token_id: int) -> None:
        end = (self._form.after or "").encode()
        text = (self._free or b"") + self.tokens.bytes_of(token_id)
        _, found, rest = text.partition(end)
        self._free = text[-len(end) :]
        if found:
            self._free, self._num_breaks = None, 0
            if rest := rest.lstrip(b"\n"):
                self._consume(self.tokens.inner.tokenize_bytes(rest))

    def _consume(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if self.needs_lexer:  # the next lexer consumes it
                self._consumed.append(token_id)
                continue
            error = self.outcome(token_id, self.inner.consume_token(token_id))
            if error is not None:
                raise error

    def outcome(self, token_id: int, is_allowed: bool) -> GrammarError | None:
        """Note that `inner` has consumed a token, or refused it; return what is wrong."""
        if not is_allowed:
            error = self._failure("the grammar does not allow the sampled token")
            if error is not None:
                return error
        self._consumed.append(token_id)
        self.is_stopped = is_allowed and self.inner.is_stopped()
        if not len(self._consumed) % _CHECK_TOKENS and self._grammar.memory.is_short:
            # A new lexer has the states of the text, without those that only masks needed.
            self.needs_lexer |= not self.is_stopped and self._may_shrink()
        return None

    def _hold(self, lexer: "_Lexer", use: "Use") -> None:
        """Keep a lexer until the next call, or until the answer is over."""
        self._lexer: Any = lexer
        self._num_lexers += 1
        self._since = len(self._consumed)
        self._private_since = self._since if use is Use.PRIVATE else None
        lexers = self._grammar.lexers
        self._leave = weakref.finalize(self, lexers.give, lexer, use, self._consumed)
        self._leave.atexit = False

    def _may_renew(self) -> bool:
        """Return whether a new lexer may help. It does not if the answer's states filled one."""
        since = self._private_since
        return since is None or len(self._consumed) - since >= _FEWEST_RENEWAL_TOKENS

    def _may_shrink(self) -> bool:
        """Return whether a new lexer may be smaller by more than it costs to compile."""
        if self._grammar.lexers.is_cheap:
            return self._may_renew()
        num_since = len(self._consumed) - self._since
        return min(num_since, self._lexer.num_tokens + num_since - _FEWEST_LEXER_TOKENS) >= (
            _FEWEST_RENEWAL_TOKENS
        )

    def _failure(self, otherwise: str) -> GrammarError | None:
        """Return why `inner` has failed, or set `needs_lexer` if the lexer is broken.

        A lexer breaks when it exceeds a limit. All matchers that share it fail from then on. Its
        states come from every answer that used it, so the answer at hand need not be the cause.
        """
        probe = self._lexer.start.deep_copy()
        probe.compute_bitmask()
        if not probe.is_error():
            return _refused(self._form, self.inner.get_error() or otherwise)
        self._grammar.lexers.note_broken(self._lexer, len(self._consumed))
        if not self._may_renew():
            return _refused(self._form, probe.get_error())
        self.needs_lexer = True
        return None

    def renew(self) -> None:
        """Replace the lexer, and consume the answer's tokens again.

        Raises:
            GrammarError: the lexers of all answers take too much memory.
        """
        self._leave.detach()
        self._grammar.lexers.note_left(self._lexer)
        self._lexer = self.inner = None  # the memory is free before more is taken
        num_since = len(self._consumed) - self._since
        may_share = self._num_lexers == 1 or num_since >= _FEWEST_RENEWAL_TOKENS
        lexer, use, self.inner = self._grammar.renew(self._grammar, self._consumed, may_share)
        self._hold(lexer, use)
        self.needs_lexer, self.is_stopped = False, self.inner.is_stopped()

    def fill(self, rows: np.ndarray, row: int) -> GrammarError | None:
        """Write what may follow into row `row` of masks, int32 [rows, W]; gives as `widen`."""
        while True:
            if self.needs_lexer:
                try:
                    self.renew()
                except GrammarError as error:
                    return error
            error = self.try_fill(rows, row)
            if not self.needs_lexer:
                return error

    def try_fill(self, rows: np.ndarray, row: int) -> GrammarError | None:
        """Fill as `fill`, or set `needs_lexer`: there is no mask until the lexer is replaced."""
        from llguidance.numpy import fill_next_token_bitmask

        if not self.is_free:
            fill_next_token_bitmask(self.inner, rows, row)
        return self.widen(rows[row])

    def widen(self, mask: np.ndarray) -> GrammarError | None:
        """Adapt llguidance's mask (anything while the answer is free) to this answer, in place: end
        tokens, line breaks, the opening. int32 [W].

        Returns:
            What went wrong, if the grammar failed or nothing may follow. None with `needs_lexer`
            set: there is no mask yet, `fill` makes it.
        """
        if self.is_free:  # but not the end: what must come has not
            mask[:] = self.tokens.not_eos
            self._forbid_the_end(mask)
            return None
        if self.inner.is_error():
            return self._failure("")
        may_end = self.tokens.take_eos(mask)
        if not may_end and self.is_begun:
            return None  # nearly all masks
        more = set(self.ending_ids) if self.inner.is_accepting() else set()
        if self._is_opening:
            if self._num_opened:
                mask[:], more = 0, set()
            more.add(self._opening_ids[self._num_opened])
        if self._num_breaks < _MAX_BREAKS:
            left = _MAX_BREAKS - self._num_breaks
            more |= {token for token, count in self.tokens.break_ids.items() if count <= left}
        if more:
            words = mask.view(np.uint32)
            for token in more:
                words[token // 32] |= np.uint32(1 << token % 32)
        if not mask.any():
            if not self.is_stopped:
                reason = "the grammar allows no next token here, and the answer is incomplete"
                return _refused(self._form, reason)
            mask[:] = ~self.tokens.not_eos  # with its new lexer the answer is complete
        return None

    def _forbid_the_end(self, mask: np.ndarray) -> None:
        words = mask.view(np.uint32)
        for token in self.ending_ids:
            words[token // 32] &= ~np.uint32(1 << token % 32)

    def too_slow(self) -> GrammarError:
        """Return the error of an answer whose masks took too long."""
        most = f"{bounds.MASK_SECONDS * 1e3:g} ms of CPU time"
        reason = f"its masks took more than {most} each on average: simplify it"
        return _refused(self._form, reason)

    def failed(self, error: BaseException) -> GrammarError:
        """Says that something unforeseen went wrong, with this answer alone."""
        return _refused(self._form, f"{type(error).__name__}: {error}")


@dataclass
class Pace:
    """What `masks.MaskMaker` has measured of a grammar.

    Attributes:
        num_watched: Number of masks, of all answers, that threads make and time.
    """

    num_watched: int = 0


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar.

    Attributes:
        form: What it was made of.
        lexers: llguidance's matchers, at the start.
        tokens: What it knows of the tokenizer.
        memory: Memory of all lexers.
        renew: `Grammars.renewed`.
        pace: How long its masks take.
    """

    form: StructuredOutputs
    lexers: "_Lexers"
    tokens: "_Tokens"
    opening_ids: tuple[int, ...]
    memory: "_Memory"
    renew: Callable[["Grammar", list[int], bool], tuple["_Lexer", "Use", Any]]
    pace: Pace = field(default_factory=Pace)

    def matcher(self, ending_ids: frozenset[int]) -> Matcher:
        """For one answer, which the tokens `ending_ids` may end."""
        return Matcher(self, ending_ids)


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


def _heap_bytes() -> int:
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


class _Memory:
    """Measure the memory of all lexers, as the growth of this process since it read the vocabulary.

    llguidance does not tell how large a lexer is, and the mask process allocates little else.
    """

    def __init__(self):
        self._resident, self._heap = _resident_bytes(), _heap_bytes()
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
                self._fragments = max(0, resident - (_heap_bytes() - self._heap))
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
class _Lexer:
    """A grammar compiled once.

    Attributes:
        start: llguidance's matcher, at the start; its copies share its lexer.
        num_tokens: Number of tokens of the finished answers that used it.
        is_broken: Whether it exceeded a limit, so that every copy of `start` fails.
    """

    start: Any
    num_tokens: int = 0
    is_broken: bool = False


class _Lexers:
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
        self._made = [_Lexer(first)]
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

    def take(self, is_short: bool = False) -> tuple[_Lexer, Use]:
        """Return a lexer for an answer, and how the answer uses it; `give` takes it back.

        Compile another lexer if none is spare. Where memory is short, share one if there is one.
        """
        if (found := self._find(is_short)) is not None:
            return found
        with self._compiling:
            if (found := self._find(is_short)) is not None:
                return found
            lexer = _Lexer(self.make())
            with self._lock:
                self._made.append(lexer)
            return lexer, Use.OWN

    def must_compile(self) -> bool:
        """Return whether `take` would take long: no lexer is usable, and compiling is not quick."""
        return not self.is_cheap and not any(map(self._is_usable, [*self._made]))

    def _find(self, is_short: bool) -> tuple[_Lexer, Use] | None:
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

    def _is_usable(self, lexer: _Lexer) -> bool:
        return not lexer.is_broken and lexer.num_tokens <= self._most_tokens

    def give(self, lexer: _Lexer, use: Use, consumed: list[int]) -> None:
        """Take back the lexer of an answer that is over and consumed some tokens."""
        # No lock: the garbage collector calls it, anywhere.
        lexer.num_tokens += len(consumed)
        if use is Use.OWN:
            self._spare.append(lexer)

    def note_broken(self, lexer: _Lexer, num_consumed: int) -> None:
        """Note that a lexer exceeded a limit, in an answer that consumed `num_consumed` tokens."""
        if not lexer.is_broken:
            lexer.is_broken = True
            num_tokens = max(_FEWEST_LEXER_TOKENS, (lexer.num_tokens + num_consumed) // 2)
            self._most_tokens = min(self._most_tokens, num_tokens)

    def note_left(self, lexer: _Lexer) -> None:
        """Give a lexer to no more answers."""
        with self._lock:
            if lexer in self._made:
                self._made.remove(lexer)

    def drop_spare(self, least: int) -> list[_Lexer]:
        """Remove and return spare lexers while more than `least` lexers are left.

        To free them may take a millisecond for each MiB: the caller does it without a lock.
        """
        dropped: list[_Lexer] = []
        with self._lock:
            while self._spare and len(self._made) > least:
                dropped.append(self._spare.pop())
                if dropped[-1] in self._made:
                    self._made.remove(dropped[-1])
        return dropped


class _Tokens:
    """A tokenizer's vocabulary, in llguidance's form: half a second for 130,000 tokens.

    Attributes:
        inner: llguidance's own.
        not_eos: int32 [W]: all ones but for the model's end tokens.
        break_ids: Tokens of nothing but line breaks, and how many.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        from llguidance.hf import from_tokenizer

        if not eos_token_ids:
            raise GrammarError(
                "structured_outputs",
                "needs an end token, and the model's config.json, generation config and tokenizer "
                "name none",
                remedy="set eos_token_id in config.json",
                kind=ErrorKind.UNSUPPORTED,
            )
        try:
            hf_tokenizer, eos = tokenizer.hf_tokenizer, sorted(eos_token_ids)
            self.inner = from_tokenizer(hf_tokenizer, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:
            raise GrammarError(
                "structured_outputs",
                f"cannot be had with this tokenizer: {error}",
                kind=ErrorKind.UNSUPPORTED,
            ) from error
        self._tokenizer = tokenizer
        words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        for token in eos:
            words[token // 32] &= ~np.uint32(1 << token % 32)
        self.not_eos = words.view(np.int32)
        self._kept = [(i, int(words[i])) for i in sorted({token // 32 for token in eos})]
        breaks = [tokenizer.encode("\n" * n, add_special_tokens=False) for n in (1, 2)]
        self.break_ids = {ids[-1]: n for n, ids in enumerate(breaks, 1) if len(ids) == 1}

    def take_eos(self, mask: np.ndarray) -> bool:
        """Take the model's end tokens out of a mask; whether one was there."""
        words, found = mask.view(np.uint32), False
        for i, kept in self._kept:
            word = int(words[i])
            if word != word & kept:
                words[i], found = word & kept, True
        return found

    def have_eos(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Which of some rows of masks have one of the model's end tokens: bool [len(rows)]."""
        found = np.zeros(len(rows), bool)
        for i, kept in self._kept:
            found |= masks[rows, i].view(np.uint32) & ~np.uint32(kept) != 0
        return found

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to a text."""
        of_bytes = self._tokenizer.bytes_of
        return of_bytes(token_id) if of_bytes else self._tokenizer.decode([token_id]).encode()


def _begin(matcher: Matcher) -> None:
    """Write some random tokens that may come."""
    random, mask = np.random.default_rng(0), np.zeros((1, len(matcher.tokens.not_eos)), np.int32)
    for _ in range(bounds.TRIAL_TOKENS):
        if (error := matcher.fill(mask, 0)) is not None:
            raise error
        if matcher.is_stopped:
            return
        found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        matcher.accept(int(random.choice(found)))
        if matcher.is_stopped:
            return


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe.

    Args:
        tokenizer: The model's.
        vocab_size: Width of the logits; ids above the tokenizer's own are never allowed.
        eos_token_ids: The model's own end tokens.
        stack: Bytes of the threads that compile: llguidance recurses.
        most_kept: Grammars that are kept for requests to come.

    Attributes:
        vocab_size: As given.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        stack: int = bounds.STACK,
        most_kept: int = MAX_CACHED,
    ):
        self._of = tokenizer, vocab_size, eos_token_ids
        self.vocab_size = vocab_size
        self._stack, self._most_kept = stack, most_kept
        self._lock = threading.Lock()
        self._tokens: _Tokens | None = None
        self._memory = _Memory()
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._running: weakref.WeakSet[Matcher] = weakref.WeakSet()
        self._used_at, self._is_watched = 0.0, False
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary, which else the first grammar waits for.

        Raises:
            GrammarError: it cannot be used.
        """
        with self._lock:
            if self._tokens is None:
                self._tokens = _Tokens(*self._of)
                self._memory = _Memory()  # the vocabulary stays

    def submit(
        self, form: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Future[list[Matcher]]:
        """`compile` for so many answers, which tokens `ending_ids` may end, without waiting."""
        with self._lock:
            # One that is kept takes little: not behind those that others wait for.
            known = self._cache.get(form)
            kind = "grammars" if known is None or known.lexers.must_compile() else "kept"
            return self._start(kind, self._matchers, form, ending_ids, count)

    def compile(self, form: StructuredOutputs) -> Grammar:
        """The grammar of a form.

        Raises:
            GrammarError: there is none, or it takes too much.
        """
        with self._lock:
            compiling = self._start("grammars", self._compiled, form)
        return compiling.result()

    def begin(self, form: StructuredOutputs, ending_ids: frozenset[int]) -> None:
        """Compile a form and write the beginning of a random answer by its masks, all in threads
        whose stack is as of those that compile.

        Raises:
            GrammarError: the form cannot be compiled, or the answer fails.
        """
        (matcher,) = self.submit(form, ending_ids).result()
        with self._lock:
            writing = self._start("grammars", _begin, matcher)
        writing.result()

    def _start(self, kind: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do some work in a thread of that kind; the caller has the lock."""
        if kind not in self._pools:
            self._pools[kind] = ThreadPoolExecutor(
                _THREADS[kind], thread_name_prefix=f"jpaged-{kind}"
            )
        before = threading.stack_size(self._stack)
        try:
            return self._pools[kind].submit(work, *args)  # may start a thread, with such a stack
        finally:
            threading.stack_size(before)

    def _matchers(
        self, form: StructuredOutputs, ending_ids: frozenset[int], count: int
    ) -> list[Matcher]:
        grammar = self._compiled(form)
        made = [grammar.matcher(ending_ids) for _ in range(count)]
        self._running.update(made)
        self._limit_lexers()
        return made

    def renewed(
        self, grammar: Grammar, consumed: list[int], may_share: bool
    ) -> tuple[_Lexer, Use, Any]:
        """Return a new lexer for a running answer. Compile it in a thread with a large stack.

        Args:
            grammar: The answer's grammar.
            consumed: The answer's tokens.
            may_share: Whether the answer may share the lexer if compiling takes long.

        Returns:
            The lexer, how the answer uses it, and llguidance's matcher after the tokens.

        Raises:
            GrammarError: the lexers exceed their memory, and this answer needs more than its share.
        """
        with self._lock:
            renewing = self._start("renewed", self.compile_again, grammar, consumed, may_share)
        return renewing.result()

    def compile_again(
        self, grammar: Grammar, consumed: list[int], may_share: bool
    ) -> tuple[_Lexer, Use, Any]:
        """Do in this thread what `renewed` does in another."""
        self._limit_lexers()
        if may_share and not grammar.lexers.is_cheap:
            lexer, use = grammar.lexers.take()
            inner = lexer.start.deep_copy()
            for i in range(0, len(consumed), _TOKENS_PER_REFUEL):
                lexer.start.deep_copy().compute_bitmask()  # refuels the lexer
                if not _consume_again(grammar.tokens, inner, consumed[i : i + _TOKENS_PER_REFUEL]):
                    grammar.lexers.note_broken(lexer, i)
                    break
            else:
                return lexer, use, inner
        lexer = _Lexer(grammar.lexers.make())
        inner, is_short = lexer.start.deep_copy(), self._memory.settle()
        before = _heap_bytes() if is_short else 0
        _consume_again(grammar.tokens, inner, consumed)
        if is_short:
            text = grammar.tokens.inner.decode_bytes(consumed)
            size = min(_heap_bytes() - before, _STATE_BYTES * len(text))
            if size > bounds.LEXER_MEMORY // max(1, len(self._running)):
                most = bounds.LEXER_MEMORY // 2**20
                raise GrammarError(
                    "structured_outputs",
                    f": the running answers need more than {most} MiB for their lexers",
                    remedy="retry",
                    kind=ErrorKind.UNAVAILABLE,
                )
        return lexer, Use.PRIVATE, inner

    def _compiled(self, form: StructuredOutputs) -> Grammar:
        from llguidance import LLMatcher

        self.prepare()
        with self._lock:
            if (known := self._cache.get(form)) is not None:
                self._cache.move_to_end(form)
                return known
            tokens = self._tokens
        if tokens is None:
            raise RuntimeError("the tokenizer's vocabulary was not read")
        start, source = time.thread_time(), _source(form)
        make = partial(LLMatcher, tokens.inner, source, log_level=0)
        matcher = make(limits=_limits())
        is_cheap = time.thread_time() - start < bounds.LEXER_SECONDS
        first = matcher.deep_copy()
        if not first.is_error():
            _step(first)  # the dearest: here it is seen whether a step can have it
        if first.is_error():
            raise _refused(form, first.get_error())
        opening = self._of[0].encode(form.opening, add_special_tokens=False) if form.opening else ()
        # This grammar is within the limits, so more fuel is safe: `compile_again` consumes tokens.
        make = partial(make, limits=_limits(initial_lexer_fuel=_REPEATED_FUEL))
        lexers = _Lexers(matcher, make, is_cheap)
        grammar = Grammar(form, lexers, tokens, tuple(opening), self._memory, self.renewed)
        with self._lock:
            self._cache[form] = grammar
            while len(self._cache) > self._most_kept:
                self._cache.popitem(last=False)
            self._used_at = time.monotonic()
            if self._cache and not self._is_watched:
                self._is_watched = True
                threading.Thread(
                    target=_watch, args=(weakref.ref(self),), name="jpaged-lexers", daemon=True
                ).start()
        return grammar

    def _limit_lexers(self) -> None:
        """Drop the spare lexers of all grammars while memory is short, and those of the least
        recently used grammars while there are too many."""
        self._used_at = time.monotonic()
        with self._lock:
            grammars = [*self._cache.values()]
        if self._memory.is_short:
            for grammar in grammars:
                grammar.lexers.drop_spare(0)
            self._memory.settle()
        total = sum(grammar.lexers.num_made for grammar in grammars)
        for grammar in grammars:
            if total <= bounds.ALL_LEXERS:
                return
            total -= grammar.lexers.num_made
            grammar.lexers.drop_spare(1)
            total += grammar.lexers.num_made

    def release_if_idle(self) -> bool:
        """Release all grammars and their memory if no answer ran for `bounds.IDLE_SECONDS`.

        Returns:
            Whether they were released.
        """
        if self._running:
            self._used_at = time.monotonic()
        with self._lock:
            if time.monotonic() - self._used_at < bounds.IDLE_SECONDS:
                return False
            cached, self._cache, self._is_watched = self._cache, OrderedDict(), False
        cached.clear()
        self._memory.release()
        return True


def _watch(found: "weakref.ref[Grammars]") -> None:
    """Release grammars once they are idle; return then, or when nothing refers to them."""
    while (grammars := found()) is not None and not grammars.release_if_idle():
        del grammars
        time.sleep(bounds.IDLE_SECONDS / 4)
