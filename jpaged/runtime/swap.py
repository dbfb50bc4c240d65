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
from jpaged.models.sharding import mesh_of, own_bytes
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
    return own_bytes(pool) // jax.tree.leaves(pool)[0].shape[0]


def staging_bytes(pool: Any, num_host_blocks: int) -> int:
    """Device memory that swapping takes at most: the staged chunks and one that is being made."""
    sizes = chunk_sizes(pool, num_host_blocks)
    return (MAX_STAGED_CHUNKS + 1) * max(sizes, default=0) * pool_block_bytes(pool)


def cut(num_blocks: int, sizes: Collection[int]) -> Iterator[int]:
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


Launch = Callable[..., dict[str, Any]]
"""Launches a program by its kind, key and inputs, and returns its results by their names."""


class Chunk(NamedTuple):
    """Entries of an image from `first` on, in host memory: [A, size, S, K, H]."""

    first: int
    size: int
    blocks: jax.Array


class Arrival(NamedTuple):
    """A chunk on its way back, and where its blocks go."""

    block_ids: np.ndarray
    blocks: jax.Array
    is_staged: bool
    """Whether its transfer has begun: `blocks` are on the device then."""


class BlockImages:
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
        mesh = mesh_of(pool)
        self._sizes, self._num_host_blocks = chunk_sizes(pool, num_host_blocks), num_host_blocks
        self._host_bytes = num_host_blocks * pool_block_bytes(pool) * (mesh.size if mesh else 1)
        self._num_blocks, self._wait = pool[0].k.shape[0], wait
        self._images: dict[int, list[Chunk]] = {}
        self._moving: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._images)

    def drop(self, image_id: int) -> None:
        """Forget an image; its memory is free once its transfer is done."""
        del self._images[image_id]

    def swap_out(self, launch: Launch, order: SwapOut) -> None:
        """Copy blocks as they are at this point of the launch order to a new image.

        Raises:
            ValueError: swapping is off (the engine has no host blocks), or the image exists.
        """
        if not self._sizes or order.image_id in self._images:
            reason = "exists" if self._sizes else "has no place: num_host_blocks is 0"
            raise ValueError(f"image {order.image_id} {reason}")
        chunks, first = [], 0
        for size in cut(len(order.block_ids), self._sizes):
            ids = np.zeros(size, np.int32)
            part = order.block_ids[first : first + size]
            ids[: len(part)] = part
            self._make_room()
            blocks = to_host(launch("gather_blocks", size, block_ids=ids)["blocks"])
            self._moving.append(blocks)
            chunks.append(Chunk(first, size, blocks))
            first += size
        self._images[order.image_id] = chunks

    def fetch(self, orders: Iterable[SwapIn]) -> deque[Arrival]:
        """Start bringing images back, as far as there is room without waiting; they are dropped."""
        self._forget_arrived()
        room, arrivals = MAX_STAGED_CHUNKS - len(self._moving), deque[Arrival]()
        for order in orders:
            for chunk, ids in _wanted(self._images.pop(order.image_id), order):
                is_staged = len(arrivals) < room
                blocks = to_device(chunk.blocks) if is_staged else chunk.blocks
                arrivals.append(Arrival(ids, blocks, is_staged))
        return arrivals

    def place(self, launch: Launch, arrivals: deque[Arrival]) -> None:
        """Write fetched blocks to their places in the pool, at this point of the launch order; of
        `arrivals` nothing is left, so that no chunk stays on the device."""
        while arrivals:
            ids, blocks, is_staged = arrivals.popleft()
            if not is_staged:
                self._make_room()
                blocks = to_device(blocks)
            beyond = np.arange(self._num_blocks, self._num_blocks + len(ids), dtype=np.int32)
            ids = np.where(ids < 0, beyond, ids)
            scattered = launch("scatter_blocks", len(ids), block_ids=ids, blocks=blocks)
            self._moving.append(scattered["done"])

    def wait(self) -> None:
        """Wait until nothing is on its way."""
        self._wait(list(self._moving))
        self._moving.clear()

    def warm_up(self, launch: Launch) -> None:
        """Run every program and transfer twice on the null block, and pin the host's memory.

        Pinning runs at a tenth of a transfer's speed, and JAX keeps what it once pinned: an image
        that fills the space once leaves it to all later ones.

        Raises:
            ValueError: the host has no memory for so many blocks.
        """
        if not self._sizes:
            return
        for size in self._sizes * 2:
            self.swap_out(launch, SwapOut(-1, (0,) * size))
            self.place(launch, self.fetch([SwapIn(-1, ((0, 0),))]))
        try:
            self.swap_out(launch, SwapOut(-1, (0,) * self._num_host_blocks))
            self.wait()
        except jax.errors.JaxRuntimeError as error:
            size = self._host_bytes / 2**30
            message = f"no {size:.1f} GiB of host memory can be pinned for blocks: lower swap_space"
            raise ValueError(message) from error
        self.drop(-1)

    def _make_room(self) -> None:
        self._forget_arrived()
        while len(self._moving) >= MAX_STAGED_CHUNKS:
            self._wait(self._moving.popleft())

    def _forget_arrived(self) -> None:
        while self._moving and self._moving[0].is_ready():
            self._moving.popleft()


def _wanted(chunks: list[Chunk], order: SwapIn) -> Iterator[tuple[Chunk, np.ndarray]]:
    """The chunks of an image that hold wanted entries, with the places of these; -1 elsewhere."""
    for chunk in chunks:
        ids = np.full(chunk.size, -1, np.int32)
        for entry, block_id in order.places:
            if chunk.first <= entry < chunk.first + chunk.size:
                ids[entry - chunk.first] = block_id
        if (ids >= 0).any():
            yield chunk, ids
