"""Log-probabilities as callers read them, made of what the device gave when they are first read."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jpaged.outputs import Logprob
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import NUM_FACTS


class TokenLogprobs(Sequence[dict[int, Logprob]]):
    """For each token its candidates by id: itself first, then the likeliest ones.

    Kept as the device gave them, 4 bytes a number, and all made when one is read: an entry with
    five candidates takes the host several microseconds, texts more, and a step has hundreds. Copied
    or pickled it becomes a list.

    Args:
        scores: int32 [C, W], as `pallas_kernels.token_scores` packs them; kept, so pass a copy of
            what may change.
        tokenizer: None without one.
        made: The first entries, as far as others have made them of the same scores; those that are
            made here are added.
    """

    def __init__(
        self,
        scores: np.ndarray,
        tokenizer: Tokenizer | None,
        made: list[dict[int, Logprob]] | None = None,
    ):
        self._scores, self._tokenizer = scores, tokenizer
        self._made = [] if made is None else made

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return iter(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._entries == list(other)

    def __add__(self, other: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*self, *other]

    def __repr__(self) -> str:
        return repr(self._entries)

    def __reduce__(self) -> Any:
        return list, (self._entries,)

    @property
    def _entries(self) -> list[dict[int, Logprob]]:
        made, num = self._made, len(self._scores)
        if len(made) < num:
            made += self._make(self._scores[len(made) :])
        return made if len(made) == num else made[:num]

    def _make(self, scores: np.ndarray) -> list[dict[int, Logprob]]:
        token_ids = [[row[0], *row[NUM_FACTS::2]] for row in scores.tolist()]
        floats = scores.view(np.float32).tolist()
        logprobs = [[row[1], *row[NUM_FACTS + 1 :: 2]] for row in floats]
        texts = self._texts({token_id for row in token_ids for token_id in row})
        rows = zip(token_ids, logprobs, scores[:, 2].tolist(), strict=True)
        return [_candidates(*row, texts) for row in rows]

    def _texts(self, token_ids: set[int]) -> dict[int, str]:
        """Each token's text alone, if there is a tokenizer."""
        if self._tokenizer is None:
            return {}
        decode = self._tokenizer.decode
        return {token_id: decode([token_id], skip_special_tokens=False) for token_id in token_ids}


def _candidates(
    token_ids: list[int], logprobs: list[float], rank: int, texts: dict[int, str]
) -> dict[int, Logprob]:
    """The token itself, whose rank is given, and then the likeliest ones."""
    first, *others = token_ids
    found = {first: Logprob(logprobs[0], rank, texts.get(first))}
    for place, token_id in enumerate(others, start=1):
        if token_id != first:
            found[token_id] = Logprob(logprobs[place], place, texts.get(token_id))
    return found
