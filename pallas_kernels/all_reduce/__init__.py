"""All-reduce: sum an array over tensor-parallel devices, optionally followed by RMSNorm.

`device_sum` and `device_sum_norm` use the peer-memory kernel (hopper.py) for small bfloat16
payloads on Hopper GPUs, and XLA's all-reduce for all others.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.all_reduce import hopper
from pallas_kernels.all_reduce.hopper import (
    FIRST_ADDRESS_WORD,
    LOST_PEER_WORD,
    MAX_POLLS_WORD,
    RANK_WORD,
    header_words,
)
from pallas_kernels.all_reduce.tuning import (
    CHUNK_BYTES,
    all_reduce_config,
    can_fuse_norm,
    max_payload_bytes,
)
from pallas_kernels.gemm.xla import sum_partials
from pallas_kernels.hopper_ops import EMPTY_WORD
from pallas_kernels.norm import add_rms_norm, check_add_norm
from pallas_kernels.tuning import device_kind, is_hopper
from pallas_kernels.types import Backend

MAX_POLLS = 2**24
"""Maximum number of reads of a word that has not arrived: about ten seconds at 0.6 us per read."""


def device_sum(
    x: Float[Array, "T D"],
    axis: str,
    *,
    header: Int32[Array, "W"] | None = None,
    buffer_index: int = 0,
) -> Float[Array, "T D"]:
    """Sum x over the devices of a mapped axis; every device gets the same bits.

    If `header` is given and x is a bfloat16 array of at most 4 MiB / (number of devices), the
    devices exchange x through peer memory. Every device adds in float32, in the order of the
    devices, and rounds the sum once, so the result is deterministic. XLA sums all other arrays.

    Args:
        x: Rows of this device.
        axis: Name of the mapped axis.
        header: Peer-memory header of this device, from `make_exchange_header`. If it is None, XLA
            sums. If the data of another device does not arrive, the op sets a flag in the header,
            in place, and all later sums are NaN. `nan_if_peer_lost` reads the flag.
        buffer_index: Receive buffer to use, 0 or 1. Consecutive calls that share an exchange memory
            must alternate between 0 and 1, also if the calls are in different compiled programs.

    Raises:
        ValueError: Shapes do not fit, or `buffer_index` is out of range.
        TypeError: A dtype is not supported.
    """
    check_sum(x, header, buffer_index)
    num_devices = 0 if header is None else _num_devices(header)
    if header is None or x.dtype != jnp.bfloat16 or not _fits_peer_memory(x.nbytes, num_devices):
        return lax.psum(x, axis)
    config = all_reduce_config(num_bytes=x.nbytes, num_devices=num_devices)
    return hopper.device_sum(
        x, header, buffer_index=buffer_index, num_devices=num_devices, config=config
    )


def device_sum_norm(
    hidden: Float[Array, "T D"],
    update: Float[Array, "partials T D"],
    weight: Float[Array, "D"],
    axis: str,
    *,
    header: Int32[Array, "W"],
    buffer_index: int,
    eps: float,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Sum an update over devices, add it to the residual stream, and apply RMSNorm.

    The result equals `add_rms_norm(hidden, device_sum(update))`, with the same bits on all devices.
    The op runs as one kernel launch if `device_sum` would use peer memory, and `hidden` and
    `weight` are bfloat16. Also, `hidden` must have at most 128 rows and 8,192 columns, and the
    number of columns must be a multiple of 8.

    Args:
        hidden: Residual stream, the same on all devices.
        update: This device's part of the sum, as split-K partials in hidden's dtype or float32.
        weight: Weight of the norm.
        axis, header, buffer_index: See `device_sum`.
        eps: Epsilon of the norm; see `add_rms_norm`.
        backend: Implementation of `add_rms_norm`, if the op does not run as one launch.

    Returns:
        The normalized rows, and the new residual stream.

    Raises:
        ValueError, TypeError: See `device_sum` and `add_rms_norm`.
    """
    check_add_norm(hidden, update, weight, eps)
    check_sum(hidden, header, buffer_index)
    num_devices, (num_rows, width) = _num_devices(header), hidden.shape
    is_narrow = hidden.dtype == weight.dtype == jnp.bfloat16 and width % (CHUNK_BYTES // 2) == 0
    fits = _fits_peer_memory(hidden.nbytes, num_devices) and can_fuse_norm(
        num_rows=num_rows, width=width
    )
    if is_narrow and fits:
        options = {"buffer_index": buffer_index, "num_devices": num_devices, "eps": eps}
        return hopper.device_sum_norm(update, hidden, weight, header, **options)
    total = device_sum(
        sum_partials(update, hidden.dtype), axis, header=header, buffer_index=buffer_index
    )
    return add_rms_norm(hidden, total[None], weight, eps=eps, backend=backend)


def exchange_word_counts(num_devices: int, backend: Backend) -> tuple[int, int] | None:
    """Return the sizes of a device's peer-memory header and of its exchange memory.

    Both sizes are numbers of int32 words. The exchange memory contains the receive buffers.
    Return None if no peer-memory kernel exists: for fewer than 2 or more than 8 devices, or if
    the devices are not Hopper GPUs.
    """
    if not 2 <= num_devices <= 8 or not is_hopper(device_kind(Backend(backend))):
        return None
    return header_words(num_devices), 2 * num_devices * hopper.receive_buffer_words(num_devices)


def make_exchange_header(
    rank: int, addresses: Sequence[int], max_polls: int = MAX_POLLS
) -> np.ndarray:
    """Return the peer-memory header of one device, int32 [W].

    Args:
        rank: Index of the device in `addresses`.
        addresses: Address of the exchange memory of each device, by rank. Each memory must be
            filled with -1, must keep its address, and must be writable by every device. Make
            exactly one set of headers, one per device, for these memories.
        max_polls: Maximum number of reads of a word that has not arrived. After these reads, the
            device that should have sent the word counts as lost.

    Raises:
        ValueError: `rank` is out of range.
    """
    if not 0 <= rank < len(addresses):
        raise ValueError(f"rank is {rank}: pass a number from 0 to {len(addresses) - 1}")
    words = np.zeros(header_words(len(addresses)), np.int32)
    words[RANK_WORD], words[MAX_POLLS_WORD] = rank, max_polls
    words[FIRST_ADDRESS_WORD:] = np.array([addresses[rank], *addresses], np.uint64).view(np.int32)
    return words


def nan_if_peer_lost(header: Int32[Array, "W"]) -> Float32[Array, ""]:
    """Return NaN if data of another device did not arrive in an earlier launch, else 0.

    The first all-reduce of a compiled program should be XLA's (`jax.lax.psum`). Add this value to
    the input of that all-reduce: if one device adds NaN, the sum is NaN on all devices. XLA's
    all-reduce is also a barrier: no device polls peer memory before all devices have loaded the
    program.
    """
    return jnp.where(header[LOST_PEER_WORD] == 0, jnp.float32(0), jnp.float32(jnp.nan))


def check_sum(x, header, buffer_index):
    """Check the arguments of `device_sum`; `header` is the array with peer-memory addresses."""
    checks.check_array("x", x, "[T, D]")
    if buffer_index not in (0, 1):
        raise ValueError(f"buffer_index is {buffer_index!r}: pass 0 or 1")
    if header is None:
        return
    (words,) = checks.check_array("header", header, "[W]", jnp.int32).values()
    if words not in [header_words(n) for n in range(2, 9)]:
        raise ValueError(f"header has {words} words: create it with make_exchange_header")


def _num_devices(header):
    return (header.shape[0] - FIRST_ADDRESS_WORD) // 2 - 1


def _fits_peer_memory(num_bytes, num_devices):
    return 0 < num_bytes <= max_payload_bytes(num_devices) and num_bytes % CHUNK_BYTES == 0


__all__ = [
    "EMPTY_WORD",
    "device_sum",
    "device_sum_norm",
    "exchange_word_counts",
    "make_exchange_header",
    "nan_if_peer_lost",
]
