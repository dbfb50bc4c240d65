"""Training data: documents of tokens, packed into batches of a fixed shape.

A document is a question with its answer without a chat template ("raw"), or a chat of one or more
turns. The loss counts only the tokens of the assistant, including the newline before a raw answer
and the end-of-sequence token. The model therefore continues a complete question with the answer,
even if the question lacks its final punctuation mark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tools.tiny.dialogues import (
    UNCALCULATED,
    Dialogue,
    Message,
    calculator_turn,
    chat_of,
    draw_calculation,
    draw_dialogue,
    draw_tool,
    system_of,
)
from tools.tiny.tokenizer import ENDOFTEXT, IM_END, IM_START
from tools.tiny.world import TASKS, TRAINING_TASKS, Example, draw, is_held_out

SHARES = dict.fromkeys(TASKS, 1) | {
    "add": 4,
    "subtract": 6,
    "multiply": 4,
    "add_words": 3,
    "subtract_words": 4,
    "multiply_words": 8,
    "sort_numbers": 7,
    "sort_words": 4,
    "sort_letters": 3,
    "reverse_word": 2,
    "reverse_list": 2,
    "count_letter": 4,
    "count": 3,
    "count_words": 3,
    # The answers of this training task are too long for short rows. Some long rows start with an
    # example of this task.
    "count_long": 0,
}
DIALOGUE_SHARES = {
    "calculator": 5,
    "calculator_unused": 2,
    "json_answer": 14,
    "json_extract": 4,
    "think_json": 4,
    "think_calculator": 5,
}
THOUGHT_SHARES = {
    "think_add": 2,
    "think_multiply": 2,
    "think_words": 1,
    "think_count_letter": 2,
    "think_other": 7,
}
THOUGHTFUL = 0.25  # Share of one-question documents in which reasoning precedes the answer.
SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a calculator.", "Answer briefly.")


class Document(NamedTuple):
    """A training document: its token ids, and for each token whether the loss counts it (1 or
    0)."""

    ids: list[int]
    loss: list[int]


class Rows(NamedTuple):
    """Rows of packed documents.

    Each array is [rows, length]. `segments` holds for each token the number of its document in the
    row, from 1; 0 marks padding.
    """

    tokens: np.ndarray
    loss: np.ndarray
    segments: np.ndarray


@dataclass(frozen=True)
class BatchShape:
    """Numbers and lengths of the short rows and of the long rows of a training step.

    Short rows contain documents with one question. Long rows mainly contain chats and long answers.
    """

    short_rows: int = 112
    short_length: int = 320
    long_rows: int = 14
    long_length: int = 1536


def raw_document(example: Example) -> Document:
    """Return a document without a chat template: question, newline, answer and end token."""
    prompt = list(example.prompt.encode())
    target = [*example.completion.encode(), ENDOFTEXT]
    return Document(prompt + target, [0] * len(prompt) + [1] * len(target))


def chat_document(examples: Iterable[Example], system: str | None = None) -> Document:
    """Return a document in the chat template's format, with one turn per example."""
    ids = _message("system", system) if system else []
    loss = [0] * len(ids)
    for example in examples:
        prompt = [*_message("user", example.prompt), IM_START, *b"assistant\n"]
        target = [*example.answer.encode(), IM_END]
        ids += prompt + target + [10]
        loss += [0] * len(prompt) + [1] * len(target) + [0]
    return Document(ids, loss)


def dialogue_document(dialogue: Dialogue) -> Document:
    """Return a dialogue as a document in the chat template's format.

    Only the last message contains reasoning.
    """
    messages = list(dialogue.messages)
    document = Document([], [])
    if dialogue.tools:
        has_system = bool(messages) and messages[0]["role"] == "system"
        lead = messages.pop(0)["content"] + "\n\n" if has_system else ""
        tools = "".join("\n" + _json(tool) for tool in dialogue.tools)
        _add(document, "system", f"{lead}# Tools\n\n<tools>{tools}\n</tools>\n\n{_HOW_TO_CALL}")
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            content = message["content"]
            _add(document, "user", f"<tool_response>\n{content}\n</tool_response>")
        elif message["role"] == "assistant":
            thought = dialogue.thought if i == len(messages) - 1 else None
            _add_answer(document, message, thought)
        else:
            _add(document, message["role"], message["content"])
    return document


_HOW_TO_CALL = """\
To call one, write:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>"""


def _add(document: Document, role: str, content: str) -> None:
    ids = _message(role, content)
    document.ids.extend(ids)
    document.loss.extend([0] * len(ids))


def _add_answer(document: Document, message: Message, thought: str | None) -> None:
    opening, text = "assistant\n", message["content"]
    for call in message.get("tool_calls", ()):
        own = call["function"]
        head = f'<tool_call>\n{{"name": "{own["name"]}", "arguments": '
        text += f"{head}{_json(own['arguments'])}}}\n</tool_call>"
    if thought is not None:
        opening, text = "assistant\n<think>\n", f"{thought}\n</think>\n\n{text}"
    prompt, target = [IM_START, *opening.encode()], [*text.encode(), IM_END]
    document.ids.extend([*prompt, *target, 10])
    document.loss.extend([0] * len(prompt) + [1] * len(target) + [0])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _message(role: str, content: str) -> list[int]:
    return [IM_START, *f"{role}\n{content}".encode(), IM_END, 10]


def pack(next_document: Callable[[int], Document], rows: int, length: int) -> Rows:
    """Fill `rows` rows of `length` tokens with documents.

    `next_document(room)` returns a document that should have at most `room` tokens. Each row begins
    with a new document. A document that does not fit in the rest of a row goes into a later row.

    Raises:
        ValueError: a document is longer than a row.
    """
    out = _empty_rows(rows, length)
    left: Document | None = None
    for row in range(rows):
        document = next_document(length)
        if len(document.ids) > length:
            raise ValueError(
                f"a document has {len(document.ids)} tokens, but a row has only {length}: use "
                "longer rows"
            )
        start, number = _put(out, row, 0, 1, document), 2
        while start + len((left := left or next_document(length - start)).ids) <= length:
            start, number, left = _put(out, row, start, number, left), number + 1, None
    return out


def rows_of(groups: Sequence[Sequence[Document]], rows: int, length: int) -> Rows:
    """Put each group of documents into one row. Fill the rest of a row, and unused rows, with
    padding."""
    out = _empty_rows(rows, length)
    for row, documents in enumerate(groups):
        start = 0
        for number, document in enumerate(documents, 1):
            start = _put(out, row, start, number, document)
    return out


def _empty_rows(rows: int, length: int) -> Rows:
    return Rows(*(np.zeros((rows, length), t) for t in (np.uint16, np.uint8, np.uint8)))


def _put(out: Rows, row: int, start: int, number: int, document: Document) -> int:
    end = start + len(document.ids)
    out.tokens[row, start:end] = document.ids
    out.loss[row, start:end] = document.loss
    out.segments[row, start:end] = number
    return end


def make_batch(seed: int, step: int, shape: BatchShape) -> tuple[Rows, Rows]:
    """Return the short and the long rows of a training step. Equal arguments give equal rows."""
    source = _Source(random.Random(f"{seed}:{step}"), shape.long_length)
    return (
        pack(source.short, shape.short_rows, shape.short_length),
        pack(source.long, shape.long_rows, shape.long_length),
    )


class _Source:
    """Draw random training documents."""

    def __init__(self, rng: random.Random, long_length: int):
        self._rng, self._long_length = rng, long_length

    def short(self, room: int = 320) -> Document:
        """Return a document of at most 320 tokens, with a single question and its answer."""
        rng = self._rng
        while True:
            if rng.random() < THOUGHTFUL:
                document = self._dialogue(THOUGHT_SHARES)
            elif rng.random() < 0.5:
                document = raw_document(self._example())
            else:
                document = chat_document([self._example()], self._system())
            if len(document.ids) <= 320:
                return document

    def long(self, room: int) -> Document:
        """Return a document for a long row, in which `room` tokens are still free.

        Most documents fit into `room`. A document that is longer begins a new row.
        """
        rng = self._rng
        kind = rng.random()
        if room < self._long_length:
            document = self._dialogue(DIALOGUE_SHARES) if kind < 0.8 else self.short()
            return document if len(document.ids) <= room else self._in_room(room, document)
        if kind < 0.15:
            counting = self._example("count_long")
            return rng.choice((raw_document(counting), chat_document([counting])))
        if kind < 0.45:
            return self._conversation(room)
        if kind < 0.75:
            return self._with_tools(room)
        return self._dialogue(DIALOGUE_SHARES)

    def _in_room(self, room: int, document: Document) -> Document:
        """Return a short document instead of `document`, which is too long for the current row.

        The short document may fit into the current row, which has `room` free tokens. If `room` is
        at most 64, return `document`, which then begins a new row.
        """
        return self.short() if room > 64 else document

    def _example(self, task: str | None = None) -> Example:
        task = task or self._rng.choices(list(SHARES), list(SHARES.values()))[0]
        return draw(self._rng, task, held_out=False, maker=TRAINING_TASKS[task])

    def _dialogue(self, shares: Mapping[str, int]) -> Document:
        """Return a dialogue of a random task; `shares` are the weights of the tasks.

        Other questions sometimes come before the dialogue.
        """
        rng = self._rng
        task = rng.choices(list(shares), list(shares.values()))[0]
        dialogue = draw_dialogue(rng, task, held_out=False)
        if dialogue.messages[0]["role"] != "system" and rng.random() < 0.15:
            tasks = UNCALCULATED if dialogue.tools else [None]
            before = [self._example(rng.choice(tasks)) for _ in range(rng.randint(1, 4))]
            messages = [m for example in before for m in chat_of(example)]
            dialogue = replace(dialogue, messages=messages + dialogue.messages)
        document = dialogue_document(dialogue)
        return document if len(document.ids) <= self._long_length else self._dialogue(shares)

    def _system(self) -> str | None:
        return self._rng.choice(SYSTEM_MESSAGES) if self._rng.random() < 0.2 else None

    def _conversation(self, room: int) -> Document:
        """Return a conversation with as many turns as fit in `room` tokens."""
        document = chat_document([], self._system())
        while True:
            turn = chat_document([self._example()])
            if len(document.ids) + len(turn.ids) > room:
                return document
            document.ids.extend(turn.ids)
            document.loss.extend(turn.loss)

    def _with_tools(self, room: int) -> Document:
        """Return a chat in which the assistant answers some questions with a calculator tool."""
        rng = self._rng
        tool, key = draw_tool(rng)
        dialogue = Dialogue(system_of(rng), [tool])
        document = dialogue_document(dialogue)
        while rng.random() < 0.93:
            calculation = draw_calculation(rng, beyond=rng.random() < 0.25)
            if is_held_out(f"calculator:{calculation.expression}"):
                continue
            if rng.random() < 0.7:
                turn = calculator_turn(rng, tool, key, calculation)
            else:
                turn = chat_of(self._example(rng.choice(UNCALCULATED)))
            longer = replace(dialogue, messages=[*dialogue.messages, *turn])
            written = dialogue_document(longer)
            if len(written.ids) > room:
                break
            dialogue, document = longer, written
        return document
