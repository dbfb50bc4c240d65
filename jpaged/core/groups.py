"""What a request's sequences do as a group: compute what they share once, then go their own ways.

A group's *stem* is what all its sequences begin with: the prompt of samples, and after a preemption
of beams also the outputs they have in common. One sequence computes it, the others fork from there
and share its blocks. A fresh request and one that is computed again are the same case.
"""

import numpy as np

from jpaged.core.beam import Continuation
from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import IntegrityError
from jpaged.core.plan import RowFork
from jpaged.core.request import FinishReason, NoTokenError, Request, RequestStatus, Sequence
from jpaged.core.sequence_table import SequenceTable


def set_common_prefix(request: Request) -> None:
    """Settle how much of a waiting group's tokens its first sequence computes for all: what they
    have in common, and of the shortest all but one, which it needs to sample from. The stem of one
    that was swapped out stays: its image has it."""
    if request.status is RequestStatus.SWAPPED:
        return
    request.num_common_prefix_tokens = 0
    if len(request.live_sequences) > 1:
        shortest = min(len(sequence.token_ids) for sequence in request.live_sequences)
        request.num_common_prefix_tokens = min(
            common_prefix_length(request.live_sequences), shortest - 1
        )


def common_prefix_length(sequences: list[Sequence]) -> int:
    """Length of the longest beginning that all sequences share."""
    token_lists = [sequence.token_ids for sequence in sequences]
    low, high = min(token_lists), max(token_lists)  # all others lie between
    pairs = zip(low, high, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(low), len(high)))


def num_tokens_to_recompute(request: Request) -> int:
    """Tokens whose KV is computed again if the group loses its blocks."""
    computed = [sequence.num_computed_tokens for sequence in request.live_sequences]
    shared = (
        min(common_prefix_length(request.live_sequences), *computed) if len(computed) > 1 else 0
    )
    return shared + sum(count - shared for count in computed)


def fork_sequences(manager: BlockManager, request: Request) -> list[RowFork]:
    """Once the stem is computed, let the other sequences fork from the first."""
    first, *others = request.live_sequences
    if first.num_computed_tokens < request.num_common_prefix_tokens:
        return []
    request.num_common_prefix_tokens = 0
    first.num_admitted_tokens = first.num_computed_tokens
    for child in others:
        _fork_blocks(manager, first, child)
    return [(first, child) for child in others]


def pending_work(request: Request, token_budget: int) -> list[tuple[Sequence, int]]:
    """The sequences that have something to compute, and how many tokens of a step's budget."""
    if request.num_common_prefix_tokens:
        first = request.live_sequences[0]
        return [
            (first, min(request.num_common_prefix_tokens - first.num_computed_tokens, token_budget))
        ]
    work = []
    for sequence in request.live_sequences:
        known = len(sequence.token_ids)
        if request.beam is None:  # the token that a step samples is the sequence's next one
            known += sequence.num_pending_tokens
            if known >= request.max_num_tokens:
                continue  # complete once its pending token is read
        num_tokens = min(known - sequence.num_computed_tokens, token_budget)
        if num_tokens:
            work.append((sequence, num_tokens))
            token_budget -= num_tokens
    return work


def is_decoding(request: Request) -> bool:
    """Whether each sequence of a running request has at most one token left to compute."""
    return all(s.num_tokens - s.num_computed_tokens <= 1 for s in request.live_sequences)


def is_beam_ready(beam: Sequence) -> bool:
    """Whether a beam's next tokens are known and no step in flight holds it."""
    return beam.candidates is not None and not beam.num_in_flight_steps


def advance_beam_search(
    manager: BlockManager, sequences: SequenceTable, request: Request
) -> FinishReason | None:
    """Take a step of the request's beam search; all its beams must be ready.

    Returns why its best answer ended if the search is over, NoTokenError if it then has none.
    """
    beams, search = request.live_sequences, request.beam
    if search is None:
        raise IntegrityError(f"request {request.request_id!r} is no beam search")
    columns = zip(*(beam.candidates for beam in beams if beam.candidates is not None), strict=True)
    token_ids, logprobs = (np.stack(column) for column in columns)
    continuations = search.advance(
        [beam.output_token_ids for beam in beams],
        [beam.score for beam in beams],
        token_ids,
        logprobs,
        max_tokens=request.max_num_tokens - beams[0].num_prompt_tokens,
    )
    if continuations:
        _continue_beams(manager, sequences, request, continuations)
        return None
    if not search.hypotheses:
        raise NoTokenError(request.sequences[0].num_output_tokens)
    return FinishReason.STOP if search.hypotheses[0].is_ended else FinishReason.LENGTH


def _continue_beams(
    manager: BlockManager,
    sequences: SequenceTable,
    request: Request,
    continuations: list[Continuation],
) -> None:
    """Make the continuations the request's beams, forking where a parent has several.

    A parent goes on as its first continuation, so that only the others cost a row and a reference.
    """
    parents, continued_parents = request.live_sequences, set[int]()
    forks: list[RowFork] = []
    beams = []
    for parent_index, _, _ in continuations:
        parent = beam = parents[parent_index]
        if parent_index in continued_parents:
            beam = _make_child(parent)
            sequences.add(beam)  # before it holds anything: what fails in between loses no block
            _fork_blocks(manager, parent, beam)
            forks.append((parent, beam))
        continued_parents.add(parent_index)
        beams.append(beam)
    for beam, (_, token_id, score) in zip(beams, continuations, strict=True):
        beam.token_ids.append(token_id)
        beam.score, beam.candidates = score, None
    request.live_sequences, request.sequences = beams, list(beams)
    sequences.fork_rows(forks)
    for index in range(len(parents)):
        if index not in continued_parents:
            sequences.retire(parents[index])


def _make_child(parent: Sequence) -> Sequence:
    """A sequence like its parent, to which `_fork_blocks` gives the blocks."""
    return Sequence(
        next(parent.request.seq_id_counter),
        list(parent.token_ids),
        parent.num_prompt_tokens,
        parent.request,
        seed=parent.seed,
        cache_salt=parent.cache_salt,
        reads_prefix_cache=parent.reads_prefix_cache,
        num_cached_tokens=parent.num_cached_tokens,
        host_block_table=list(parent.host_block_table),
    )


def _fork_blocks(manager: BlockManager, parent: Sequence, child: Sequence) -> None:
    manager.fork(parent, child)
    child.num_computed_tokens = parent.num_computed_tokens
    child.num_admitted_tokens = parent.num_admitted_tokens
