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
from functools import partial
from typing import Any

import numpy as np

from jpaged.errors import ErrorKind
from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.lexers import Lexer, LexerMemory, LexerPool, Use, heap_bytes
from jpaged.structured_outputs.matcher import (
    Grammar,
    GrammarError,
    Matcher,
    Vocabulary,
    consume_again,
    refused,
)
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

_REPEATED_FUEL = 1 << 40
"""Fuel of a grammar that is compiled again, and of tokens that are consumed before the first mask:
both have been within the limits before."""

_TOKENS_PER_REFUEL = 16
"""Tokens that are consumed again with the fuel of one mask, in a lexer that answers share."""

_STATE_BYTES = 1024
"""Bytes of a lexer's state: 560 measured for a string of bounded length."""


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
        self._tokens: Vocabulary | None = None
        self._memory = LexerMemory()
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
                self._tokens = Vocabulary(*self._of)
                self._memory = LexerMemory()  # the vocabulary stays

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
    ) -> tuple[Lexer, Use, Any]:
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
    ) -> tuple[Lexer, Use, Any]:
        """Do in this thread what `renewed` does in another."""
        self._limit_lexers()
        if may_share and not grammar.lexers.is_cheap:
            lexer, use = grammar.lexers.take()
            inner = lexer.start.deep_copy()
            for i in range(0, len(consumed), _TOKENS_PER_REFUEL):
                lexer.start.deep_copy().compute_bitmask()  # refuels the lexer
                if not consume_again(grammar.tokens, inner, consumed[i : i + _TOKENS_PER_REFUEL]):
                    grammar.lexers.note_broken(lexer, i)
                    break
            else:
                return lexer, use, inner
        lexer = Lexer(grammar.lexers.make())
        inner, is_short = lexer.start.deep_copy(), self._memory.settle()
        before = heap_bytes() if is_short else 0
        consume_again(grammar.tokens, inner, consumed)
        if is_short:
            text = grammar.tokens.inner.decode_bytes(consumed)
            size = min(heap_bytes() - before, _STATE_BYTES * len(text))
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
            raise refused(form, first.get_error())
        opening = self._of[0].encode(form.opening, add_special_tokens=False) if form.opening else ()
        # This grammar is within the limits, so more fuel is safe: `compile_again` consumes tokens.
        make = partial(make, limits=_limits(initial_lexer_fuel=_REPEATED_FUEL))
        lexers = LexerPool(matcher, make, is_cheap)
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
