"""What the HTTP process and the engine's process say to each other, and how it travels.

A frame is its length in 4 bytes, big endian, and a message in MessagePack; nothing is pickled.
"""

import struct
from typing import Any

import msgspec

from jpaged import EngineStats, RequestDelta

HEADER = struct.Struct(">I")
MAX_FRAME = 2**30
"""Bytes of the largest frame that is believed."""


class Start(msgspec.Struct, tag=True):
    """Make the engine: `Engine(**options)`. The first message of all."""

    options: dict[str, Any]


class Add(msgspec.Struct, tag=True):
    """Queue a request; its `params` are those of `SamplingParams` that are not the defaults."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    priority: int = 0
    cache_salt: str | None = None


class Abort(msgspec.Struct, tag=True):
    """End requests in any state; nothing more is told of them."""

    request_ids: list[str]


class AskFrames(msgspec.Struct, tag=True):
    """Ask for `Frames`: those after an `epoch`'s last ones, with their tokens or without."""

    epoch: int
    tokens: bool


class Stop(msgspec.Struct, tag=True):
    """End the process, whatever runs."""


class Ready(msgspec.Struct, tag=True):
    """The engine is made, and so it is.

    Attributes:
        folder: Of the checkpoint.
        vocab_size: Every token id is below it.
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Most sequences in a step.
        block_size, num_blocks: Of the pool, the null block included.
    """

    folder: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int


class Died(msgspec.Struct, tag=True):
    """The engine could not be made, or failed; nothing follows. `reason` is for the log."""

    reason: str


class Refused(msgspec.Struct, tag=True):
    """A request was not acceptable (`is_fault`: it was, but taking it in failed)."""

    request_id: str
    message: str
    is_fault: bool = False


class Turn(msgspec.Struct, tag=True):
    """The loop went round.

    Attributes:
        number: How often so far.
        news: What requests grew by since the last turn that was told of; of a long prompt the
            log-probabilities come in parts.
        stats: Now and then.
    """

    number: int
    news: list[RequestDelta]
    stats: EngineStats | None = None


class Frames(msgspec.Struct, tag=True):
    """What the paged memory did since the last question; see `camera.py`.

    Attributes:
        epoch: When the camera began: with another one than before, the first frame shows all.
        frames: As `picture.encode` makes them.
        stats: As `Engine.stats()` gives them, now.
        failed: Whether the camera failed since, and said why in the log.
    """

    epoch: int
    frames: list[dict[str, Any]]
    stats: EngineStats
    failed: bool = False


Command = Start | Add | Abort | AskFrames | Stop
Report = Ready | Died | Refused | Turn | Frames

_encoder = msgspec.msgpack.Encoder()
_command_decoder = msgspec.msgpack.Decoder(Command)
_report_decoder = msgspec.msgpack.Decoder(Report)


def frame_of(message: Command | Report) -> bytes:
    """The message as it travels."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def command_of(body: bytes) -> Command:
    """The command in a frame's body; msgspec.ValidationError if there is none."""
    return _command_decoder.decode(body)


def report_of(body: bytes) -> Report:
    """The report in a frame's body; msgspec.ValidationError if there is none."""
    return _report_decoder.decode(body)
