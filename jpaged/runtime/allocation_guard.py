"""Keep a step's large buffers at fixed addresses by reserving fragments for small buffers.

XLA runs a step as one CUDA graph. Before a launch, XLA updates every graph node that has a buffer
whose address has changed since the last launch. If logits and temporaries have moved, the update
takes 0.43 to 0.53 ms of host time for 250 nodes (H200).

Buffers move because the allocator serves small and large requests from the same free memory. The
small buffers at the start of that memory have varying lifetimes. A step's packed inputs are freed
by a callback, some time after their transfer to the device. Sampled tokens are freed one turn of
the engine loop later, when the host has read them. The number of small buffers in use therefore
varies, and a large buffer that is allocated after them gets a different address.

XLA's allocator (`BFCAllocator`, `tsl/framework/bfc_allocator.cc`) takes the smallest free piece
that fits, and the lowest address among equal pieces. The allocator splits a piece that is at least
twice as large as the request, and merges a freed piece with its free neighbours.

A *fragment* is a free piece between two buffers that stay in use, and has a power of two as its
size. The allocator gives a whole fragment to any request of more than half its size. When the
request's buffer is freed, the fragment has the same size as before. As long as enough fragments are
free, small buffers stay out of the large free memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

FRAGMENT_SIZES = tuple(256 << k for k in range(9))
"""Fragment sizes in bytes: from the allocator's smallest piece to 64 KiB, which holds the packed
inputs of a decode step of 960 rows."""

BUFFERS_PER_SIZE = 25
"""Number of buffers allocated for each fragment size. Every second buffer is freed and leaves a
fragment. If all buffers are adjacent, that makes 12 fragments; if some buffers fill holes between
the weights, there are fewer. A step of few rows allocates 4 buffers of 256 bytes. Its result
buffers are still in use when the next step allocates its buffers."""


def buffer_sizes() -> list[int]:
    """Return the size in bytes of each buffer that `reserve_fragments` allocates, in allocation
    order.

    Buffers of equal size are allocated directly after one another. The first buffers of a size may
    fill gaps between other arrays. When no gap is large enough, the remaining buffers of the size
    are allocated at adjacent addresses.
    """
    return [size for size in FRAGMENT_SIZES for _ in range(BUFFERS_PER_SIZE)]


def select_buffers_to_free(buffers: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Return the indices of the buffers to free, so that each freed buffer becomes a separate
    fragment.

    Args:
        buffers: Address and size in bytes of each buffer. All buffers are in use.

    Returns:
        Indices of the buffers to free. Each of these buffers lies directly between two buffers that
        are not freed.
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
    """Reserve small fragments of free memory on each device.

    The function allocates small buffers, and frees every second buffer. Each freed buffer leaves a
    fragment: a gap between two buffers that stay in use.

    Call this function after the persistent arrays are allocated. The function uploads 3.3 MB to
    each device in one call and compiles nothing.

    Args:
        devices: Devices to reserve fragments on; None is the default device.

    Returns:
        The buffers that stay in use, as uint8 arrays. The fragments exist as long as the caller
        holds these arrays.
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
