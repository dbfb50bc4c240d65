"""What the server takes on, at most."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Bounds on what clients may send and ask, and for how long.

    Attributes:
        max_body_bytes: Of a request's body.
        max_body_values: JSON values in a body; strings, fractions, arrays and objects count as
            four. A prompt of the model's longest context may always be given as token ids.
        max_total_body_bytes: Of the bodies of all requests that are not over.
        max_header_bytes: Of a request's line and headers.
        max_num_queued_reqs: Sequences that may wait for a place in the batch.
        max_num_client_reqs: Requests that one client (an API key, or an address where there is no
            key) may have at a time; None for no bound of its own.
        max_prompts: Prompts in a request.
        max_n: Answers to a prompt, `best_of` and beams too.
        max_connections: Open connections, as far as the system permits as many files.
        body_timeout: Seconds for a body to arrive, from the end of its headers.
        queue_timeout: Seconds until the first token.
        request_timeout: Seconds for a request in all.
        stall_timeout: Seconds that a client may leave an answer unread.
        text_timeout: Seconds for a text to be tokenised, or for a conversation to be written out by
            its template and tokenised.
        health_timeout: Seconds without a turn of the loop after which it counts as dead.
    """

    max_body_bytes: int = 8 * MIB
    max_body_values: int = 256 * 1024
    max_total_body_bytes: int = 1024 * MIB
    max_header_bytes: int = 32 * 1024
    max_num_queued_reqs: int = 1024
    max_num_client_reqs: int | None = None
    max_prompts: int = 256
    max_n: int = 64
    max_connections: int = 4096
    body_timeout: float = 30.0
    queue_timeout: float = 600.0
    request_timeout: float = 3600.0
    stall_timeout: float = 60.0
    text_timeout: float = 10.0
    health_timeout: float = 30.0
