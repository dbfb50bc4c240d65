"""Messages between the HTTP process and the engine process, encoded as MessagePack."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from jpaged import EngineStats, PoolChanges, RequestDelta, SamplingParams
from jpaged.errors import ErrorInfo


class StartEngine(msgspec.Struct, tag=True):
    """First command to the process: create `Engine(**options)`."""

    options: dict[str, Any]


class EngineRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Command to generate answers to a tokenized prompt.

    Attributes:
        request_id: Id of the request in both processes.
        prompt_token_ids: Token ids of the prompt.
        params: Sampling parameters.
        priority: With scheduling policy "priority", requests with lower numbers are served first.
        cache_salt: Only requests with the same salt share blocks of the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


class AbortRequests(msgspec.Struct, tag=True):
    """Command to abort requests in any state. The engine then sends no more of their updates."""

    request_ids: list[str]


class FetchPoolDiffs(msgspec.Struct, tag=True):
    """Command to report the changes of the KV block pool since the last fetch, as `PoolDiffs`.

    Attributes:
        snapshot: Whether to send the state of the whole pool too.
        tokens: Whether the next snapshot and all later diffs contain the tokens of blocks.
    """

    snapshot: bool
    tokens: bool


class ControlEngine(msgspec.Struct, frozen=True, tag=True):
    """Command to pause the engine, to let it sleep, or to update its weights.

    Attributes:
        control_id: Id of the `ControlResult`.
        action: Name of a method of `Engine`; "state" only returns the state.
        arguments: Keyword arguments of the method.
    """

    control_id: int
    action: Literal["pause", "resume", "sleep", "wake_up", "update_weights", "state"]
    arguments: dict[str, Any] = {}


class StopEngine(msgspec.Struct, tag=True):
    """Command to stop the process and abort all requests."""


class EngineInfo(msgspec.Struct, tag=True):
    """Report that the engine has started, with the facts that the server needs.

    Attributes:
        folder: Path of the tokenizer's folder.
        vocab_size: Size of the vocabulary; all token ids are smaller.
        max_model_len: Maximum number of tokens in a sequence.
        max_num_seqs: Maximum number of sequences in a step.
        block_size: Number of tokens in a block.
        num_blocks: Number of blocks in the pool, including the null block.
        cache_dtype: Value of the option `kv_cache_dtype`.
    """

    folder: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    cache_dtype: str


class EngineFailed(msgspec.Struct, tag=True):
    """Report that the engine could not be started, or has failed. No other report follows.

    Attributes:
        reason: Cause of the failure, for the log.
    """

    reason: str


class RequestRefused(msgspec.Struct, tag=True):
    """Report that the engine refused a request, and why."""

    request_id: str
    error: ErrorInfo


class ControlResult(msgspec.Struct, frozen=True, tag=True):
    """Report that a `ControlEngine` was carried out or refused, with the state of the engine.

    Attributes:
        control_id: Id of the command.
        is_paused, is_sleeping, weights_version: See `Engine`.
        error: Why the command was refused; None if it was carried out.
    """

    control_id: int
    is_paused: bool
    is_sleeping: bool
    weights_version: int
    error: ErrorInfo | None = None


class EngineUpdate(msgspec.Struct, tag=True):
    """Report of the tokens that the engine has generated since the last `EngineUpdate`.

    Attributes:
        deltas: New tokens of each request. The log-probabilities of a long prompt are spread over
            several reports.
        stats: Statistics of the engine. Only a few reports per second contain statistics.
    """

    deltas: list[RequestDelta]
    stats: EngineStats | None = None


class PoolDiff(msgspec.Struct):
    """Changes of the KV block pool between two samples, which the dashboard gets as JSON.

    Attributes:
        step: Number of engine steps before the second sample.
        changes: The changes.
        text: Texts of the tokens in each block, by block id. Viewers get this field instead of
            `changes.tokens`.
    """

    step: int
    changes: PoolChanges
    text: dict[int, list[str]] = {}


class PoolDiffs(msgspec.Struct, tag=True):
    """Report of the changes of the KV block pool since the last fetch, for the dashboard.

    Attributes:
        epoch: Number of times that recording of the changes has started. Recording stops when no
            report is fetched for some seconds. Changes are lost until recording starts again.
        diffs: Changes since the last report, in order of time.
        stats: Current statistics of the engine.
        snapshot: State of the whole pool after `diffs`, written as the changes from an empty pool.
            The first report of an epoch has a snapshot. Other reports may have None.
        failed: Whether recording has failed since the last report. The log has the cause.
    """

    epoch: int
    diffs: list[PoolDiff]
    stats: EngineStats
    snapshot: PoolDiff | None = None
    failed: bool = False


Command = StartEngine | EngineRequest | AbortRequests | FetchPoolDiffs | ControlEngine | StopEngine
Report = EngineInfo | EngineFailed | RequestRefused | EngineUpdate | PoolDiffs | ControlResult

encode: Callable[[Command | Report], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a message as MessagePack."""

decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
"""Decode a command. Raise msgspec.ValidationError if the message is not a command."""

decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
"""Decode a report. Raise msgspec.ValidationError if the message is not a report."""
