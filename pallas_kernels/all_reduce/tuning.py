"""Which all-reduces run through peer memory, and with which launch parameters.

They see static facts only. Times on two H200s: docs/kernels/all_reduce.md.
"""

import math
from dataclasses import dataclass

# Each device sends its whole payload to every other one, so with more of them less is sent so:
# 2 MiB from each of two. Beyond, XLA's collectives, which send each device its part, are faster.
MAX_EXCHANGED_BYTES = 4 * 2**20
CHUNK_BYTES = 16  # what a thread loads at once
MAX_PROGRAMS = 128  # most GPUs have as many SMs, and so run all at once
MAX_WARP_GROUPS = 4
MAX_LOADS = 8  # of a thread, under way at once
MAX_NORM_ROWS = 128  # a program each, as above
MAX_NORM_WIDTH = 8192  # two chunks a thread


@dataclass(frozen=True)
class AllReduceConfig:
    """Of hopper.py: programs, warpgroups of each, chunks that a thread takes at once."""

    num_programs: int
    num_warp_groups: int
    num_chunks: int


def max_payload_bytes(num_devices: int) -> int:
    """The largest payload that goes through peer memory."""
    return MAX_EXCHANGED_BYTES // num_devices


def all_reduce_config(*, num_bytes: int, num_devices: int) -> AllReduceConfig:
    """For a payload of whole chunks: a thread for each while there are threads."""
    chunks = num_bytes // CHUNK_BYTES
    num_programs = min(MAX_PROGRAMS, math.ceil(chunks / 128))
    num_warp_groups = min(MAX_WARP_GROUPS, math.ceil(chunks / (num_programs * 128)))
    chunks_per_thread = math.ceil(chunks / (num_programs * num_warp_groups * 128))
    num_chunks = max(1, min(chunks_per_thread, MAX_LOADS // num_devices))
    return AllReduceConfig(num_programs, num_warp_groups, num_chunks)


def norm_warp_groups(width: int) -> int:
    """Of a program that has a row of so many numbers."""
    return min(MAX_WARP_GROUPS, math.ceil(2 * width / (CHUNK_BYTES * 128)))


def can_fuse_norm(*, num_rows: int, width: int) -> bool:
    """Whether a sum, the residual sum and the norm behind it are one launch."""
    return num_rows <= MAX_NORM_ROWS and width <= MAX_NORM_WIDTH
