"""Blocks in host memory: out and back in few large transfers, while steps run.

    out  pool ──gather──► one array on the device ──transfer──► pinned host memory
    in   pinned host memory ──transfer──► one array on the device ──scatter──► pool

Gather and scatter are programs, so the order of launch decides what they see; the transfers between
them run while steps run. Programs have static shapes, so an image is a list of *chunks* whose
sizes are powers of two. The host waits for no transfer, unless more than `MAX_STAGED_CHUNKS` would
lie on the device at once: the memory account has room for these.
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
"""A larger transfer is no faster."""

MIN_CHUNK_BLOCKS, MAX_CHUNK_BLOCKS = 8, 1024

MAX_STAGED_CHUNKS = 4
"""Chunks on the device, between pool and host, at once."""


def gather_blocks_step(state: KVState, block_ids: Int32[Array, "C"]) -> Shaped[Array, "A C S K H"]:
    """Return blocks of all A arrays of the pool (K and V by layer), as one array."""
    return jnp.stack([array[block_ids] for array in jax.tree.leaves(state.pool)])


def scatter_blocks_step(
    state: KVState, block_ids: Int32[Array, "C"], blocks: Shaped[Array, "A C S K H"]
) -> tuple[KVState, Int32[Array, ""]]:
    """Write gathered blocks to `block_ids` (donate the state); ids past the pool are dropped.

    The ids differ from each other, so that no two writes meet. The number that comes back with the
    state is there to be waited for: the state itself goes on to the next step.
    """
    arrays, tree = jax.tree.flatten(state.pool)
    written = [
        array.at[block_ids].set(blocks[i], mode="drop", unique_indices=True)
        for i, array in enumerate(arrays)
    ]
    return state._replace(pool=jax.tree.unflatten(tree, written)), block_ids[0]


def chunk_sizes(pool: Any, num_host_blocks: int) -> tuple[int, ...]:
    """The blocks of a chunk, ascending powers of two; none where nothing can be swapped out.

    Args:
        pool: The pool's arrays, or their shapes.
        num_host_blocks: Most blocks in host memory.
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
    """Bytes of one block in all arrays of the pool, on each device."""
    return per_device_bytes(pool) // jax.tree.leaves(pool)[0].shape[0]


def staging_bytes(pool: Any, num_host_blocks: int) -> int:
    """Device memory that swapping takes at most: the staged chunks and one that is being made."""
    sizes = chunk_sizes(pool, num_host_blocks)
    return (MAX_STAGED_CHUNKS + 1) * max(sizes, default=0) * pool_block_bytes(pool)


def split_into_chunks(num_blocks: int, sizes: Collection[int]) -> Iterator[int]:
    """Chunk sizes that hold so many blocks: few, and the last at most a quarter empty.

    Where the rest is smaller than the smallest chunk, that one may be emptier.
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
    """Start a transfer to memory of the host that the device copies to and from by itself; the
    array that comes back is ready when it has arrived."""
    return jax.device_put(blocks, blocks.sharding.with_memory_kind("pinned_host"))


def to_device(blocks: jax.Array) -> jax.Array:
    """Start a transfer back to the device."""
    return jax.device_put(blocks, blocks.sharding.with_memory_kind("device"))


LaunchFunction = Callable[..., dict[str, Any]]
"""Launches a program by its kind, key and inputs, and returns its results by their names."""


class SwapChunk(NamedTuple):
    """Entries of an image from `first` on, in host memory: [A, size, S, K, H]."""

    first: int
    size: int
    blocks: jax.Array


class IncomingChunk(NamedTuple):
    """A chunk on its way back, and where its blocks go."""

    block_ids: np.ndarray
    blocks: jax.Array
    is_staged: bool
    """Whether its transfer has begun: `blocks` are on the device then."""


class SwapEntries:
    """Images of swapped-out blocks by their ids, and the chunks between device and host.

    Methods are given the runner's `launch`: a reference to the runner would be a cycle.

    Args:
        pool: The pool's arrays, or their shapes.
        num_host_blocks: Most blocks in host memory; 0 where nothing is swapped.
        wait: Waits until arrays are computed.
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
        """Forget an image; its memory is free once its transfer is done."""
        del self._swap_entries[swap_entry_id]

    def swap_out(self, launch: LaunchFunction, swap: SwapOut) -> None:
        """Copy blocks as they are at this point of the launch order to a new image.

        Raises:
            ValueError: swapping is off (the engine has no host blocks), or the image exists.
        """
        if not self._chunk_sizes or swap.swap_entry_id in self._swap_entries:
            reason = "exists" if self._chunk_sizes else "has no place: num_host_blocks is 0"
            raise ValueError(f"image {swap.swap_entry_id} {reason}")
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
        """Start bringing images back, as far as there is room without waiting; they are dropped."""
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
        """Write fetched blocks to their places in the pool, at this point of the launch order; of
        `incoming_chunks` nothing is left, so that no chunk stays on the device."""
        while incoming_chunks:
            ids, blocks, is_staged = incoming_chunks.popleft()
            if not is_staged:
                self._wait_for_room()
                blocks = to_device(blocks)
            beyond = np.arange(self._num_blocks, self._num_blocks + len(ids), dtype=np.int32)
            ids = np.where(ids < 0, beyond, ids)
            scattered = launch("scatter_blocks", len(ids), block_ids=ids, blocks=blocks)
            self._transfers.append(scattered["done"])

    def wait(self) -> None:
        """Wait until nothing is on its way."""
        self._wait(list(self._transfers))
        self._transfers.clear()

    def warm_up(self, launch: LaunchFunction) -> None:
        """Run every program and transfer twice on the null block, and pin the host's memory.

        Pinning runs at a tenth of a transfer's speed, and JAX keeps what it once pinned: an image
        that fills the space once leaves it to all later ones.

        Raises:
            ValueError: the host has no memory for so many blocks.
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
            message = f"no {size:.1f} GiB of host memory can be pinned for blocks: lower swap_space"
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
    """The chunks of an image that hold wanted entries, with the places of these; -1 elsewhere."""
    for chunk in chunks:
        ids = np.full(chunk.size, -1, np.int32)
        for index, block_id in swap.copies:
            if chunk.first <= index < chunk.first + chunk.size:
                ids[index - chunk.first] = block_id
        if (ids >= 0).any():
            yield chunk, ids
