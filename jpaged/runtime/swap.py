"""Swap blocks out to host memory and back, by few large transfers that run while steps run.

    out  pool ──gather──► one array on the device ──transfer──► pinned host memory
    in   pinned host memory ──transfer──► one array on the device ──scatter──► pool

Gather and scatter are programs, so the launch order determines which values they read and
overwrite. The transfers run while steps run. The blocks of one swap-out form a swap entry. Programs
have static shapes, so a swap entry is a list of *chunks*. The number of blocks in a chunk is a
power of two. The host waits for a transfer only if more than `MAX_STAGED_CHUNKS` chunks would be on
the device. The memory budget has room for `MAX_STAGED_CHUNKS` chunks.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped

from jpaged.core.plan import SwapIn, SwapOut
from jpaged.models.sharding import per_device_bytes, tree_mesh
from jpaged.runtime.kv_cache import KVState
from pallas_kernels import LayerKV

MAX_CHUNK_BYTES = 256 * 2**20
"""Maximum size of a chunk in bytes. Larger transfers are no faster."""

MIN_CHUNK_BLOCKS, MAX_CHUNK_BLOCKS = 8, 1024

MAX_STAGED_CHUNKS = 4
"""Maximum number of chunks on the device, on their way between pool and host memory."""


def gather_blocks_step(state: KVState, block_ids: Int32[Array, "C"]) -> Shaped[Array, "A C S K H"]:
    """Return the blocks `block_ids` as one array, from all A arrays of the pool (K and V per
    layer)."""
    return jnp.stack([array[block_ids] for array in jax.tree.leaves(state.pool)])


def scatter_blocks_step(
    state: KVState, block_ids: Int32[Array, "C"], blocks: Shaped[Array, "A C S K H"]
) -> tuple[KVState, Int32[Array, ""]]:
    """Write gathered blocks to the blocks `block_ids` of the pool. Donate the state.

    The step skips ids past the end of the pool. All ids must differ, so that no block is written
    twice.

    Returns:
        The new state, and a scalar that the host can wait for. The host cannot wait for the state
        itself, because the next step reuses its memory.
    """
    arrays, tree = jax.tree.flatten(state.pool)
    written = [
        array.at[block_ids].set(blocks[i], mode="drop", unique_indices=True)
        for i, array in enumerate(arrays)
    ]
    return state._replace(pool=jax.tree.unflatten(tree, written)), block_ids[0]


def chunk_sizes(pool: Any, num_host_blocks: int) -> tuple[int, ...]:
    """Return the numbers of blocks that chunks can have: ascending powers of two, or () without
    swapping.

    Args:
        pool: Arrays of the pool, or their shapes.
        num_host_blocks: Maximum number of blocks in host memory; 0 disables swapping.
    """
    if not num_host_blocks:
        return ()
    sizes, per_block = [MIN_CHUNK_BLOCKS], pool_block_bytes(pool)
    while (
        sizes[-1] < min(num_host_blocks, MAX_CHUNK_BLOCKS)
        and 2 * sizes[-1] * per_block <= MAX_CHUNK_BYTES
    ):
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def pool_block_bytes(pool: Any) -> int:
    """Return the number of bytes that one block takes on each device, in all arrays of the pool
    together."""
    return per_device_bytes(pool) // jax.tree.leaves(pool)[0].shape[0]


def staging_bytes(pool: Any, num_host_blocks: int) -> int:
    """Return the maximum device memory that swapping takes, in bytes: `MAX_STAGED_CHUNKS` chunks in
    transfer, and one chunk that is being gathered."""
    sizes = chunk_sizes(pool, num_host_blocks)
    return (MAX_STAGED_CHUNKS + 1) * max(sizes, default=0) * pool_block_bytes(pool)


def split_into_chunks(num_blocks: int, sizes: Collection[int]) -> Iterator[int]:
    """Split `num_blocks` blocks into few chunks, and yield the size of each chunk.

    Every chunk has one of the given sizes. At most a quarter of the last chunk is unused, unless
    the chunk has the smallest of these sizes.
    """
    smallest, largest = min(sizes), max(sizes)
    while num_blocks > 0:
        above = smallest
        while above < min(num_blocks, largest):
            above *= 2
        fits = above == smallest or 4 * num_blocks >= 3 * above
        size = above if fits else above // 2
        yield size
        num_blocks -= size


def to_host(blocks: jax.Array) -> jax.Array:
    """Start a transfer to pinned host memory. The returned array is ready after the transfer."""
    return jax.device_put(blocks, blocks.sharding.with_memory_kind("pinned_host"))


def to_device(blocks: jax.Array) -> jax.Array:
    """Start a transfer from host memory to the device."""
    return jax.device_put(blocks, blocks.sharding.with_memory_kind("device"))


LaunchFunction = Callable[..., dict[str, Any]]
"""Function that launches a program by its step name, key and inputs, and returns the results by
name."""


class SwapChunk(NamedTuple):
    """Part of a swap entry in host memory: `size` blocks, beginning with the entry's block
    `first`.
    """

    first: int
    size: int
    blocks: jax.Array  # [A, size, S, K, H]


class IncomingChunk(NamedTuple):
    """A chunk to swap in.

    `block_ids` has one element per block of the chunk: the id of the pool block to write, or -1 to
    skip the block.
    """

    block_ids: np.ndarray
    blocks: jax.Array
    is_staged: bool
    """Whether the transfer has started. If so, `blocks` is an array on the device."""


class SwapEntries:
    """Store of swapped-out KV blocks in host memory, and the transfers to and from the store.

    One swap-out creates one swap entry. A swap entry stores its blocks in chunks. A chunk is one
    array and one transfer.

    The methods take the runner's `launch` as an argument, because storing the runner would form a
    reference cycle.

    Args:
        pool: Arrays of the pool, or their shapes.
        num_host_blocks: Maximum number of blocks in host memory; 0 disables swapping.
        wait: Function that waits until arrays are computed.
    """

    def __init__(
        self,
        pool: tuple[LayerKV, ...],
        num_host_blocks: int,
        wait: Callable[[Any], Any] = jax.block_until_ready,
    ):
        mesh = tree_mesh(pool)
        self._chunk_sizes, self._num_host_blocks = (
            chunk_sizes(pool, num_host_blocks),
            num_host_blocks,
        )
        self._host_bytes = num_host_blocks * pool_block_bytes(pool) * (mesh.size if mesh else 1)
        self._num_blocks, self._wait = pool[0].k.shape[0], wait
        self._swap_entries: dict[int, list[SwapChunk]] = {}
        self._transfers: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._swap_entries)

    def drop(self, swap_entry_id: int) -> None:
        """Remove a swap entry. The host memory is freed when the entry's transfer has ended."""
        del self._swap_entries[swap_entry_id]

    def swap_out(self, launch: LaunchFunction, swap: SwapOut) -> None:
        """Launch a copy of blocks to a new swap entry. The copy has the contents that the blocks
        have after all programs that were launched earlier.

        Raises:
            ValueError: Swapping is disabled (`num_host_blocks` is 0), or the swap entry exists
                already.
        """
        if not self._chunk_sizes or swap.swap_entry_id in self._swap_entries:
            reason = (
                "exists already: drop it first"
                if self._chunk_sizes
                else "cannot be made: num_host_blocks is 0, so swapping is disabled"
            )
            raise ValueError(f"swap entry {swap.swap_entry_id} {reason}")
        chunks, first = [], 0
        for size in split_into_chunks(len(swap.block_ids), self._chunk_sizes):
            ids = np.zeros(size, np.int32)
            part = swap.block_ids[first : first + size]
            ids[: len(part)] = part
            self._wait_for_room()
            blocks = to_host(launch("gather_blocks", size, block_ids=ids)["blocks"])
            self._transfers.append(blocks)
            chunks.append(SwapChunk(first, size, blocks))
            first += size
        self._swap_entries[swap.swap_entry_id] = chunks

    def start_swap_ins(self, swap_ins: Iterable[SwapIn]) -> deque[IncomingChunk]:
        """Remove swap entries, and return the chunks that must be copied back to the pool.

        Start as many transfers to the device as `MAX_STAGED_CHUNKS` allows, without waiting for
        earlier transfers. `finish_swap_ins` transfers the remaining chunks.
        """
        self._drop_finished_transfers()
        room, incoming_chunks = MAX_STAGED_CHUNKS - len(self._transfers), deque[IncomingChunk]()
        for swap in swap_ins:
            for chunk, ids in _select_chunks(self._swap_entries.pop(swap.swap_entry_id), swap):
                is_staged = len(incoming_chunks) < room
                blocks = to_device(chunk.blocks) if is_staged else chunk.blocks
                incoming_chunks.append(IncomingChunk(ids, blocks, is_staged))
        return incoming_chunks

    def finish_swap_ins(
        self, launch: LaunchFunction, incoming_chunks: deque[IncomingChunk]
    ) -> None:
        """Launch the programs that write swapped-in blocks to the pool.

        The method removes every chunk from `incoming_chunks`. The memory of a chunk's temporary
        array on the device is then freed as soon as the blocks are written.
        """
        while incoming_chunks:
            ids, blocks, is_staged = incoming_chunks.popleft()
            if not is_staged:
                self._wait_for_room()
                blocks = to_device(blocks)
            # An id of -1 marks a block to skip. Replace each -1 by a different id past the end of
            # the pool: the scatter skips ids past the end, and requires unique ids.
            beyond = np.arange(self._num_blocks, self._num_blocks + len(ids), dtype=np.int32)
            ids = np.where(ids < 0, beyond, ids)
            scattered = launch("scatter_blocks", len(ids), block_ids=ids, blocks=blocks)
            self._transfers.append(scattered["done"])

    def wait(self) -> None:
        """Wait until all transfers have ended."""
        self._wait(list(self._transfers))
        self._transfers.clear()

    def warm_up(self, launch: LaunchFunction) -> None:
        """Warm up swapping: run all programs and transfers, and pin the host memory.

        First, swap a chunk of each size out and in, twice. The chunks hold copies of the null
        block.

        Then, create a swap entry that fills the whole swap space, and drop the swap entry. JAX
        keeps the host memory that it has pinned, so later swap-outs reuse the memory. Without the
        warm-up, swap-outs would pin memory, at a tenth of the speed of a transfer.

        Raises:
            ValueError: The host memory for `num_host_blocks` blocks cannot be pinned.
        """
        if not self._chunk_sizes:
            return
        for size in self._chunk_sizes * 2:
            self.swap_out(launch, SwapOut(-1, (0,) * size))
            self.finish_swap_ins(launch, self.start_swap_ins([SwapIn(-1, ((0, 0),))]))
        try:
            self.swap_out(launch, SwapOut(-1, (0,) * self._num_host_blocks))
            self.wait()
        except jax.errors.JaxRuntimeError as error:
            size = self._host_bytes / 2**30
            message = f"cannot pin {size:.1f} GiB of host memory for swapping: lower swap_space"
            raise ValueError(message) from error
        self.drop(-1)

    def _wait_for_room(self) -> None:
        self._drop_finished_transfers()
        while len(self._transfers) >= MAX_STAGED_CHUNKS:
            self._wait(self._transfers.popleft())

    def _drop_finished_transfers(self) -> None:
        while self._transfers and self._transfers[0].is_ready():
            self._transfers.popleft()


def _select_chunks(chunks: list[SwapChunk], swap: SwapIn) -> Iterator[tuple[SwapChunk, np.ndarray]]:
    """Yield the chunks from which blocks are copied to the pool, as pairs (chunk, block ids).

    The array of block ids has one element per block of the chunk: the id of the pool block to
    write, or -1 to skip the chunk's block.

    Args:
        chunks: All chunks of a swap entry.
        swap: Blocks to copy from the swap entry.
    """
    for chunk in chunks:
        ids = np.full(chunk.size, -1, np.int32)
        for index, block_id in swap.copies:
            if chunk.first <= index < chunk.first + chunk.size:
                ids[index - chunk.first] = block_id
        if (ids >= 0).any():
            yield chunk, ids
