"""The scheduler's limits, and who is refused because of them."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from jpaged.core.block_manager import BlockManager
from jpaged.core.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    `max_num_seqs` sequences run at once, `max_num_batched_tokens` tokens are computed a step, and
    prompt and outputs together stay within `max_model_len` tokens. `by_priority`, requests are
    served in the order of their priorities; if not, in that of their arrival.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    by_priority: bool = False

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def max_num_tokens(config: SchedulerConfig, request: Request) -> int:
    """Tokens that a sequence of the request reaches at most, the prompt counted."""
    prompt = request.sequences[0].num_prompt_tokens
    return min(prompt + request.stop.max_tokens, config.max_model_len)


def check_new(
    config: SchedulerConfig,
    request: Request,
    is_unfinished: Callable[[str], bool],
    seq_ids: Container[int],
) -> None:
    """Raise ValueError if one of the request's ids is in use, or it has a priority for nothing."""
    if is_unfinished(request.request_id):
        raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request")
    for sequence in request.sequences:
        if sequence.seq_id in seq_ids:
            raise ValueError(f"seq_id {sequence.seq_id} is in use by another sequence")
    if request.priority and not config.by_priority:
        raise ValueError(
            f"priority={request.priority} of request {request.request_id!r} has no effect: make "
            "the engine with scheduling_policy='priority', or leave it at 0"
        )


def fits_surely(config: SchedulerConfig, manager: BlockManager, prompt_lens: Iterable[int]) -> bool:
    """Whether `check_fits` would refuse no request of one sequence with any of these prompts,
    however many tokens it may answer with: the longest sequence there can be fits."""
    num_usable = manager.pool.num_usable_blocks - manager.pins.num_blocks
    return (
        all(1 <= prompt_len < config.max_model_len for prompt_len in prompt_lens)
        and manager.num_blocks_for(config.max_model_len - 1) <= num_usable
    )


def check_fits(config: SchedulerConfig, manager: BlockManager, request: Request) -> None:
    """Raise ValueError unless the request, alone in the pool, can run to its end."""
    _check_prompt(config, request)
    seats, limit = request.num_seats, config.max_num_seqs
    if seats > limit:
        raise ValueError(
            f"request {request.request_id!r} runs {seats} sequences and max_num_seqs={limit}: "
            "lower n, best_of or beam_width, or raise max_num_seqs"
        )
    needed = _num_needed_blocks(manager, request, max_num_tokens(config, request))
    pinned = manager.pins.num_blocks
    usable = manager.pool.num_usable_blocks - pinned
    if needed > usable:
        beside = f" beside {pinned} pinned ones" if pinned else ""
        several = f", {seats} sequences" if seats > 1 else ""
        raise ValueError(
            f"request {request.request_id!r} may need {needed} blocks "
            f"({request.sequences[0].num_prompt_tokens} prompt tokens, "
            f"max_tokens={request.stop.max_tokens}{several}) and the pool has {usable}{beside}: "
            f"raise num_blocks{', unpin a prefix' if pinned else ''} or lower max_tokens"
            f"{', n or beam_width' if several else ''}"
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
        needed = _num_needed_blocks(manager, request, request.max_num_tokens)
        if needed > left:
            raise ValueError(
                f"pinning {num_new_blocks} blocks leaves {left}, and request "
                f"{request.request_id!r} may need {needed}: wait for its end, or raise num_blocks"
            )


def _num_needed_blocks(manager: BlockManager, request: Request, max_num_tokens: int) -> int:
    """Blocks that the request needs at most beside the pinned ones.

    The last token of a sequence is never fed back, so it needs no slot. The sequences of a group
    share the prompt's full blocks, whatever befalls them (samples compute its last token each), and
    a pinned prefix is there already.
    """
    first = request.live[0]
    each = manager.num_blocks_for(max_num_tokens - 1)
    pinned = manager.num_shared_with_pins(first)
    if request.num_seats == 1:
        return each - pinned
    stem = (first.num_prompt_tokens - (request.beam is None)) // manager.block_size
    return each + (request.num_seats - 1) * (each - stem) - min(pinned, stem)


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
