"""Methods that JAX offers to swap gathered blocks to the host and back (`bench.swap`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.swap import (
    gather_blocks_step,
    scatter_blocks_step,
    to_device,
    to_host,
)


class Way:
    """A technique to swap chunks of blocks to the host and back. This base class swaps as the
    engine does."""

    name = "device_put"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        self.gather: Callable = jax.jit(gather_blocks_step)
        self.scatter: Callable = jax.jit(scatter_blocks_step, donate_argnums=0)
        self.device = jax.local_devices()[0]
        self.pinned = SingleDeviceSharding(self.device, memory_kind="pinned_host")

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        """Start to copy the blocks `ids` to host memory. Return the copy, a swap entry."""
        return to_host(self.gather(state, ids))

    def settle(self, entry: Any) -> Any:
        """Wait until `entry`, the copy that `out` started, is complete. Return the copy."""
        return jax.block_until_ready(entry)

    def back(self, state: KVState, ids: np.ndarray, entry: Any) -> KVState:
        """Start to copy the swap entry `entry` into the blocks `ids`. Return the new KV state."""
        return self.scatter(state, ids, to_device(entry))[0]


class OutShardings(Way):
    """Swap with programs that access host memory: the gather writes its result to the host, and the
    scatter reads it from there."""

    name = "out_shardings"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        super().__init__(state, sizes)
        self.gather = jax.jit(gather_blocks_step, out_shardings=self.pinned)

        def scatter(state, ids, entry):
            return scatter_blocks_step(state, ids, jax.device_put(entry, jax.memory.Space.Device))

        self.scatter = jax.jit(scatter, donate_argnums=0)

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        return self.gather(state, ids)

    def back(self, state: KVState, ids: np.ndarray, entry: Any) -> KVState:
        return self.scatter(state, ids, entry)[0]


class Reused(Way):
    """Swap like `OutShardings`, but reuse host memory.

    The gather gets the host array of an earlier transfer as a donated argument, and writes its
    result there.
    """

    name = "donated host array"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        super().__init__(state, sizes)
        self.spare: dict[int, list[Any]] = {}

        def gather(state, ids, spare):
            del spare  # Only the memory of `spare` is used: XLA writes the result there.
            return gather_blocks_step(state, ids)

        self.gather = jax.jit(gather, donate_argnums=2, keep_unused=True, out_shardings=self.pinned)

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        spares = self.spare.setdefault(len(ids), [])
        if not spares:
            spares.append(to_host(gather_blocks_step(state, jnp.asarray(ids))))
        return self.gather(state, ids, spares.pop())

    def back(self, state: KVState, ids: np.ndarray, entry: Any) -> KVState:
        state = super().back(state, ids, entry)
        self.spare.setdefault(len(ids), []).append(entry)
        return state


class Numpy(Way):
    """Swap with `copy_to_host_async`, which copies the gathered blocks to a NumPy array in host
    memory that is not pinned."""

    name = "copy_to_host_async"

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        entry = self.gather(state, ids)
        entry.copy_to_host_async()
        return entry

    def settle(self, entry: Any) -> Any:
        return np.asarray(entry)

    def back(self, state: KVState, ids: np.ndarray, entry: Any) -> KVState:
        return self.scatter(state, ids, jax.device_put(entry, self.device))[0]


class Plain(Way):
    """A swap without gather and scatter, to time only the transfer.

    The constructor gathers blocks into an array. Each swap copies this array to pinned host memory
    and back to the device.
    """

    name = "device_put, transfer alone"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        super().__init__(state, sizes)
        self.gathered = {
            size: gather_blocks_step(state, jnp.zeros(size, jnp.int32)) for size in sizes
        }

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        return to_host(self.gathered[len(ids)])

    def back(self, state: KVState, ids: np.ndarray, entry: Any) -> KVState:
        jax.block_until_ready(to_device(entry))
        return state


# `Plain` comes first, because the first transfer of a size also pins the host memory.
WAYS = (Plain, Way, OutShardings, Reused, Numpy)
