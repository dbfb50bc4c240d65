"""When a sequence is done."""

from jpaged.core.request import FinishReason, Request, Sequence


def finish_reason_of(request: Request, sequence: Sequence, token_id: int) -> FinishReason | None:
    """Why `sequence`, whose newest token the host read as `token_id`, is done; None if it is not.

    A stop token wins over a length reached with the same token.
    """
    stop = request.stop
    if token_id in stop.stop_token_ids and sequence.num_output_tokens >= stop.min_tokens:
        return FinishReason.STOP
    if len(sequence.token_ids) >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None
