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
from jpaged.structured_outputs.lexers import Lexer, LexerMemory, LexerPool, LexerUse, heap_bytes
from jpaged.structured_outputs.matcher import (
    CompiledGrammar,
    GrammarError,
    Matcher,
    Vocabulary,
    replay_tokens,
    spec_error,
)
from jpaged.structured_outputs.rewriting import rewrite_schema
from jpaged.structured_outputs.syntax import replace_schemas
from jpaged.text.tokenizer import Tokenizer

MAX_CACHED_GRAMMARS = 64
"""Compiled grammars that are kept; one that is not kept is compiled anew."""

_JSON_OPTIONS: Any = {
    # One blank at most where JSON takes any: a model that is unsure would write them for ever.
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    # Without \u: a name has one spelling, so that none comes twice or past additionalProperties.
    "json_allowed_escapes": '"\\bfnrt',
}
"""How JSON is written, as llguidance takes it."""

_NUM_THREADS = {"grammars": 2, "kept": 1, "renewed": 2}
"""Number of threads that compile new grammars, that make matchers of compiled grammars, and that
compile a grammar again for a running answer."""

_RECOMPILE_FUEL = 1 << 40
"""Fuel of a grammar that is compiled again, and of tokens that are consumed before the first mask:
both have been within the limits before."""

_TOKENS_PER_REFUEL = 16
"""Tokens that are consumed again with the fuel of one mask, in a lexer that answers share."""

_STATE_BYTES = 1024
"""Bytes of a lexer's state: 560 measured for a string of bounded length."""


def _parser_limits(**overrides: Any) -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**{**bounds.LLGUIDANCE_LIMITS, **overrides})


def _grammar_source(spec: StructuredOutputs) -> str:
    """The grammar as llguidance takes it."""
    from llguidance import LLMatcher

    match spec.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(_schema_text(json.loads(spec.json or "")))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_schema_text({"type": "object"}))
        case "regex":
            return LLMatcher.grammar_from_regex(spec.regex or "")
        case "choice":
            # One terminal: as rules each choice would count as an item of the parser's row.
            choices = " | ".join(json.dumps(each) for each in spec.choice or ())
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case _:
            return LLMatcher.grammar_from_lark(replace_schemas(spec.grammar or "", _schema_text))


def _schema_text(schema: Any) -> str:
    """A schema as llguidance takes it."""
    if isinstance(schema, dict):
        schema = {**rewrite_schema(schema), "x-guidance": _JSON_OPTIONS}
    return json.dumps(schema, separators=(",", ":"))


def _try_first_token(matcher: Any) -> None:
    """Match some token that may come, and look at what may follow it."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    if len(found := np.flatnonzero(bits)):
        matcher.consume_token(int(found[0]))
        matcher.compute_bitmask()


def _generate_random_tokens(matcher: Matcher) -> None:
    """Write some random tokens that may come."""
    random, mask = (
        np.random.default_rng(0),
        np.zeros((1, len(matcher.vocabulary.not_eos_mask)), np.int32),
    )
    for _ in range(bounds.TRIAL_TOKENS):
        if (error := matcher.fill_mask(mask, 0)) is not None:
            raise error
        if matcher.is_stopped:
            return
        found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        matcher.accept(int(random.choice(found)))
        if matcher.is_stopped:
            return


class GrammarCompiler:
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
        stack_bytes: int = bounds.STACK_BYTES,
        max_cached: int = MAX_CACHED_GRAMMARS,
    ):
        self._vocabulary_args = tokenizer, vocab_size, eos_token_ids
        self.vocab_size = vocab_size
        self._stack_bytes, self._max_cached = stack_bytes, max_cached
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._memory = LexerMemory()
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._running: weakref.WeakSet[Matcher] = weakref.WeakSet()
        self._last_used_at, self._has_idle_thread = 0.0, False
        self._thread_pools: dict[str, ThreadPoolExecutor] = {}

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary, which else the first grammar waits for.

        Raises:
            GrammarError: it cannot be used.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._vocabulary_args)
                self._memory = LexerMemory()  # the vocabulary stays

    def submit(
        self, spec: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Future[list[Matcher]]:
        """`compile` for so many answers, which tokens `ending_ids` may end, without waiting."""
        with self._lock:
            # One that is kept takes little: not behind those that others wait for.
            known = self._cache.get(spec)
            kind = "grammars" if known is None or known.lexers.must_compile() else "kept"
            return self._submit_to_pool(kind, self._make_matchers, spec, ending_ids, count)

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """The grammar of a form.

        Raises:
            GrammarError: there is none, or it takes too much.
        """
        with self._lock:
            compiling = self._submit_to_pool("grammars", self._compile, spec)
        return compiling.result()

    def try_random_answer(self, spec: StructuredOutputs, ending_ids: frozenset[int]) -> None:
        """Compile a form and write the beginning of a random answer by its masks, all in threads
        whose stack is as of those that compile.

        Raises:
            GrammarError: the form cannot be compiled, or the answer fails.
        """
        (matcher,) = self.submit(spec, ending_ids).result()
        with self._lock:
            writing = self._submit_to_pool("grammars", _generate_random_tokens, matcher)
        writing.result()

    def _submit_to_pool(self, kind: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do some work in a thread of that kind; the caller has the lock."""
        if kind not in self._thread_pools:
            self._thread_pools[kind] = ThreadPoolExecutor(
                _NUM_THREADS[kind], thread_name_prefix=f"jpaged-{kind}"
            )
        before = threading.stack_size(self._stack_bytes)
        try:
            return self._thread_pools[kind].submit(
                work, *args
            )  # may start a thread, with such a stack
        finally:
            threading.stack_size(before)

    def _make_matchers(
        self, spec: StructuredOutputs, ending_ids: frozenset[int], count: int
    ) -> list[Matcher]:
        grammar = self._compile(spec)
        made = [grammar.matcher(ending_ids) for _ in range(count)]
        self._running.update(made)
        self._limit_lexers()
        return made

    def rebuild_lexer(
        self, grammar: CompiledGrammar, consumed: list[int], may_share: bool
    ) -> tuple[Lexer, LexerUse, Any]:
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
            renewing = self._submit_to_pool(
                "renewed", self.rebuild_lexer_inline, grammar, consumed, may_share
            )
        return renewing.result()

    def rebuild_lexer_inline(
        self, grammar: CompiledGrammar, consumed: list[int], may_share: bool
    ) -> tuple[Lexer, LexerUse, Any]:
        """Do in this thread what `rebuild_lexer` does in another."""
        self._limit_lexers()
        if may_share and not grammar.lexers.is_cheap:
            lexer, use = grammar.lexers.acquire()
            inner = lexer.initial_matcher.deep_copy()
            for i in range(0, len(consumed), _TOKENS_PER_REFUEL):
                lexer.initial_matcher.deep_copy().compute_bitmask()  # refuels the lexer
                if not replay_tokens(
                    grammar.vocabulary, inner, consumed[i : i + _TOKENS_PER_REFUEL]
                ):
                    grammar.lexers.note_broken(lexer, i)
                    break
            else:
                return lexer, use, inner
        lexer = Lexer(grammar.lexers.compile_matcher())
        inner, is_full = lexer.initial_matcher.deep_copy(), self._memory.trim_if_full()
        before = heap_bytes() if is_full else 0
        replay_tokens(grammar.vocabulary, inner, consumed)
        if is_full:
            text = grammar.vocabulary.inner.decode_bytes(consumed)
            size = min(heap_bytes() - before, _STATE_BYTES * len(text))
            if size > bounds.MAX_LEXER_BYTES // max(1, len(self._running)):
                most = bounds.MAX_LEXER_BYTES // 2**20
                raise GrammarError(
                    "structured_outputs",
                    f": the running answers need more than {most} MiB for their lexers",
                    remedy="retry",
                    kind=ErrorKind.UNAVAILABLE,
                )
        return lexer, LexerUse.PRIVATE, inner

    def _compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        from llguidance import LLMatcher

        self.prepare()
        with self._lock:
            if (known := self._cache.get(spec)) is not None:
                self._cache.move_to_end(spec)
                return known
            vocabulary = self._vocabulary
        if vocabulary is None:
            raise RuntimeError("the tokenizer's vocabulary was not read")
        start, source = time.thread_time(), _grammar_source(spec)
        compile_matcher = partial(LLMatcher, vocabulary.inner, source, log_level=0)
        matcher = compile_matcher(limits=_parser_limits())
        is_cheap = time.thread_time() - start < bounds.CHEAP_COMPILE_S
        first = matcher.deep_copy()
        if not first.is_error():
            _try_first_token(first)  # the dearest: here it is seen whether a step can have it
        if first.is_error():
            raise spec_error(spec, first.get_error())
        opening = (
            self._vocabulary_args[0].encode(spec.opening, add_special_tokens=False)
            if spec.opening
            else ()
        )
        # This grammar is within the limits, so more fuel is safe: `rebuild_lexer_inline` consumes tokens.
        compile_matcher = partial(
            compile_matcher, limits=_parser_limits(initial_lexer_fuel=_RECOMPILE_FUEL)
        )
        lexers = LexerPool(matcher, compile_matcher, is_cheap)
        grammar = CompiledGrammar(
            spec, lexers, vocabulary, tuple(opening), self._memory, self.rebuild_lexer
        )
        with self._lock:
            self._cache[spec] = grammar
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
            self._last_used_at = time.monotonic()
            if self._cache and not self._has_idle_thread:
                self._has_idle_thread = True
                threading.Thread(
                    target=_release_when_idle,
                    args=(weakref.ref(self),),
                    name="jpaged-lexers",
                    daemon=True,
                ).start()
        return grammar

    def _limit_lexers(self) -> None:
        """Drop the spare lexers of all grammars while memory is short, and those of the least
        recently used grammars while there are too many."""
        self._last_used_at = time.monotonic()
        with self._lock:
            grammars = [*self._cache.values()]
        if self._memory.is_full:
            for grammar in grammars:
                grammar.lexers.drop_spare(0)
            self._memory.trim_if_full()
        total = sum(grammar.lexers.num_lexers for grammar in grammars)
        for grammar in grammars:
            if total <= bounds.MAX_TOTAL_LEXERS:
                return
            total -= grammar.lexers.num_lexers
            grammar.lexers.drop_spare(1)
            total += grammar.lexers.num_lexers

    def release_if_idle(self) -> bool:
        """Release all grammars and their memory if no answer ran for `bounds.LEXER_IDLE_S`.

        Returns:
            Whether they were released.
        """
        if self._running:
            self._last_used_at = time.monotonic()
        with self._lock:
            if time.monotonic() - self._last_used_at < bounds.LEXER_IDLE_S:
                return False
            cached, self._cache, self._has_idle_thread = self._cache, OrderedDict(), False
        cached.clear()
        self._memory.release()
        return True


def _release_when_idle(found: "weakref.ref[GrammarCompiler]") -> None:
    """Release grammars once they are idle; return then, or when nothing refers to them."""
    while (grammars := found()) is not None and not grammars.release_if_idle():
        del grammars
        time.sleep(bounds.LEXER_IDLE_S / 4)
