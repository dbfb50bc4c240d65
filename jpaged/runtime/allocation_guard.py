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

SIZES = tuple(256 << k for k in range(9))
"""Bytes of places: from the least that the allocator gives to 64 KiB, the packed inputs of a decode
step of 960 rows."""

IN_A_ROW = 25
"""Pieces of each size; every second one becomes a place: 12 where all are neighbours, fewer where
holes that the weights left take some. A step of few rows has 4 buffers of 256 bytes, and
its results stay while the next ones are made."""


def pieces() -> list[int]:
    """Sizes in bytes of all buffers from which places are made, in the order to allocate them.

    Equal ones come together: memory too small for one is too small for all of its row, so holes do
    not part them from each other.
    """
    return [size for size in SIZES for _ in range(IN_A_ROW)]


def find_places(buffers: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Which of some buffers to set free, so that each leaves a piece of free memory of its own.

    Args:
        buffers: Address and bytes of each, all in use.

    Returns:
        Indices of buffers with a neighbour before and one behind that stay; no two adjoin.
    """
    order = sorted(range(len(buffers)), key=lambda i: buffers[i])
    places: set[int] = set()
    for before, own, behind in zip(order, order[1:], order[2:], strict=False):
        inside = _adjoin(buffers[before], buffers[own]) and _adjoin(buffers[own], buffers[behind])
        if inside and before not in places:
            places.add(own)
    return frozenset(places)


def make_places(devices: Sequence[Any]) -> list[jax.Array]:
    """Make the places on devices (None: the default one), where the arrays that stay must be.

    Uploads 3.3 MB to each in one call and compiles nothing: some milliseconds.

    Returns:
        The guards: uint8 arrays between the places, which are there as long as these are held.
    """
    guards: list[jax.Array] = []
    for device in devices:
        arrays = jax.device_put([np.zeros(size, np.uint8) for size in pieces()], device)
        jax.block_until_ready(arrays)
        places = find_places([(array.unsafe_buffer_pointer(), array.nbytes) for array in arrays])
        guards += [array for i, array in enumerate(arrays) if i not in places]
    return guards


def _adjoin(first: tuple[int, int], second: tuple[int, int]) -> bool:
    address, size = first
    return address + size == second[0]
