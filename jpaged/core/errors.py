"""Errors that mean the host side's own books are wrong, not its input."""


class IntegrityError(RuntimeError):
    """The account of blocks, sequences or requests does not add up: a bug, never bad input."""


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; callers ask `can_allocate`/`can_append` first."""


def require(holds: bool, message: str) -> None:
    """Raise IntegrityError with `message` unless `holds`."""
    if not holds:
        raise IntegrityError(message)
