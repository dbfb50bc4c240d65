"""`GrammarCompiler` compiles structured-output specifications for one tokenizer.

llguidance does the parsing, in Rust and without the GIL. This module adds a cache of compiled
grammars, threads with large stacks, and limits on the cost of a grammar.
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
"""Default maximum number of compiled grammars in the cache of a `GrammarCompiler`."""

_JSON_OPTIONS: Any = {
    # Allow at most one blank between JSON tokens. Otherwise an answer could consist of endless
    # blanks.
    "whitespace_flexible": True,
    "whitespace_pattern": " ?",
    # Forbid \u escapes, so that a property name has only one spelling. With a second spelling, a
    # name could appear twice in an object or evade `additionalProperties`.
    "json_allowed_escapes": '"\\bfnrt',
}
"""Options of llguidance for the JSON that answers contain."""

_NUM_THREADS = {"grammars": 2, "kept": 1, "renewed": 2}
"""Number of threads in each thread pool of a `GrammarCompiler`.

"grammars" compiles new grammars. "kept" creates matchers of cached grammars. "renewed" compiles a
grammar again, to replace the compiled grammar that an unfinished answer uses."""

_RECOMPILE_FUEL = 1 << 40
"""Maximum work of llguidance's lexer, called fuel, after a grammar is compiled again.

The fuel must also suffice to replay the tokens of an unfinished answer. The number is practically
unlimited, because the grammar and the tokens were accepted under the normal limits before."""

_TOKENS_PER_REFUEL = 16
"""Number of an answer's tokens to replay in a lexer before the lexer's fuel is reset.

Fuel is llguidance's limit on the work of a lexer. Computing a token mask resets the fuel."""

_STATE_BYTES = 1024
"""Assumed bytes per state of llguidance's lexer. Strings of bounded length need 560 bytes per
state."""


def _parser_limits(**overrides: Any) -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(**{**bounds.LLGUIDANCE_LIMITS, **overrides})


def _grammar_source(spec: StructuredOutputs) -> str:
    """Return the grammar of a specification in the syntax that llguidance reads."""
    from llguidance import LLMatcher

    match spec.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(_schema_text(json.loads(spec.json or "")))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(_schema_text({"type": "object"}))
        case "regex":
            return LLMatcher.grammar_from_regex(spec.regex or "")
        case "choice":
            # Write all choices as one terminal of the grammar. If every choice were a rule, every
            # choice would count towards llguidance's limit `max_items_in_row`.
            choices = " | ".join(json.dumps(each) for each in spec.choice or ())
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case _:
            return LLMatcher.grammar_from_lark(replace_schemas(spec.grammar or "", _schema_text))


def _schema_text(schema: Any) -> str:
    """Return a JSON schema as text, rewritten for llguidance."""
    if isinstance(schema, dict):
        schema = {**rewrite_schema(schema), "x-guidance": _JSON_OPTIONS}
    return json.dumps(schema, separators=(",", ":"))


def _try_first_token(matcher: Any) -> None:
    """Let llguidance's matcher consume one allowed token and compute the mask of the next token."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    if len(found := np.flatnonzero(bits)):
        matcher.consume_token(int(found[0]))
        matcher.compute_bitmask()


def _generate_random_tokens(matcher: Matcher) -> None:
    """Generate up to `bounds.TRIAL_TOKENS` random tokens that the matcher's grammar allows."""
    random = np.random.default_rng(0)
    mask = np.zeros((1, len(matcher.vocabulary.not_eos_mask)), np.int32)
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
    """Compiles grammars for one tokenizer, and caches the compiled grammars. Thread-safe.

    Args:
        tokenizer: The model's tokenizer.
        vocab_size: Width of the logits. Token ids that the tokenizer does not have are never
            allowed.
        eos_token_ids: The model's end tokens.
        stack_bytes: Stack size of the compiling threads. llguidance compiles recursively, so it
            needs a large stack.
        max_cached: Maximum number of compiled grammars in the cache.

    Attributes:
        vocab_size: Width of the logits.
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
        """Read the tokenizer's vocabulary in advance, to make the first compilation faster.

        Raises:
            GrammarError: The tokenizer cannot be used with llguidance, or has no end token.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(*self._vocabulary_args)
                # A `LexerMemory` counts the memory that the process allocates later. Create the
                # `LexerMemory` after the vocabulary, so that the vocabulary is not counted.
                self._memory = LexerMemory()

    def submit(
        self, spec: StructuredOutputs, ending_ids: frozenset[int], count: int = 1
    ) -> Future[list[Matcher]]:
        """Compile a grammar in another thread, and create `count` matchers.

        Args:
            spec: The structured-output specification.
            ending_ids: Token ids that may end an answer.
            count: Number of matchers: one per answer to generate.

        Returns:
            Future whose result is the list of matchers. The future raises `GrammarError` if the
            grammar cannot be compiled.
        """
        with self._lock:
            # A matcher of a cached grammar needs little work. Create the matcher in another thread
            # pool, so that it does not wait for compilations of other grammars.
            known = self._cache.get(spec)
            kind = "grammars" if known is None or known.lexers.must_compile() else "kept"
            return self._submit_to_pool(kind, self._make_matchers, spec, ending_ids, count)

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Return the compiled grammar of a specification; wait until it is compiled.

        Raises:
            GrammarError: llguidance refuses the grammar, or the grammar exceeds a limit.
        """
        with self._lock:
            compiling = self._submit_to_pool("grammars", self._compile, spec)
        return compiling.result()

    def try_random_answer(self, spec: StructuredOutputs, ending_ids: frozenset[int]) -> None:
        """Compile a grammar, and use its masks to generate the first tokens of a random answer.

        Both parts run in the compiling threads, which have the stack size `stack_bytes`.

        Raises:
            GrammarError: The grammar cannot be compiled, or a mask cannot be computed.
        """
        (matcher,) = self.submit(spec, ending_ids).result()
        with self._lock:
            writing = self._submit_to_pool("grammars", _generate_random_tokens, matcher)
        writing.result()

    def _submit_to_pool(self, kind: str, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `work(*args)` in a thread pool. The caller must hold `self._lock`.

        `kind` is the name of the thread pool in `_NUM_THREADS`.
        """
        if kind not in self._thread_pools:
            self._thread_pools[kind] = ThreadPoolExecutor(
                _NUM_THREADS[kind], thread_name_prefix=f"jpaged-{kind}"
            )
        before = threading.stack_size(self._stack_bytes)
        try:
            # `submit` may start a thread, which gets the stack size that was set above.
            return self._thread_pools[kind].submit(work, *args)
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
        """Return another lexer and a matcher for an unfinished answer, to replace the answer's
        current ones.

        A lexer is a compiled copy of a grammar. Lexers are compiled in threads with large stacks.

        Args:
            grammar: The answer's grammar.
            consumed: Tokens of the answer so far, which the new matcher must consume.
            may_share: Whether the answer may share a lexer with other answers if compiling is slow.

        Returns:
            A tuple of three: the lexer, whether other answers share the lexer (`LexerUse`), and
            llguidance's matcher, which has consumed the tokens.

        Raises:
            GrammarError: All lexers together exceed `bounds.MAX_LEXER_BYTES`, and this answer needs
                more than an equal share of that memory.
        """
        with self._lock:
            renewing = self._submit_to_pool(
                "renewed", self.rebuild_lexer_inline, grammar, consumed, may_share
            )
        return renewing.result()

    def rebuild_lexer_inline(
        self, grammar: CompiledGrammar, consumed: list[int], may_share: bool
    ) -> tuple[Lexer, LexerUse, Any]:
        """Do the work of `rebuild_lexer` in the current thread."""
        self._limit_lexers()
        if may_share and not grammar.lexers.is_cheap:
            lexer, use = grammar.lexers.acquire()
            inner = lexer.initial_matcher.deep_copy()
            for i in range(0, len(consumed), _TOKENS_PER_REFUEL):
                # Compute a mask only to reset the lexer's fuel, llguidance's limit on work.
                lexer.initial_matcher.deep_copy().compute_bitmask()
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
            # The first token is the most expensive, so a grammar that is too slow per token fails
            # here.
            _try_first_token(first)
        if first.is_error():
            raise spec_error(spec, first.get_error())
        opening = (
            self._vocabulary_args[0].encode(spec.opening, add_special_tokens=False)
            if spec.opening
            else ()
        )
        # The first compilation of the grammar kept within the limits. Later compilations, for new
        # lexers, get a much larger limit on the lexer's initial work: a new lexer must also replay
        # the tokens of an unfinished answer.
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
        """Drop unused lexers if all lexers take too much memory, or if there are too many lexers.

        A lexer is a compiled copy of a grammar. Start with the least recently used grammars.
        """
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
        """Release all cached grammars if no grammar was used for `bounds.LEXER_IDLE_S` seconds.

        Returns:
            Whether the grammars were released.
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


def _release_when_idle(compiler_ref: "weakref.ref[GrammarCompiler]") -> None:
    """Wait until no answer uses a compiled grammar, then release the compiler's cached grammars.

    Return early if the compiler was garbage-collected.
    """
    while (compiler := compiler_ref()) is not None and not compiler.release_if_idle():
        del compiler
        time.sleep(bounds.LEXER_IDLE_S / 4)
