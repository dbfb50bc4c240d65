"""Messages and shared memory between the engine and the mask worker.

The mask worker (`mask_worker`) is a process that compiles grammars and makes masks. The engine's
side is `mask_client.MaskWorkerClient`. An answer is the output of one sequence that must match a
grammar.
"""

import mmap
import os
import struct
import weakref
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from jpaged.errors import ErrorInfo, ErrorKind, RequestError, error_info
from jpaged.processes import frame_message
from jpaged.structured_outputs import StructuredOutputs
from jpaged.structured_outputs.matcher import GrammarError

MESSAGE_HEADER = struct.Struct("=II")
"""Header of a message to the mask worker: the `MaskMessageKind`, and the number of answers. The
number is 0 unless the kind is TOKENS."""

_ERROR_BYTES = 2048
"""Bytes that the shared memory (`MaskMemory`) reserves for an answer's error message."""


class MaskWorkerSettings(msgspec.Struct, frozen=True):
    """Settings of the mask worker. The first message to the worker contains them.

    Attributes:
        folder: Folder of the tokenizer.
        vocab_size: Width of the logits.
        eos_token_ids: The model's end tokens.
        capacity, mask_width: See `MaskMemory`.
    """

    folder: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    capacity: int
    mask_width: int


class MaskJob(msgspec.Struct, frozen=True):
    """A structured-output specification to compile. The engine has validated the specification.

    Attributes:
        spec: The specification.
        memory_indices: Index of each answer's entry in the `MaskMemory`.
        ending_ids: Token ids that may end the answers.
    """

    spec: StructuredOutputs
    memory_indices: list[int]
    ending_ids: frozenset[int]


class MaskMessageKind(IntEnum):
    """Kind of a message to the mask worker."""

    # A BEGIN message contains a `MaskJob` in JSON. The first BEGIN message contains the
    # `MaskWorkerSettings` instead.
    BEGIN = 0
    # A TOKENS message contains the tokens of a step, in three int32 arrays. The arrays are the
    # `MaskMemory` index of each answer, the row of each answer in the step, and the token of each
    # row (-1 for no token).
    TOKENS = 1
    # An END message contains an int32 array: the `MaskMemory` index of each answer that has ended.
    END = 2


class AnswerState(IntEnum):
    """State of an answer's entry in the `MaskMemory`.

    1. The engine changes FREE to PENDING and sends BEGIN.
    2. The mask worker compiles the grammar, makes the first mask and sets READY or FAILED.
    3. The engine sets PENDING and sends a token (TOKENS). If the answer's last token took more than
       1 ms, or its last mask more than 10 ms, the worker sets HEAVY before matching the new token.
       When the work is done, the worker sets READY, STOPPED or FAILED. Step 3 repeats for each
       token.
    4. The engine sends END. The worker sets FREE once none of its threads writes to the entry.

    If the worker ends, the engine sets DROPPED. The worker increases `MaskMemory.counts[0]` after
    it has written the states of a step. A reader that sees the new count also sees these states.
    """

    FREE = 0  # no answer uses the memory entry, and the mask worker does not write to the entry
    PENDING = 1  # the mask worker has work to do: compile the grammar, match a token, make a mask
    HEAVY = 2  # like PENDING, but probably slow: a step should run without the answer
    READY = 3  # the memory entry holds the answer's next mask
    STOPPED = 4  # the answer is complete
    FAILED = 5  # the answer failed, and the memory entry holds the error
    DROPPED = 6  # the mask worker has ended

    @property
    def is_pending(self) -> bool:
        """Whether the mask worker still has work to do for the answer.

        When the work is done, the mask worker gives the answer another state.
        """
        return self in (AnswerState.PENDING, AnswerState.HEAVY)


class MaskMemory:
    """Memory that the engine and the mask worker share, with one entry per answer.

    An entry consists of a state, a mask and an error. No answer uses entry 0: its mask allows every
    token. Only the worker writes the masks and errors of the other entries. Pages that were never
    written take no memory.

    Attributes:
        fd: File descriptor of the memory.
        counts: int64 [3]: number of steps whose tokens were matched, nanoseconds spent on matching
            tokens, and nanoseconds spent on making masks in batches. When the engine starts or
            drops a worker, it sets the number of steps.
        states: int32 [capacity], each an `AnswerState`.
        masks: int32 [capacity, W]. Bit `j` of word `w` is token `32 w + j`.
        drop_reason: Why the engine dropped the last mask worker. Only the engine's object has this
            text; it is not in the shared memory.

    Args:
        capacity: Number of entries.
        mask_width: Number of words per mask, W.
        fd: File descriptor of existing memory. None: create the memory.
    """

    def __init__(self, capacity: int, mask_width: int, fd: int | None = None):
        page = mmap.PAGESIZE
        sizes = [page, 4 * capacity, _ERROR_BYTES * capacity, 4 * mask_width * capacity]
        starts = np.cumsum([0, *(-(-size // page) * page for size in sizes)]).tolist()
        self.fd = os.memfd_create("jpaged-masks") if fd is None else fd
        if fd is None:
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, starts[-1])
        memory = mmap.mmap(self.fd, starts[-1])

        def part(i: int, dtype: Any, *shape: int) -> np.ndarray:
            found = np.frombuffer(memory, dtype, int(np.prod(shape)), starts[i])
            return found.reshape(shape)

        self.counts = part(0, np.int64, 3)
        self.states = part(1, np.int32, capacity)
        self._error_texts = part(2, np.uint8, capacity, _ERROR_BYTES)
        self.masks = part(3, np.int32, capacity, mask_width)
        self.drop_reason = ""
        if fd is None:
            self.masks[0] = -1

    def write_error(self, memory_index: int, error: BaseException) -> None:
        """Store an answer's error and set the answer's state to FAILED."""
        info = error_info(error)
        if not isinstance(error, RequestError):
            problem = f": {type(error).__name__}: {error}"
            info = ErrorInfo("structured_outputs", (problem,), kind=ErrorKind.INTERNAL)
        text, words = msgspec.json.encode(info), str(info)
        while len(text) >= _ERROR_BYTES:  # shorten the message until it fits
            words = words[: len(words) * 3 // 4]
            shortened = ErrorInfo("structured_outputs", (words,), kind=info.kind, shows_path=False)
            text = msgspec.json.encode(shortened)
        self._error_texts[memory_index, : len(text) + 1] = np.frombuffer(text + b"\0", np.uint8)
        self.states[memory_index] = AnswerState.FAILED

    def read_error(self, memory_index: int) -> GrammarError:
        """Return the error of an answer whose state is FAILED or DROPPED."""
        if self.states[memory_index] == AnswerState.DROPPED:
            return GrammarError(
                "structured_outputs",
                ": the process that compiles grammars and makes masks has ended "
                f"({self.drop_reason}); the next request starts a new process",
                remedy="retry",
                kind=ErrorKind.UNAVAILABLE,
            )
        text = self._error_texts[memory_index].tobytes().partition(b"\0")[0]
        return GrammarError.from_info(msgspec.json.decode(text, type=ErrorInfo))


def encode_message(kind: MaskMessageKind, *parts: bytes, count: int = 0) -> bytes:
    """Return the bytes of a message to the mask worker.

    Args:
        kind: Kind of the message.
        parts: Content of the message, in parts.
        count: Number of answers in a TOKENS message.
    """
    return frame_message(MESSAGE_HEADER.pack(kind, count), *parts)
