"""Log-probabilities as OpenAI's two endpoints write them, and as vLLM writes those of prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jpaged import Logprob

Candidates = Mapping[int, Logprob]
TokenText = Callable[[int], str]

LOWEST = -9999.0
"""Stands for a probability of 0, whose logarithm JSON cannot write."""


class CompletionLogprobs:
    """Builds the `logprobs` of a choice of `/v1/completions`, piece by piece.

    Args:
        token_text: The text of a token alone.
        as_ids: Write "token_id:17" instead of texts.
    """

    def __init__(self, token_text: TokenText, *, as_ids: bool):
        self._token_text, self._as_ids = token_text, as_ids
        self._offset = 0

    def piece(
        self, token_ids: Sequence[int], candidates: Sequence[Candidates | None]
    ) -> dict[str, Any]:
        """The next tokens' part; the first token of a text has no candidates."""
        texts = [self._text(token_id) for token_id in token_ids]
        found = list(zip(token_ids, candidates, strict=True))
        return {
            "text_offset": [self._place(text) for text in texts],
            "token_logprobs": [None if c is None else finite(c[t].logprob) for t, c in found],
            "tokens": texts,
            "top_logprobs": [None if c is None else self._top(c) for _, c in found],
        }

    def _place(self, text: str) -> int:
        offset = self._offset
        self._offset += len(text)
        return offset

    def _top(self, candidates: Candidates) -> dict[str, float]:
        """By text; of several tokens with one text the likeliest."""
        top: dict[str, float] = {}
        for token_id, found in candidates.items():
            text, logprob = self._text(token_id), finite(found.logprob)
            top[text] = max(logprob, top.get(text, LOWEST))
        return top

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._token_text(token_id)


def joined(pieces: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Pieces of `CompletionLogprobs` as one."""
    return {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]}


def chat_logprobs(
    token_ids: Sequence[int],
    candidates: Sequence[Candidates],
    num_top: int,
    token_text: TokenText,
    *,
    as_ids: bool,
) -> dict[str, Any]:
    """The `logprobs` of a choice of `/v1/chat/completions`.

    Args:
        token_ids: The tokens.
        candidates: Of each token.
        num_top: Candidates to tell of.
        token_text: The text of a token alone.
        as_ids: Write "token_id:17" instead of texts.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        shown = f"token_id:{token_id}" if as_ids else text
        return {"token": shown, "logprob": finite(logprob), "bytes": list(text.encode())}

    def whole(token_id: int, found: Candidates) -> dict[str, Any]:
        best = sorted(found.items(), key=lambda item: -item[1].logprob)[:num_top]
        top = [entry(t, own.logprob) for t, own in best]
        return entry(token_id, found[token_id].logprob) | {"top_logprobs": top}

    pairs = zip(token_ids, candidates, strict=True)
    return {"content": [whole(t, found) for t, found in pairs], "refusal": None}


def prompt_logprobs(candidates: Sequence[Candidates | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token its candidates by id, none for the first."""
    return [
        None
        if found is None
        else {
            str(token_id): {
                "logprob": finite(own.logprob),
                "rank": own.rank,
                "decoded_token": own.decoded_token,
            }
            for token_id, own in found.items()
        }
        for found in candidates
    ]


def finite(logprob: float) -> float:
    """A logarithm that JSON can write."""
    return max(logprob, LOWEST)
