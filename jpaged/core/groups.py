"""Common prefixes, forks and beam-search steps of a request's group of sequences.

The first sequence of a group computes the tokens that all sequences have in common. The other
sequences then fork from the first and share its blocks. The common prefix of a new request is the
prompt without its last token. After a preemption, the common prefix may include output tokens.
"""

import numpy as np

from jpaged.core.beam import Continuation
from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import IntegrityError
from jpaged.core.plan import RowFork
from jpaged.core.request import FinishReason, NoTokenError, Request, RequestStatus, Sequence
from jpaged.core.sequence_table import SequenceTable


def set_common_prefix(request: Request) -> None:
    """Set the number of prefix tokens that the first sequence of a waiting group computes for all
    sequences of the group.

    The common prefix never includes the last token of a sequence, which is needed for sampling. A
    swapped-out group keeps the old number, because its swap entry holds the computed tokens.
    """
    if request.status is RequestStatus.SWAPPED:
        return
    request.num_common_prefix_tokens = 0
    if len(request.live_sequences) > 1:
        shortest = min(len(sequence.token_ids) for sequence in request.live_sequences)
        request.num_common_prefix_tokens = min(
            common_prefix_length(request.live_sequences), shortest - 1
        )


def common_prefix_length(sequences: list[Sequence]) -> int:
    """Return the length of the longest common prefix of the sequences' tokens."""
    token_lists = [sequence.token_ids for sequence in sequences]
    # In lexicographic order, all other lists lie between the minimum and the maximum. So the common
    # prefix of these two is the common prefix of all lists.
    low, high = min(token_lists), max(token_lists)
    pairs = zip(low, high, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(low), len(high)))


def num_tokens_to_recompute(request: Request) -> int:
    """Return the number of tokens to compute again if the group's blocks are freed."""
    computed = [sequence.num_computed_tokens for sequence in request.live_sequences]
    shared = (
        min(common_prefix_length(request.live_sequences), *computed) if len(computed) > 1 else 0
    )
    return shared + sum(count - shared for count in computed)


def fork_sequences(manager: BlockManager, request: Request) -> list[RowFork]:
    """Fork the group's other sequences once the first sequence has computed the common prefix.

    Returns:
        The forks, as (parent, child); empty if the common prefix is not computed yet.
    """
    first, *others = request.live_sequences
    if first.num_computed_tokens < request.num_common_prefix_tokens:
        return []
    request.num_common_prefix_tokens = 0
    first.num_admitted_tokens = first.num_computed_tokens
    for child in others:
        _fork_blocks(manager, first, child)
    return [(first, child) for child in others]


def pending_work(request: Request, token_budget: int) -> list[tuple[Sequence, int]]:
    """Return pairs (sequence, number of tokens to compute).

    The pairs have at most `token_budget` tokens in total.
    """
    if request.num_common_prefix_tokens:
        first = request.live_sequences[0]
        return [
            (first, min(request.num_common_prefix_tokens - first.num_computed_tokens, token_budget))
        ]
    work = []
    for sequence in request.live_sequences:
        known = len(sequence.token_ids)
        # Pending tokens will be sampled by steps in flight. For a normal request, the next step can
        # compute their KV before the host has read them. A beam, in contrast, gets its next token
        # only after the host has read the candidates of all beams.
        if request.beam is None:
            known += sequence.num_pending_tokens
            if known >= request.max_num_tokens:
                continue  # a step in flight samples the last token of the sequence
        num_tokens = min(known - sequence.num_computed_tokens, token_budget)
        if num_tokens:
            work.append((sequence, num_tokens))
            token_budget -= num_tokens
    return work


def is_decoding(request: Request) -> bool:
    """Return whether each live sequence has at most one token left to compute."""
    return all(s.num_tokens - s.num_computed_tokens <= 1 for s in request.live_sequences)


def is_beam_ready(beam: Sequence) -> bool:
    """Return whether the beam has next-token candidates and is not part of a step in flight."""
    return beam.candidates is not None and not beam.num_in_flight_steps


def advance_beam_search(
    manager: BlockManager, sequences: SequenceTable, request: Request
) -> FinishReason | None:
    """Take one step of the request's beam search. All beams must be ready (`is_beam_ready`).

    Returns:
        Finish reason of the best answer if the search is over, otherwise None.

    Raises:
        NoTokenError: The search is over without an answer.
    """
    beams, search = request.live_sequences, request.beam
    if search is None:
        raise IntegrityError(f"request {request.request_id!r} is not a beam search")
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
    """Replace the beams of a request by `continuations`.

    A beam's sequence is reused for the beam's first continuation. Every further continuation of the
    same beam gets a fork of the sequence.
    """
    parents, continued_parents = request.live_sequences, set[int]()
    forks: list[RowFork] = []
    beams = []
    for parent_index, _, _ in continuations:
        parent = beam = parents[parent_index]
        if parent_index in continued_parents:
            beam = _make_child(parent)
            # Add the new beam to the table of sequences before it gets blocks. If the fork of the
            # blocks fails, the scheduler can still free the blocks of the beam.
            sequences.add(beam)
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
    """Return a copy of `parent` without its device blocks. `_fork_blocks` adds blocks later."""
    return Sequence(
        next(parent.request.seq_id_counter),
        list(parent.token_ids),
        parent.num_prompt_tokens,
        parent.request,
        seed=parent.seed,
        cache_salt=parent.cache_salt,
        first_scored_position=parent.first_scored_position,
        num_cached_tokens=parent.num_cached_tokens,
        host_block_table=list(parent.host_block_table),
    )


def _fork_blocks(manager: BlockManager, parent: Sequence, child: Sequence) -> None:
    manager.fork(parent, child)
    child.num_computed_tokens = parent.num_computed_tokens
    child.num_admitted_tokens = parent.num_admitted_tokens
