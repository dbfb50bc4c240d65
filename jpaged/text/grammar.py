"""Grammars that answers obey: compiled, matched token by token, made into masks for the sampler.

llguidance does the parsing, in Rust and without Python's lock. What is ours: which tokens end an
answer, bounds on what a grammar may cost, and a passage before the grammar that is free.
"""

import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.schemas import enforced
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

_THREADS = {"grammars": 2, "kept": 1}
"""That compile, and that make matchers of what is compiled."""

_MAX_BREAKS = 2
"""Line breaks that may come between the free passage and the grammar."""


class GrammarError(ValueError):
    """A grammar cannot be compiled, is too complex to be matched, or forbids a token."""


def _limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**bounds.LIMITS)


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
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(each) for each in form.choice or ())
            )
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
    reason = " ".join(words.replace("<non-verbose/>", "").split())[:300]
    return GrammarError(f"structured_outputs.{form.kind} cannot be enforced: {reason}")


class Matcher:
    """How far one answer has come in a grammar. Not thread-safe.

    Attributes:
        ending_ids: Tokens that end the answer, where the grammar lets it end.
        is_stopped: Nothing but the end may follow.
        tokens: What is known of the tokenizer.
        inner: llguidance's own matcher.
    """

    def __init__(self, grammar: "Grammar", ending_ids: frozenset[int]):
        self.ending_ids, self.is_stopped = ending_ids, False
        self._form, self.tokens = grammar.form, grammar.tokens
        prototype, is_own = grammar.lexers.take()
        self.inner: Any = prototype.deep_copy()
        if is_own:
            weakref.finalize(self, grammar.lexers.give, prototype).atexit = False
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
        return self.is_begun and token_id not in self.ending_ids

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
        error = self.outcome(self.inner.consume_tokens(token_ids))
        if error is not None:
            raise error

    def outcome(self, is_allowed: bool) -> GrammarError | None:
        """`inner` has consumed a token, or it may not follow: what is wrong."""
        if not is_allowed:
            words = self.inner.get_error() or "a token that may not follow"
            return _refused(self._form, words)
        self.is_stopped = self.inner.is_stopped()
        return None

    def fill(self, rows: np.ndarray, row: int) -> GrammarError | None:
        """Write what may follow into row `row` of masks, int32 [rows, W]; gives as `widen`."""
        from llguidance.numpy import fill_next_token_bitmask

        if not self.is_free:
            fill_next_token_bitmask(self.inner, rows, row)
        return self.widen(rows[row])

    def widen(self, mask: np.ndarray) -> GrammarError | None:
        """Adapt llguidance's mask (anything while the answer is free) to this answer, in place: end
        tokens, line breaks, the opening. int32 [W].

        Returns:
            What went wrong, if the grammar failed or nothing may follow.
        """
        if self.is_free:  # but not the end: what must come has not
            mask[:] = self.tokens.not_eos
            self._forbid_the_end(mask)
            return None
        if self.inner.is_error():
            return _refused(self._form, self.inner.get_error())
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
            return _refused(self._form, "nothing may follow what was written")
        return None

    def _forbid_the_end(self, mask: np.ndarray) -> None:
        words = mask.view(np.uint32)
        for token in self.ending_ids:
            words[token // 32] &= ~np.uint32(1 << token % 32)

    def too_slow(self) -> GrammarError:
        """Says that a mask took too long."""
        most = f"{bounds.MASK_SECONDS * 1e3:g} ms of a processor"
        return _refused(self._form, f"a token took more than {most}: simplify it")

    def failed(self, error: BaseException) -> GrammarError:
        """Says that something unforeseen went wrong, with this answer alone."""
        return _refused(self._form, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar.

    Attributes:
        form: What it was made of.
        lexers: llguidance's matchers, at the start.
        tokens: What it knows of the tokenizer.
    """

    form: StructuredOutputs
    lexers: "_Lexers"
    tokens: "_Tokens"
    opening_ids: tuple[int, ...]

    def matcher(self, ending_ids: frozenset[int]) -> Matcher:
        """For one answer, which the tokens `ending_ids` may end."""
        return Matcher(self, ending_ids)


class _Lexers:
    """A grammar compiled several times: an answer has one to itself, as far as there are.

    llguidance's copies of a matcher share its lexer and a lock: of answers that share one, one mask
    is computed at a time. A lexer that an answer leaves keeps the states that it has made.

    Args:
        first: llguidance's matcher, at the start.
        make: Compiles another.
        most: How many there may be.
    """

    def __init__(self, first: Any, make: Callable[[], Any], most: int):
        self._made, self._spare = [first], [first]
        self._make, self._most = make, most
        self._num_shared = 0
        self._lock = threading.Lock()

    @property
    def num_made(self) -> int:
        """Those that there are."""
        return len(self._made)

    @property
    def num_spare(self) -> int:
        """Those that no answer has."""
        return len(self._spare)

    def take(self) -> tuple[Any, bool]:
        """One for an answer, and whether no other has it; then `give` it back. One more is compiled
        if none is spare."""
        with self._lock:
            if not self._spare and len(self._made) == self._most:
                self._num_shared += 1
                return self._made[self._num_shared % len(self._made)], False
            if not self._spare:
                self._made.append(self._make())
                return self._made[-1], True
            return self._spare.pop(), True

    def give(self, matcher: Any) -> None:
        """An answer that had one to itself is over."""
        self._spare.append(matcher)  # no lock: the garbage collector calls it, anywhere

    def drop_spare(self) -> None:
        """Leave one, or those that answers have."""
        with self._lock:
            while self._spare and len(self._made) > 1:
                self._made.remove(self._spare.pop())


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
                "structured_outputs needs an end token, and the model's config.json, generation "
                "config and tokenizer name none: set eos_token_id in config.json"
            )
        try:
            hf_tokenizer, eos = tokenizer.hf_tokenizer, sorted(eos_token_ids)
            self.inner = from_tokenizer(hf_tokenizer, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:
            raise GrammarError(
                f"structured_outputs cannot be had with this tokenizer: {error}"
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
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary, which else the first grammar waits for.

        Raises:
            GrammarError: it cannot be used.
        """
        with self._lock:
            if self._tokens is None:
                self._tokens = _Tokens(*self._of)

    def submit(
        self, form: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Future[list[Matcher]]:
        """`compile` for so many answers, which tokens `ending_ids` may end, without waiting."""
        with self._lock:
            # One that is kept takes little: not behind those that others wait for.
            kind = "kept" if form in self._cache else "grammars"
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
        with self._lock:
            self._limit_lexers()
        return made

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
        make = partial(LLMatcher, tokens.inner, source, limits=_limits(), log_level=0)
        matcher = make()
        is_cheap = time.thread_time() - start < bounds.LEXER_SECONDS
        first = matcher.deep_copy()
        if not first.is_error():
            _step(first)  # the dearest: here it is seen whether a step can have it
        if first.is_error():
            raise _refused(form, first.get_error())
        opening = self._of[0].encode(form.opening, add_special_tokens=False) if form.opening else ()
        lexers = _Lexers(matcher, make, bounds.LEXERS if is_cheap else 1)
        grammar = Grammar(form, lexers, tokens, tuple(opening))
        with self._lock:
            self._cache[form] = grammar
            while len(self._cache) > self._most_kept:
                self._cache.popitem(last=False)
        return grammar

    def _limit_lexers(self) -> None:
        """Drop what no answer has of the grammars that were asked for longest ago, while there are
        too many."""
        total = sum(grammar.lexers.num_made for grammar in self._cache.values())
        for grammar in self._cache.values():
            if total <= bounds.ALL_LEXERS:
                return
            total -= grammar.lexers.num_made
            grammar.lexers.drop_spare()
            total += grammar.lexers.num_made
