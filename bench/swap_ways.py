"""The ways that JAX offers to bring gathered blocks to the host and back (`bench.swap`)."""

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
    """One way to bring chunks to the host and back; this one is the engine's."""

    name = "device_put"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        self.gather: Callable = jax.jit(gather_blocks_step)
        self.scatter: Callable = jax.jit(scatter_blocks_step, donate_argnums=0)
        self.device = jax.local_devices()[0]
        self.pinned = SingleDeviceSharding(self.device, memory_kind="pinned_host")

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        """Start the way out of one chunk."""
        return to_host(self.gather(state, ids))

    def settle(self, image: Any) -> Any:
        """Wait for a chunk to be on the host."""
        return jax.block_until_ready(image)

    def back(self, state: KVState, ids: np.ndarray, image: Any) -> KVState:
        """Start the way back of one chunk."""
        return self.scatter(state, ids, to_device(image))[0]


class OutShardings(Way):
    """The gather's own result lies on the host; the scatter takes it from there."""

    name = "out_shardings"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        super().__init__(state, sizes)
        self.gather = jax.jit(gather_blocks_step, out_shardings=self.pinned)

        def scatter(state, ids, image):
            return scatter_blocks_step(state, ids, jax.device_put(image, jax.memory.Space.Device))

        self.scatter = jax.jit(scatter, donate_argnums=0)

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        return self.gather(state, ids)

    def back(self, state: KVState, ids: np.ndarray, image: Any) -> KVState:
        return self.scatter(state, ids, image)[0]


class Reused(Way):
    """The host array of an earlier transfer is donated to the next one."""

    name = "donated host array"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        super().__init__(state, sizes)
        self.spare: dict[int, list[Any]] = {}

        def gather(state, ids, spare):
            del spare  # its memory is what is wanted
            return gather_blocks_step(state, ids)

        self.gather = jax.jit(gather, donate_argnums=2, keep_unused=True, out_shardings=self.pinned)

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        spares = self.spare.setdefault(len(ids), [])
        if not spares:
            spares.append(to_host(gather_blocks_step(state, jnp.asarray(ids))))
        return self.gather(state, ids, spares.pop())

    def back(self, state: KVState, ids: np.ndarray, image: Any) -> KVState:
        state = super().back(state, ids, image)
        self.spare.setdefault(len(ids), []).append(image)
        return state


class Numpy(Way):
    """`copy_to_host_async` to memory that is not pinned."""

    name = "copy_to_host_async"

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        image = self.gather(state, ids)
        image.copy_to_host_async()
        return image

    def settle(self, image: Any) -> Any:
        return np.asarray(image)

    def back(self, state: KVState, ids: np.ndarray, image: Any) -> KVState:
        return self.scatter(state, ids, jax.device_put(image, self.device))[0]


class Plain(Way):
    """An array that is gathered already, to pinned memory and back: the transfer alone."""

    name = "device_put, transfer alone"

    def __init__(self, state: KVState, sizes: Sequence[int]):
        super().__init__(state, sizes)
        self.gathered = {
            size: gather_blocks_step(state, jnp.zeros(size, jnp.int32)) for size in sizes
        }

    def out(self, state: KVState, ids: np.ndarray) -> Any:
        return to_host(self.gathered[len(ids)])

    def back(self, state: KVState, ids: np.ndarray, image: Any) -> KVState:
        jax.block_until_ready(to_device(image))
        return state


WAYS = (Plain, Way, OutShardings, Reused, Numpy)  # the first of them pins the memory
