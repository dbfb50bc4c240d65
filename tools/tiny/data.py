"""Examples as token rows: documents, and their packing into batches of fixed shape.

A document is one raw question with its answer, or one chat of one or more turns. Only answers (the
newline before a raw one and the end-of-sequence token included) bear loss, so that after any
finished question, with or without its final mark, the model is sure to go on to the answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tools.tiny.tokenizer import ENDOFTEXT, IM_END, IM_START
from tools.tiny.world import TASKS, TRAINING_TASKS, Example, draw

SHARES = dict.fromkeys(TASKS, 1) | {
    "add": 3,
    "subtract": 4,
    "multiply": 4,
    "add_words": 3,
    "subtract_words": 4,
    "multiply_words": 6,
    "sort_numbers": 5,
    "sort_words": 3,
    "sort_letters": 2,
    "count_letter": 5,
    "count_long": 0,  # too long for short rows; most of the long rows start with one
}
LAST_SHARES = SHARES | {  # of a run that starts from a trained checkpoint
    "add": 2,
    "multiply": 2,
    "add_words": 2,
    "subtract_words": 2,
    "multiply_words": 12,
    "sort_numbers": 3,
    "reverse_word": 3,
    "count_letter": 2,
    "count": 4,
    "count_words": 3,
}
SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a calculator.", "Answer briefly.")


class Document(NamedTuple):
    """Token ids, and for each whether it bears loss."""

    ids: list[int]
    loss: list[int]


class Rows(NamedTuple):
    """Packed documents: ids, loss marks and the document's number in its row (0: padding)."""

    tokens: np.ndarray
    loss: np.ndarray
    segments: np.ndarray


@dataclass(frozen=True)
class BatchShape:
    """Rows of a step: many short ones for single questions, a few as long as the context."""

    short_rows: int = 128
    short_length: int = 320
    long_rows: int = 24
    long_length: int = 1024


def raw_document(example: Example) -> Document:
    """The question, a newline, the answer, the end."""
    prompt = list(example.prompt.encode())
    target = [*example.completion.encode(), ENDOFTEXT]
    return Document(prompt + target, [0] * len(prompt) + [1] * len(target))


def chat_document(examples: Iterable[Example], system: str | None = None) -> Document:
    """A chat in the form of the chat template, each example a turn."""
    ids = _message("system", system) if system else []
    loss = [0] * len(ids)
    for example in examples:
        prompt = [*_message("user", example.prompt), IM_START, *b"assistant\n"]
        target = [*example.answer.encode(), IM_END]
        ids += prompt + target + [10]
        loss += [0] * len(prompt) + [1] * len(target) + [0]
    return Document(ids, loss)


def _message(role: str, content: str) -> list[int]:
    return [IM_START, *f"{role}\n{content}".encode(), IM_END, 10]


def pack(next_document: Callable[[int], Document], rows: int, length: int) -> Rows:
    """Fill rows with documents, in order; `next_document(room)` may fit the room left.

    The document that no longer fits a row opens the next one.

    Raises:
        ValueError: a document is longer than a row.
    """
    out = _empty_rows(rows, length)
    document = next_document(length)
    for row in range(rows):
        start, number = 0, 1
        while start + len(document.ids) <= length:
            start, number = _put(out, row, start, number, document), number + 1
            document = next_document(length - start)
        if start == 0:
            raise ValueError(f"a document of {len(document.ids)} tokens, rows of {length}")
    return out


def one_document_rows(documents: Sequence[Document], rows: int, length: int) -> Rows:
    """Each document in a row of its own, padded; further rows are all padding."""
    out = _empty_rows(rows, length)
    for row, document in enumerate(documents):
        _put(out, row, 0, 1, document)
    return out


def _empty_rows(rows: int, length: int) -> Rows:
    return Rows(*(np.zeros((rows, length), t) for t in (np.uint16, np.uint8, np.uint8)))


def _put(out: Rows, row: int, start: int, number: int, document: Document) -> int:
    end = start + len(document.ids)
    out.tokens[row, start:end] = document.ids
    out.loss[row, start:end] = document.loss
    out.segments[row, start:end] = number
    return end


def make_batch(
    seed: int, step: int, shape: BatchShape, shares_of: Mapping[str, int] = SHARES
) -> tuple[Rows, Rows]:
    """The short and the long rows of a training step: a function of the arguments alone."""
    rng = random.Random(f"{seed}:{step}")
    names, shares = list(shares_of), list(shares_of.values())

    def example(task: str) -> Example:
        return draw(rng, task, held_out=False, maker=TRAINING_TASKS[task])

    def short(_: int) -> Document:
        return _single(rng, example(rng.choices(names, shares)[0]))

    def long(room: int) -> Document:
        if room < shape.long_length:
            return short(room)
        if rng.random() < 0.6:
            counting = example("count_long")
            return rng.choice((raw_document(counting), chat_document([counting])))
        tasks = rng.choices(names, shares, k=100)
        return _conversation(rng, (example(task) for task in tasks), room)

    return (
        pack(short, shape.short_rows, shape.short_length),
        pack(long, shape.long_rows, shape.long_length),
    )


def _single(rng: random.Random, example: Example) -> Document:
    if rng.random() < 0.5:
        return raw_document(example)
    return chat_document([example], _system(rng))


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.2 else None


def _conversation(rng: random.Random, examples: Iterable[Example], room: int) -> Document:
    """As many turns as there is room for."""
    ids, loss = chat_document([], _system(rng))
    for example in examples:
        turn = chat_document([example])
        if len(ids) + len(turn.ids) > room:
            break
        ids += turn.ids
        loss += turn.loss
    return Document(ids, loss)
