"""Launch parameters of writes and copies in the KV pool."""

import dataclasses

from pallas_kernels import tuning
from pallas_kernels.tuning import power_of_two


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """Of a write or a copy: elements a program moves, warps."""

    chunk: int = 2048
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Of a write after rotation: rows (heads of tokens; a power of two) a program, warps."""

    tile_rows: int
    num_warps: int = 4


def move_config(op: str, *, head_size: int, itemsize: int, device_kind: str = "") -> MoveConfig:
    """For `op`, "write" or "copy": 2,048 elements a program keep any GPU's memory busy."""
    return tuning.tuned(op, head_size, itemsize, device_kind, MoveConfig())


def rope_config(*, head_size: int, itemsize: int, device_kind: str = "") -> RopeConfig:
    """Whole heads of 1,024 elements in all: eight a thread, a 16-byte load in bfloat16."""
    config = RopeConfig(max(1, 1024 // power_of_two(head_size)))
    return tuning.tuned("rope_write", head_size, itemsize, device_kind, config)
