"""The scheduler's limits, and who is refused because of them."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from jpaged.core.block_manager import BlockManager
from jpaged.core.request import Request, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    `max_num_seqs` sequences run at once, `max_num_batched_tokens` tokens are computed a step, and
    prompt and outputs together stay within `max_model_len` tokens. Without chunked prefill a step
    computes a prompt whole or not at all.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold a prompt of "
                f"max_model_len={self.max_model_len} tokens at once: raise it, or set "
                "enable_chunked_prefill=True"
            )


def max_num_tokens(config: SchedulerConfig, request: Request) -> int:
    """Tokens that a sequence of the request reaches at most, the prompt counted."""
    prompt = request.sequences[0].num_prompt_tokens
    return min(prompt + request.stop.max_tokens, config.max_model_len)


def check_new(
    request: Request, is_unfinished: Callable[[str], bool], seq_ids: Container[int]
) -> None:
    """Raise ValueError if one of the request's ids is in use."""
    if is_unfinished(request.request_id):
        raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
    for sequence in request.sequences:
        if sequence.seq_id in seq_ids:
            raise ValueError(f"seq_id {sequence.seq_id} is in use by another sequence")


def check_fits(config: SchedulerConfig, manager: BlockManager, request: Request) -> None:
    """Raise ValueError unless the request, alone in the pool, can run to its end."""
    if len(request.sequences) != 1:
        raise ValueError(f"a request must have one sequence, got {len(request.sequences)}")
    _check_prompt(config, request)
    sequence = request.sequences[0]
    needed = _num_needed_blocks(manager, sequence, max_num_tokens(config, request))
    pinned = manager.pins.num_blocks
    usable = manager.pool.num_usable_blocks - pinned
    if needed > usable:
        beside = f" beside {pinned} pinned ones" if pinned else ""
        raise ValueError(
            f"request {request.request_id!r} may need {needed} blocks "
            f"({sequence.num_prompt_tokens} prompt tokens, "
            f"max_tokens={request.stop.max_tokens}) and the pool has {usable}{beside}: "
            f"raise num_blocks{', unpin a prefix' if pinned else ''} or lower max_tokens"
        )


def check_pin_fits(
    manager: BlockManager, num_new_blocks: int, unfinished: Iterable[Request]
) -> None:
    """Raise ValueError unless each unfinished request could still run to its end, alone, beside
    `num_new_blocks` more pinned ones; what it may share with these is not counted on."""
    left = manager.pool.num_usable_blocks - manager.pins.num_blocks - num_new_blocks
    if left < 0:
        raise ValueError(
            f"pinning {num_new_blocks} blocks leaves the pool {-left} short: "
            "raise num_blocks, or unpin another prefix"
        )
    for request in unfinished:
        needed = _num_needed_blocks(manager, request.sequences[0], request.max_num_tokens)
        if needed > left:
            raise ValueError(
                f"pinning {num_new_blocks} blocks leaves {left}, and request "
                f"{request.request_id!r} may need {needed}: wait for its end, or raise num_blocks"
            )


def _num_needed_blocks(manager: BlockManager, sequence: Sequence, max_num_tokens: int) -> int:
    """Blocks that a sequence which reaches `max_num_tokens` needs beside the pinned ones: the last
    token is never fed back, so it needs no slot, and a pinned prefix is there already."""
    return manager.num_blocks_for(max_num_tokens - 1) - manager.num_shared_with_pins(sequence)


def _check_prompt(config: SchedulerConfig, request: Request) -> None:
    prompt, limit = request.sequences[0].num_prompt_tokens, config.max_model_len
    if prompt < 1:
        raise ValueError(f"prompt_token_ids of request {request.request_id!r} is empty")
    if prompt + 1 > limit:
        raise ValueError(
            f"the prompt of request {request.request_id!r} has {prompt} tokens, and "
            f"max_model_len={limit} leaves no room for an output token: shorten the prompt or "
            "raise max_model_len"
        )
