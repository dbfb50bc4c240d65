"""The messages between the HTTP process and the engine's process, in MessagePack.

Nothing is pickled.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from jpaged import EngineStats, PoolChanges, RequestDelta, SamplingParams
from jpaged.errors import ErrorInfo


class StartEngine(msgspec.Struct, tag=True):
    """Make the engine: `Engine(**options)`. The first message of all."""

    options: dict[str, Any]


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """A tokenised prompt, and what to do with it: both processes know a request as this.

    Attributes:
        request_id: Its name.
        prompt_token_ids: The prompt.
        params: How tokens are chosen.
        priority: Lower numbers are served first, where the engine heeds them.
        cache_salt: Its blocks are shared with requests of the same salt only.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class AbortRequests(msgspec.Struct, tag=True):
    """End requests in any state; nothing more is told of them."""

    request_ids: list[str]


class FetchPoolDiffs(msgspec.Struct, tag=True):
    """Ask for the `PoolDiffs` since the last question, and for a `snapshot` if one is needed; with
    `tokens` they tell what blocks hold."""

    snapshot: bool
    tokens: bool


class StopEngine(msgspec.Struct, tag=True):
    """End the process, whatever runs."""


class EngineInfo(msgspec.Struct, tag=True):
    """The engine is made. This is what the server needs to know of it.

    Attributes:
        folder: The checkpoint's.
        vocab_size: Every token id is below it.
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Most sequences in a step.
        block_size, num_blocks: The pool's, the null block included.
        cache_dtype: What the pool was asked to be kept in, as `kv_cache_dtype` says it.
    """

    folder: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    cache_dtype: str


class EngineFailed(msgspec.Struct, tag=True):
    """The engine could not be made, or failed; nothing follows. `reason` is for the log."""

    reason: str


class RequestRefused(msgspec.Struct, tag=True):
    """The engine refuses a request."""

    request_id: str
    error: ErrorInfo


class EngineUpdate(msgspec.Struct, tag=True):
    """A turn of the loop.

    Attributes:
        news: What requests grew by since the last `EngineUpdate`; the log-probabilities of a long prompt
            come in parts.
        stats: The engine's figures, sent a few times a second.
    """

    deltas: list[RequestDelta]
    stats: EngineStats | None = None


class PoolDiff(msgspec.Struct):
    """What changed in the pool between two looks, in this process and as JSON for the page.

    Attributes:
        step: Steps the engine took so far.
        changes: What changed.
        text: For viewers in place of `changes.tokens`: by block id, the text of each token.
    """

    step: int
    changes: PoolChanges
    text: dict[int, list[str]] = {}


class PoolDiffs(msgspec.Struct, tag=True):
    """What changed in the pool since the last question, for the dashboard.

    Attributes:
        epoch: Number of the sampler's start; frames before it were lost.
        frames: One after the other.
        stats: As `Engine.stats()` gives them, now.
        snapshot: The frame that leads from nothing to the state after `diffs`; the first ones of
            an epoch have it.
        failed: Whether the sampler failed since, and said why in the log.
    """

    epoch: int
    diffs: list[PoolDiff]
    stats: EngineStats
    snapshot: PoolDiff | None = None
    failed: bool = False


Command = StartEngine | EngineRequest | AbortRequests | FetchPoolDiffs | StopEngine
Report = EngineInfo | EngineFailed | RequestRefused | EngineUpdate | PoolDiffs

encode: Callable[[Command | Report], bytes] = msgspec.msgpack.Encoder().encode
"""The message in MessagePack."""

decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
"""The command in a message; msgspec.ValidationError if there is none."""

decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
"""The report in a message; msgspec.ValidationError if there is none."""
