"""Places for small short-lived buffers, so that a step's large ones stay where they were.

XLA runs a step as one CUDA graph, and before a launch it writes anew every node of the graph that
has a buffer which is not where it was at the launch before: 0.43 to 0.53 ms of the host for 250
nodes (H200) if logits and temporaries have moved. They do: the allocator cuts small and large from
the same rest of free memory, and the small ones at its beginning live now shorter, now longer. A
step's packed inputs go when a callback of their copy runs, its tokens a turn later, when the host
has read them. What comes behind them is now here, now there.

The allocator takes the smallest free piece that fits, of equal ones the one at the lowest address;
it splits a piece at least twice as large as wanted, and joins a piece set free with its free
neighbours. So a piece of a power of two between two that stay in use, a *place*, serves every size
above its half whole, and is itself again afterwards. While there are enough of them no small buffer
touches the rest. (XLA's `BFCAllocator`, `tsl/framework/bfc_allocator.cc`.)
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

FRAGMENT_SIZES = tuple(256 << k for k in range(9))
"""Bytes of places: from the least that the allocator gives to 64 KiB, the packed inputs of a decode
step of 960 rows."""

BUFFERS_PER_SIZE = 25
"""Pieces of each size; every second one becomes a place: 12 where all are neighbours, fewer where
holes that the weights left take some. A step of few rows has 4 buffers of 256 bytes, and
its results stay while the next ones are made."""


def buffer_sizes() -> list[int]:
    """Sizes in bytes of all buffers from which places are made, in the order to allocate them.

    Equal ones come together: memory too small for one is too small for all of its row, so holes do
    not part them from each other.
    """
    return [size for size in FRAGMENT_SIZES for _ in range(BUFFERS_PER_SIZE)]


def select_buffers_to_free(buffers: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Which of some buffers to set free, so that each leaves a piece of free memory of its own.

    Args:
        buffers: Address and bytes of each, all in use.

    Returns:
        Indices of buffers with a neighbour before and one behind that stay; no two adjoin.
    """
    order = sorted(range(len(buffers)), key=lambda i: buffers[i])
    fragments: set[int] = set()
    for before, middle, behind in zip(order, order[1:], order[2:], strict=False):
        inside = _are_adjacent(buffers[before], buffers[middle]) and _are_adjacent(
            buffers[middle], buffers[behind]
        )
        if inside and before not in fragments:
            fragments.add(middle)
    return frozenset(fragments)


def reserve_fragments(devices: Sequence[Any]) -> list[jax.Array]:
    """Make the places on devices (None: the default one), where the arrays that stay must be.

    Uploads 3.3 MB to each in one call and compiles nothing: some milliseconds.

    Returns:
        The guards: uint8 arrays between the places, which are there as long as these are held.
    """
    guards: list[jax.Array] = []
    for device in devices:
        arrays = jax.device_put([np.zeros(size, np.uint8) for size in buffer_sizes()], device)
        jax.block_until_ready(arrays)
        fragments = select_buffers_to_free(
            [(array.unsafe_buffer_pointer(), array.nbytes) for array in arrays]
        )
        guards += [array for i, array in enumerate(arrays) if i not in fragments]
    return guards


def _are_adjacent(first: tuple[int, int], second: tuple[int, int]) -> bool:
    address, size = first
    return address + size == second[0]
