"""Launch parameters of the peer-memory all-reduce, and the limits within which it runs.

The functions depend only on values that are known when a program is compiled.
docs/kernels/all_reduce.md lists measured times.
"""

import math
from dataclasses import dataclass

# Each device sends its whole payload to every other device. The maximum size of a payload is
# therefore this number of bytes divided by the number of devices. For larger payloads, XLA's
# collectives are faster, because they send only a part of the payload to each device.
MAX_EXCHANGED_BYTES = 4 * 2**20
CHUNK_BYTES = 16  # A thread loads `CHUNK_BYTES` bytes at a time.
MAX_PROGRAMS = 128  # All programs must run concurrently, and most GPUs have at least 128 SMs.
MAX_WARP_GROUPS = 4
# A thread has at most `MAX_LOADS` loads in flight.
MAX_LOADS = 8
# `device_sum_norm` has one program per row, so the maximum number of rows is `MAX_PROGRAMS`.
MAX_NORM_ROWS = 128
# A row of `device_sum_norm` has at most `MAX_NORM_WIDTH` columns, two chunks per thread.
MAX_NORM_WIDTH = 8192


@dataclass(frozen=True)
class AllReduceConfig:
    """Launch parameters of `device_sum` in hopper.py.

    Attributes:
        num_programs: Number of programs.
        num_warp_groups: Warpgroups per program.
        num_chunks: Chunks of 16 bytes that a thread handles together.
    """

    num_programs: int
    num_warp_groups: int
    num_chunks: int


def max_payload_bytes(num_devices: int) -> int:
    """Return the maximum size in bytes of a payload that goes through peer memory."""
    return MAX_EXCHANGED_BYTES // num_devices


def all_reduce_config(*, num_bytes: int, num_devices: int) -> AllReduceConfig:
    """Return the launch parameters of `device_sum` for a payload of `num_bytes`.

    Each chunk of 16 bytes gets a thread, up to the maximum number of threads.
    """
    chunks = num_bytes // CHUNK_BYTES
    num_programs = min(MAX_PROGRAMS, math.ceil(chunks / 128))
    num_warp_groups = min(MAX_WARP_GROUPS, math.ceil(chunks / (num_programs * 128)))
    chunks_per_thread = math.ceil(chunks / (num_programs * num_warp_groups * 128))
    num_chunks = max(1, min(chunks_per_thread, MAX_LOADS // num_devices))
    return AllReduceConfig(num_programs, num_warp_groups, num_chunks)


def norm_warp_groups(width: int) -> int:
    """Return the number of warpgroups per program of `device_sum_norm`, for rows of `width`."""
    return min(MAX_WARP_GROUPS, math.ceil(2 * width / (CHUNK_BYTES * 128)))


def can_fuse_norm(*, num_rows: int, width: int) -> bool:
    """Return whether `device_sum_norm` can run as one kernel launch for rows of this size."""
    return num_rows <= MAX_NORM_ROWS and width <= MAX_NORM_WIDTH
