"""Compiled grammars, and what an answer may go on with.

llguidance does the parsing, in Rust. What is ours: which tokens end an answer, bounds on what a
grammar may cost, and free text before the grammar.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jpaged.errors import ErrorKind, RequestError
from jpaged.structured_outputs import StructuredOutputs, bounds
from jpaged.structured_outputs.lexers import (
    MIN_LEXER_TOKENS,
    Lexer,
    LexerMemory,
    LexerPool,
    LexerUse,
)
from jpaged.text.tokenizer import Tokenizer

_MIN_REBUILD_TOKENS = 64
"""An answer that fills a new lexer with fewer tokens fails: it has too many states by itself."""

_TOKENS_PER_MEMORY_CHECK = 16
"""Tokens of an answer between two checks of the lexers' memory."""

_ONE_OF_REPLACEMENT = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf",
    "two cases of oneOf may allow the same value: use anyOf, or give the cases different types, "
    "constants, or constants in a required property",
)
"""An error text of llguidance, which names an option that clients do not have, and the text that
replaces it."""

_MAX_LINE_BREAKS = 2
"""Line breaks that may come between the free passage and the grammar."""


class GrammarError(RequestError):
    """A grammar cannot be compiled, is too complex to be matched, or forbids a token."""


def spec_error(spec: StructuredOutputs, words: str) -> GrammarError:
    """Return the error of a specification that llguidance refuses in `words`."""
    words = words.replace("<non-verbose/>", "").replace(*_ONE_OF_REPLACEMENT)
    reason = " ".join(words.split())[:300]
    return GrammarError(f"structured_outputs.{spec.kind}", f"cannot be enforced: {reason}")


def broken_matcher(vocabulary: "Vocabulary") -> Any:
    """Return a matcher of llguidance's that refuses each token at once."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary.inner, "", log_level=0)


def replay_tokens(vocabulary: "Vocabulary", inner: Any, consumed: list[int]) -> bool:
    """Let llguidance's matcher consume tokens; return whether it allows all of them."""
    from llguidance import LLExecutor

    # llguidance releases Python's lock only where it is to match the tokens of two.
    executor, broken = LLExecutor(1), broken_matcher(vocabulary)
    return all(executor.consume_token_par([(inner, it), (broken, it)])[0] for it in consumed)


class Vocabulary:
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
        self.not_eos_mask = words.view(np.int32)
        self._not_eos_words = [(i, int(words[i])) for i in sorted({token // 32 for token in eos})]
        breaks = [tokenizer.encode("\n" * n, add_special_tokens=False) for n in (1, 2)]
        self.line_break_ids = {ids[-1]: n for n, ids in enumerate(breaks, 1) if len(ids) == 1}

    def clear_eos(self, mask: np.ndarray) -> bool:
        """Take the model's end tokens out of a mask; whether one was there."""
        words, found = mask.view(np.uint32), False
        for i, kept in self._not_eos_words:
            word = int(words[i])
            if word != word & kept:
                words[i], found = word & kept, True
        return found

    def have_eos(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Which of some rows of masks have one of the model's end tokens: bool [len(rows)]."""
        found = np.zeros(len(rows), bool)
        for i, kept in self._not_eos_words:
            found |= masks[rows, i].view(np.uint32) & ~np.uint32(kept) != 0
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text."""
        token_bytes = self._tokenizer.token_bytes
        return token_bytes(token_id) if token_bytes else self._tokenizer.decode([token_id]).encode()


class Matcher:
    """How far one answer has come in a grammar. Not thread-safe.

    Attributes:
        ending_ids: Tokens that end the answer, where the grammar lets it end.
        is_stopped: Nothing but the end may follow.
        tokens: What is known of the tokenizer.
        pace: How long the grammar's masks take.
        inner: llguidance's own matcher.
        needs_lexer: `fill_mask` must replace the lexer before it makes the next mask. That takes as long
            as compiling the grammar, so it does not belong in a thread that others wait for.
    """

    def __init__(self, grammar: "CompiledGrammar", ending_ids: frozenset[int]):
        self.ending_ids, self.is_stopped = ending_ids, False
        self._spec, self.vocabulary, self._grammar = grammar.spec, grammar.vocabulary, grammar
        self.mask_timing = grammar.mask_timing
        self.needs_lexer = False
        self._consumed: list[int] = []
        self._num_lexers = 0  # that it has had
        self._private_since: int | None = None  # len(_consumed) when it got a private lexer
        self._use_lexer(*grammar.lexers.acquire(grammar.memory.is_full))
        self.inner: Any = self._lexer.initial_matcher.deep_copy()
        self._reasoning_tail: bytes | None = b"" if self._spec.after is not None else None
        self._is_in_opening_tag = self._spec.opening is not None and bool(grammar.opening_tag_ids)
        self._opening_tag_ids = grammar.opening_tag_ids
        self._num_opening_tokens = 0
        self._num_line_breaks = _MAX_LINE_BREAKS

    @property
    def is_in_reasoning(self) -> bool:
        """Whether all but the end may follow: the grammar has not begun."""
        return self._reasoning_tail is not None and not self._is_in_opening_tag

    @property
    def is_constrained(self) -> bool:
        """Whether the grammar alone decides: its free passage is over, line breaks too."""
        return (
            self._reasoning_tail is None
            and not self._is_in_opening_tag
            and self._num_line_breaks == _MAX_LINE_BREAKS
        )

    def accept(self, token_id: int) -> None:
        """Take in the answer's next token; one that ends the answer changes nothing.

        Raises:
            GrammarError: it may not follow.
        """
        if token_id in self.ending_ids:
            return
        if self._is_in_opening_tag and self._match_opening_tag(token_id):
            return
        if self._reasoning_tail is not None:
            self._find_reasoning_end(token_id)
            return
        if self._num_line_breaks < _MAX_LINE_BREAKS and token_id in self.vocabulary.line_break_ids:
            self._num_line_breaks += self.vocabulary.line_break_ids[token_id]
            return
        self._num_line_breaks = _MAX_LINE_BREAKS
        self._consume([token_id])

    def can_consume_directly(self, token_id: int) -> bool:
        """Whether `accept` is `inner` consuming the token, then `note_consumed`."""
        return self.is_constrained and not self.needs_lexer and token_id not in self.ending_ids

    def _match_opening_tag(self, token_id: int) -> bool:
        """Whether a token goes on with the passage's opening; if not, there is no such passage."""
        if token_id != self._opening_tag_ids[self._num_opening_tokens]:
            self._is_in_opening_tag, self._reasoning_tail = False, None
            return False
        self._num_opening_tokens += 1
        self._is_in_opening_tag = self._num_opening_tokens < len(self._opening_tag_ids)
        return True

    def _find_reasoning_end(self, token_id: int) -> None:
        end = (self._spec.after or "").encode()
        text = (self._reasoning_tail or b"") + self.vocabulary.token_bytes(token_id)
        _, found, rest = text.partition(end)
        self._reasoning_tail = text[-len(end) :]
        if found:
            self._reasoning_tail, self._num_line_breaks = None, 0
            if rest := rest.lstrip(b"\n"):
                self._consume(self.vocabulary.inner.tokenize_bytes(rest))

    def _consume(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if self.needs_lexer:  # the next lexer consumes it
                self._consumed.append(token_id)
                continue
            error = self.note_consumed(token_id, self.inner.consume_token(token_id))
            if error is not None:
                raise error

    def note_consumed(self, token_id: int, is_allowed: bool) -> GrammarError | None:
        """Note that `inner` has consumed a token, or refused it; return what is wrong."""
        if not is_allowed:
            error = self._find_failure("the grammar does not allow the sampled token")
            if error is not None:
                return error
        self._consumed.append(token_id)
        self.is_stopped = is_allowed and self.inner.is_stopped()
        if not len(self._consumed) % _TOKENS_PER_MEMORY_CHECK and self._grammar.memory.is_full:
            # A new lexer has the states of the text, without those that only masks needed.
            self.needs_lexer |= not self.is_stopped and self._may_shrink()
        return None

    def _use_lexer(self, lexer: Lexer, use: LexerUse) -> None:
        """Keep a lexer until the next call, or until the answer is over."""
        self._lexer: Any = lexer
        self._num_lexers += 1
        self._lexer_since = len(self._consumed)
        self._private_since = self._lexer_since if use is LexerUse.PRIVATE else None
        lexers = self._grammar.lexers
        self._return_lexer = weakref.finalize(self, lexers.release, lexer, use, self._consumed)
        self._return_lexer.atexit = False

    def _may_rebuild(self) -> bool:
        """Return whether a new lexer may help. It does not if the answer's states filled one."""
        since = self._private_since
        return since is None or len(self._consumed) - since >= _MIN_REBUILD_TOKENS

    def _may_shrink(self) -> bool:
        """Return whether a new lexer may be smaller by more than it costs to compile."""
        if self._grammar.lexers.is_cheap:
            return self._may_rebuild()
        num_since = len(self._consumed) - self._lexer_since
        return min(num_since, self._lexer.num_tokens + num_since - MIN_LEXER_TOKENS) >= (
            _MIN_REBUILD_TOKENS
        )

    def _find_failure(self, default_reason: str) -> GrammarError | None:
        """Return why `inner` has failed, or set `needs_lexer` if the lexer is broken.

        A lexer breaks when it exceeds a limit. All matchers that share it fail from then on. Its
        states come from every answer that used it, so the answer at hand need not be the cause.
        """
        probe = self._lexer.initial_matcher.deep_copy()
        probe.compute_bitmask()
        if not probe.is_error():
            return spec_error(self._spec, self.inner.get_error() or default_reason)
        self._grammar.lexers.note_broken(self._lexer, len(self._consumed))
        if not self._may_rebuild():
            return spec_error(self._spec, probe.get_error())
        self.needs_lexer = True
        return None

    def rebuild_lexer(self) -> None:
        """Replace the lexer, and consume the answer's tokens again.

        Raises:
            GrammarError: the lexers of all answers take too much memory.
        """
        self._return_lexer.detach()
        self._grammar.lexers.retire(self._lexer)
        self._lexer = self.inner = None  # the memory is free before more is taken
        num_since = len(self._consumed) - self._lexer_since
        may_share = self._num_lexers == 1 or num_since >= _MIN_REBUILD_TOKENS
        lexer, use, self.inner = self._grammar.rebuild_lexer(
            self._grammar, self._consumed, may_share
        )
        self._use_lexer(lexer, use)
        self.needs_lexer, self.is_stopped = False, self.inner.is_stopped()

    def fill_mask(self, rows: np.ndarray, row: int) -> GrammarError | None:
        """Write what may follow into row `row` of masks, int32 [rows, W]; gives as `adapt_mask`."""
        while True:
            if self.needs_lexer:
                try:
                    self.rebuild_lexer()
                except GrammarError as error:
                    return error
            error = self.try_fill_mask(rows, row)
            if not self.needs_lexer:
                return error

    def try_fill_mask(self, rows: np.ndarray, row: int) -> GrammarError | None:
        """Fill as `fill_mask`, or set `needs_lexer`: there is no mask until the lexer is replaced."""
        from llguidance.numpy import fill_next_token_bitmask

        if not self.is_in_reasoning:
            fill_next_token_bitmask(self.inner, rows, row)
        return self.adapt_mask(rows[row])

    def adapt_mask(self, mask: np.ndarray) -> GrammarError | None:
        """Adapt llguidance's mask (anything while the answer is free) to this answer, in place: end
        tokens, line breaks, the opening. int32 [W].

        Returns:
            What went wrong, if the grammar failed or nothing may follow. None with `needs_lexer`
            set: there is no mask yet, `fill_mask` makes it.
        """
        if self.is_in_reasoning:  # but not the end: what must come has not
            mask[:] = self.vocabulary.not_eos_mask
            self._forbid_ending_ids(mask)
            return None
        if self.inner.is_error():
            return self._find_failure("")
        may_end = self.vocabulary.clear_eos(mask)
        if not may_end and self.is_constrained:
            return None  # nearly all masks
        more = set(self.ending_ids) if self.inner.is_accepting() else set()
        if self._is_in_opening_tag:
            if self._num_opening_tokens:
                mask[:], more = 0, set()
            more.add(self._opening_tag_ids[self._num_opening_tokens])
        if self._num_line_breaks < _MAX_LINE_BREAKS:
            left = _MAX_LINE_BREAKS - self._num_line_breaks
            more |= {
                token for token, count in self.vocabulary.line_break_ids.items() if count <= left
            }
        if more:
            words = mask.view(np.uint32)
            for token in more:
                words[token // 32] |= np.uint32(1 << token % 32)
        if not mask.any():
            if not self.is_stopped:
                reason = "the grammar allows no next token here, and the answer is incomplete"
                return spec_error(self._spec, reason)
            mask[:] = ~self.vocabulary.not_eos_mask  # with its new lexer the answer is complete
        return None

    def _forbid_ending_ids(self, mask: np.ndarray) -> None:
        words = mask.view(np.uint32)
        for token in self.ending_ids:
            words[token // 32] &= ~np.uint32(1 << token % 32)

    def too_slow_error(self) -> GrammarError:
        """Return the error of an answer whose masks took too long."""
        most = f"{bounds.MAX_MEAN_MASK_S * 1e3:g} ms of CPU time"
        reason = f"its masks took more than {most} each on average: simplify it"
        return spec_error(self._spec, reason)

    def unexpected_error(self, error: BaseException) -> GrammarError:
        """Says that something unforeseen went wrong, with this answer alone."""
        return spec_error(self._spec, f"{type(error).__name__}: {error}")


@dataclass
class MaskTiming:
    """What `masks.MaskMaker` has measured of a grammar.

    Attributes:
        num_watched: Number of masks, of all answers, that threads make and time.
    """

    num_timed_masks: int = 0


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar.

    Attributes:
        form: What it was made of.
        lexers: llguidance's matchers, at the start.
        tokens: What it knows of the tokenizer.
        memory: Memory of all lexers.
        renew: `GrammarCompiler.rebuild_lexer`.
        pace: How long its masks take.
    """

    spec: StructuredOutputs
    lexers: LexerPool
    vocabulary: Vocabulary
    opening_tag_ids: tuple[int, ...]
    memory: LexerMemory
    rebuild_lexer: Callable[["CompiledGrammar", list[int], bool], tuple[Lexer, LexerUse, Any]]
    mask_timing: MaskTiming = field(default_factory=MaskTiming)

    def matcher(self, ending_ids: frozenset[int]) -> Matcher:
        """For one answer, which the tokens `ending_ids` may end."""
        return Matcher(self, ending_ids)
