"""Compiled grammars, and matchers. A matcher says which tokens may follow in one answer.

llguidance does the parsing, in Rust. This module adds the tokens that end an answer, limits on the
cost of a grammar, and reasoning before the constrained text.
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
"""Minimum number of tokens between two private lexers (compiled grammars) of an answer.

No other answer uses a private lexer. If an answer exceeds the limit on the lexer's states within
fewer tokens, the answer fails."""

_TOKENS_PER_MEMORY_CHECK = 16
"""Number of tokens of an answer between two checks of the memory of all compiled grammars."""

_ONE_OF_REPLACEMENT = (
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with "
    "anyOf",
    "two cases of oneOf may allow the same value: use anyOf, or give the cases different types, "
    "constants, or constants in a required property",
)
"""A text in llguidance's errors, and the text that replaces it.

llguidance's text names an option that clients cannot set."""

_MAX_LINE_BREAKS = 2
"""Maximum number of line breaks between the reasoning and the constrained text."""


class GrammarError(RequestError):
    """A grammar cannot be compiled, exceeds a limit, or does not allow a token."""


def spec_error(spec: StructuredOutputs, words: str) -> GrammarError:
    """Return an error that says that a specification cannot be enforced, for the reason `words`."""
    words = words.replace("<non-verbose/>", "").replace(*_ONE_OF_REPLACEMENT)
    reason = " ".join(words.split())[:300]
    return GrammarError(f"structured_outputs.{spec.kind}", f"cannot be enforced: {reason}")


def broken_matcher(vocabulary: "Vocabulary") -> Any:
    """Return a matcher of llguidance that refuses every token immediately."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary.inner, "", log_level=0)


def replay_tokens(vocabulary: "Vocabulary", inner: Any, consumed: list[int]) -> bool:
    """Let llguidance's matcher consume tokens; return whether the grammar allows all of them."""
    from llguidance import LLExecutor

    # llguidance releases the GIL only if a call gets two or more matchers. Therefore, pass a broken
    # matcher as the second matcher.
    executor, broken = LLExecutor(1), broken_matcher(vocabulary)
    return all(executor.consume_token_par([(inner, it), (broken, it)])[0] for it in consumed)


class Vocabulary:
    """A tokenizer's vocabulary for llguidance. Reading 130,000 tokens takes half a second.

    Attributes:
        inner: llguidance's object for the tokenizer.
        not_eos_mask: Mask of all tokens except the model's end tokens, int32 [W].
        line_break_ids: Maps the ids of the tokens for one and for two line breaks, if they exist,
            to the number of line breaks.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]):
        from llguidance.hf import from_tokenizer

        if not eos_token_ids:
            raise GrammarError(
                "structured_outputs",
                "needs an end token, but no end token is set in the model's config.json, "
                "generation_config.json or tokenizer",
                remedy="set eos_token_id in config.json",
                kind=ErrorKind.UNSUPPORTED,
            )
        try:
            hf_tokenizer, eos = tokenizer.hf_tokenizer, sorted(eos_token_ids)
            self.inner = from_tokenizer(hf_tokenizer, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:
            raise GrammarError(
                "structured_outputs",
                f"is not supported with this tokenizer: {error}",
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
        """Remove the model's end tokens from a mask. Return whether the mask allowed any end
        token."""
        words, found = mask.view(np.uint32), False
        for i, kept in self._not_eos_words:
            word = int(words[i])
            if word != word & kept:
                words[i], found = word & kept, True
        return found

    def have_eos(self, masks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return for each mask whether it allows an end token of the model.

        Args:
            masks: Token masks, int32 [any, W].
            rows: Indices of n masks.

        Returns:
            bool [n].
        """
        found = np.zeros(len(rows), bool)
        for i, kept in self._not_eos_words:
            found |= masks[rows, i].view(np.uint32) & ~np.uint32(kept) != 0
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        token_bytes = self._tokenizer.token_bytes
        return token_bytes(token_id) if token_bytes else self._tokenizer.decode([token_id]).encode()


class Matcher:
    """Progress of one answer through a grammar. Not thread-safe.

    Attributes:
        ending_ids: Tokens that end the answer at positions where the grammar allows the end.
        is_stopped: Whether the answer is complete.
        vocabulary: Vocabulary of the tokenizer.
        mask_timing: Counter of the grammar's masks that must still be timed. All answers with the
            same grammar share one counter.
        inner: llguidance's matcher.
        needs_lexer: Whether `rebuild_lexer` must replace the answer's lexer before the next mask.
            `rebuild_lexer` takes as long as compiling the grammar, so a separate thread should call
            the method.
    """

    def __init__(self, grammar: "CompiledGrammar", ending_ids: frozenset[int]):
        self.ending_ids, self.is_stopped = ending_ids, False
        self._spec, self.vocabulary, self._grammar = grammar.spec, grammar.vocabulary, grammar
        self.mask_timing = grammar.mask_timing
        self.needs_lexer = False
        self._consumed: list[int] = []
        # Number of lexers that the answer has used so far, including the current lexer.
        self._num_lexers = 0
        # Value of `len(_consumed)` at which the matcher got a private lexer, which no other answer
        # uses. None if the current lexer is not private.
        self._private_since: int | None = None
        self._use_lexer(*grammar.lexers.acquire(grammar.memory.is_full))
        self.inner: Any = self._lexer.initial_matcher.deep_copy()
        self._reasoning_tail: bytes | None = b"" if self._spec.after is not None else None
        self._is_in_opening_tag = self._spec.opening is not None and bool(grammar.opening_tag_ids)
        self._opening_tag_ids = grammar.opening_tag_ids
        self._num_opening_tokens = 0
        self._num_line_breaks = _MAX_LINE_BREAKS

    @property
    def is_in_reasoning(self) -> bool:
        """Whether the answer is in its reasoning, where all tokens except end tokens may follow."""
        return self._reasoning_tail is not None and not self._is_in_opening_tag

    @property
    def is_constrained(self) -> bool:
        """Whether only the grammar decides which tokens are allowed, because the reasoning and the
        line breaks after the reasoning are over."""
        return (
            self._reasoning_tail is None
            and not self._is_in_opening_tag
            and self._num_line_breaks == _MAX_LINE_BREAKS
        )

    def accept(self, token_id: int) -> None:
        """Consume the answer's next token. Tokens of `ending_ids` are ignored.

        Raises:
            GrammarError: The grammar does not allow the token.
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
        """Return whether the caller may call `inner.consume_token` and then `note_consumed` for the
        token, instead of `accept`."""
        return self.is_constrained and not self.needs_lexer and token_id not in self.ending_ids

    def _match_opening_tag(self, token_id: int) -> bool:
        """Return whether a token continues the tag that opens the reasoning, such as `<think>`.

        If the token does not continue the tag, the answer has no reasoning.
        """
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
            if self.needs_lexer:  # `rebuild_lexer` will replay the token in the new lexer
                self._consumed.append(token_id)
                continue
            error = self.note_consumed(token_id, self.inner.consume_token(token_id))
            if error is not None:
                raise error

    def note_consumed(self, token_id: int, is_allowed: bool) -> GrammarError | None:
        """Record that llguidance's matcher (`inner`) has consumed or refused a token.

        Returns:
            The error of the answer, or None.
        """
        if not is_allowed:
            error = self._find_failure("the grammar does not allow the sampled token")
            if error is not None:
                return error
        self._consumed.append(token_id)
        self.is_stopped = is_allowed and self.inner.is_stopped()
        if not len(self._consumed) % _TOKENS_PER_MEMORY_CHECK and self._grammar.memory.is_full:
            # Making masks adds lexer states for tokens that the answer then does not contain. A new
            # lexer takes less memory, because the new lexer only matches the answer's tokens.
            self.needs_lexer |= not self.is_stopped and self._may_shrink()
        return None

    def _use_lexer(self, lexer: Lexer, use: LexerUse) -> None:
        """Use a lexer for this matcher until the next call of this method.

        When the matcher is garbage-collected, the lexer is returned to the `LexerPool`.
        """
        self._lexer: Any = lexer
        self._num_lexers += 1
        self._lexer_since = len(self._consumed)
        self._private_since = self._lexer_since if use is LexerUse.PRIVATE else None
        lexers = self._grammar.lexers
        self._return_lexer = weakref.finalize(self, lexers.release, lexer, use, self._consumed)
        self._return_lexer.atexit = False

    def _may_rebuild(self) -> bool:
        """Return whether a new lexer would probably have fewer states than the current lexer.

        Return False if the answer got a private lexer, which no other answer uses, fewer than
        `_MIN_REBUILD_TOKENS` tokens ago. A second private lexer would soon have as many states.
        """
        since = self._private_since
        return since is None or len(self._consumed) - since >= _MIN_REBUILD_TOKENS

    def _may_shrink(self) -> bool:
        """Return whether a new lexer may save enough memory to be worth compiling."""
        if self._grammar.lexers.is_cheap:
            return self._may_rebuild()
        num_since = len(self._consumed) - self._lexer_since
        return min(num_since, self._lexer.num_tokens + num_since - MIN_LEXER_TOKENS) >= (
            _MIN_REBUILD_TOKENS
        )

    def _find_failure(self, default_reason: str) -> GrammarError | None:
        """Return the error of llguidance's matcher, or set `needs_lexer` and return None.

        If the matcher's lexer has too many states, all matchers that share the lexer fail. All
        answers that used the lexer have added states, so this answer need not be the cause. The
        method then sets `needs_lexer`, unless a new lexer would soon have too many states again.
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
        """Replace the matcher's lexer, and consume the answer's tokens again.

        Raises:
            GrammarError: The lexers of all answers take too much memory.
        """
        self._return_lexer.detach()
        self._grammar.lexers.retire(self._lexer)
        self._lexer = self.inner = None  # free the old lexer's memory before a new lexer is created
        num_since = len(self._consumed) - self._lexer_since
        may_share = self._num_lexers == 1 or num_since >= _MIN_REBUILD_TOKENS
        lexer, use, self.inner = self._grammar.rebuild_lexer(
            self._grammar, self._consumed, may_share
        )
        self._use_lexer(lexer, use)
        self.needs_lexer, self.is_stopped = False, self.inner.is_stopped()

    def fill_mask(self, rows: np.ndarray, row: int) -> GrammarError | None:
        """Write the mask of the next token into `rows[row]`. Replace the matcher's lexer if needed.

        Args:
            rows: Masks, int32 [rows, W].
            row: Index of the mask to write.

        Returns:
            The error if the grammar has failed or allows no next token, otherwise None.
        """
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
        """Write the mask of the next token into `rows[row]`, but never replace the matcher's lexer.

        If the lexer must be replaced first, the method sets `needs_lexer` and returns None. The
        caller must then ignore the contents of `rows[row]`. See `fill_mask` for the arguments and
        the result.
        """
        from llguidance.numpy import fill_next_token_bitmask

        if not self.is_in_reasoning:
            fill_next_token_bitmask(self.inner, rows, row)
        return self.adapt_mask(rows[row])

    def adapt_mask(self, mask: np.ndarray) -> GrammarError | None:
        """Adapt llguidance's mask in place to the rules for end tokens, line breaks and reasoning.

        Args:
            mask: llguidance's mask, int32 [W]. During the reasoning, llguidance makes no mask, and
                the method writes a mask of all tokens except end tokens.

        Returns:
            The error if the grammar has failed or allows no next token, otherwise None. If this
            call has set `needs_lexer`, the caller must not use the mask.
        """
        # Forbid end tokens, because the answer must still contain the constrained text.
        if self.is_in_reasoning:
            mask[:] = self.vocabulary.not_eos_mask
            self._forbid_ending_ids(mask)
            return None
        if self.inner.is_error():
            return self._find_failure("")
        may_end = self.vocabulary.clear_eos(mask)
        if not may_end and self.is_constrained:
            return None  # the usual case
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
            # The matcher was replaced together with its lexer. The new matcher found that the
            # answer is complete, so allow only end tokens.
            mask[:] = ~self.vocabulary.not_eos_mask
        return None

    def _forbid_ending_ids(self, mask: np.ndarray) -> None:
        words = mask.view(np.uint32)
        for token in self.ending_ids:
            words[token // 32] &= ~np.uint32(1 << token % 32)

    def too_slow_error(self) -> GrammarError:
        """Return the error of an answer whose masks took too much CPU time on average."""
        most = f"{bounds.MAX_MEAN_MASK_S * 1e3:g} ms of CPU time"
        reason = f"its token masks took more than {most} each on average: simplify the grammar"
        return spec_error(self._spec, reason)

    def unexpected_error(self, error: BaseException) -> GrammarError:
        """Return the error of the answer after an unexpected exception."""
        return spec_error(self._spec, f"{type(error).__name__}: {error}")


@dataclass
class MaskTiming:
    """Counts the masks of one grammar that must still be timed.

    All answers that use the grammar share this object.

    Attributes:
        num_timed_masks: Number of further masks whose computation `MaskMaker` must time. A mask
            that is timed is computed alone in a thread, instead of in a batch.
    """

    num_timed_masks: int = 0


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar.

    Attributes:
        spec: The structured-output specification.
        lexers: Pool of the grammar's lexers.
        vocabulary: Vocabulary of the tokenizer.
        opening_tag_ids: Tokens of the specification's `opening`.
        memory: Measures the memory of all lexers of all grammars.
        rebuild_lexer: `GrammarCompiler.rebuild_lexer`.
        mask_timing: Counter of the grammar's masks that must still be timed.
    """

    spec: StructuredOutputs
    lexers: LexerPool
    vocabulary: Vocabulary
    opening_tag_ids: tuple[int, ...]
    memory: LexerMemory
    rebuild_lexer: Callable[["CompiledGrammar", list[int], bool], tuple[Lexer, LexerUse, Any]]
    mask_timing: MaskTiming = field(default_factory=MaskTiming)

    def matcher(self, ending_ids: frozenset[int]) -> Matcher:
        """Return a matcher for one answer. The tokens `ending_ids` may end the answer."""
        return Matcher(self, ending_ids)
