"""Errors that mean the host side's own books are wrong, not its input."""


class IntegrityError(RuntimeError):
    """The account of blocks, sequences or requests does not add up: a bug, never bad input."""


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; callers count them first."""


class NoTokenError(ArithmeticError):
    """No token could be sampled for a request that has so many output tokens."""

    def __init__(self, num_output_tokens: int):
        super().__init__(
            f"no token can be sampled after {num_output_tokens} output tokens: the model's logits "
            "are NaN or infinite, or the sampling parameters forbid every token"
        )


def require(holds: bool, message: str) -> None:
    """Raise IntegrityError with `message` unless `holds`."""
    if not holds:
        raise IntegrityError(message)
