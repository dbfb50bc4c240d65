"""The sum of the arrays of devices that run one program, on each of them."""

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
"""How often a word is read that does not come: at some 0.6 us, about ten seconds."""


def device_sum(
    x: Float[Array, "T D"],
    axis: str,
    *,
    header: Int32[Array, "W"] | None = None,
    buffer_index: int = 0,
) -> Float[Array, "T D"]:
    """The sum over the devices of a mapped axis, rounded to x's dtype; the same bits on all.

    With a header, rows of bfloat16 go through peer memory as long as there are not too many bytes
    (4 MiB, divided by the number of devices): float32 sums in the devices' order, rounded once,
    deterministic. All else is XLA's.

    Args:
        x: each device's own rows.
        axis: name of the mapped axis.
        header: this device's, from `make_exchange_header`; None for XLA's sum. It is written in place
            when the words of another device do not come: from then on sums are NaN, and
            `nan_if_peer_lost` of the header tells.
        turn: 0 and 1 in turn over all calls that share an exchange memory, in all programs.

    Raises:
        ValueError: shapes that do not fit, a turn out of range.
        TypeError: dtypes that no kernel takes.
    """
    check_sum(x, header, buffer_index)
    num_devices = 0 if header is None else _num_devices(header)
    if header is None or x.dtype != jnp.bfloat16 or not _fits(x.nbytes, num_devices):
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
    """`add_rms_norm` of hidden and the `device_sum` of an update; the same bits on all devices.

    One launch for up to 128 rows, up to 8,192 wide, in bfloat16, that go through peer memory.

    Args:
        hidden: the residual stream, the same on all devices.
        update: each device's own, as split-K partials of hidden's dtype or float32.
        weight: of the norm.
        axis, header, buffer_index: as of `device_sum`.
        eps: as of `add_rms_norm`.
        backend: which implementation of that runs where this is not one launch.

    Raises:
        ValueError, TypeError: as `device_sum` and `add_rms_norm`.
    """
    check_add_norm(hidden, update, weight, eps)
    check_sum(hidden, header, buffer_index)
    num_devices, (num_rows, width) = _num_devices(header), hidden.shape
    is_narrow = hidden.dtype == weight.dtype == jnp.bfloat16 and width % (CHUNK_BYTES // 2) == 0
    fits = _fits(hidden.nbytes, num_devices) and can_fuse_norm(num_rows=num_rows, width=width)
    if is_narrow and fits:
        options = {"buffer_index": buffer_index, "num_devices": num_devices, "eps": eps}
        return hopper.device_sum_norm(update, hidden, weight, header, **options)
    total = device_sum(
        sum_partials(update, hidden.dtype), axis, header=header, buffer_index=buffer_index
    )
    return add_rms_norm(hidden, total[None], weight, eps=eps, backend=backend)


def exchange_word_counts(num_devices: int, backend: Backend) -> tuple[int, int] | None:
    """Words of a device's header and of its exchange memory, int32; None where there is no kernel:
    on one device or more than 8, and on other devices than Hopper GPUs."""
    if not 2 <= num_devices <= 8 or not is_hopper(device_kind(Backend(backend))):
        return None
    return header_words(num_devices), 2 * num_devices * hopper.receive_buffer_words(num_devices)


def make_exchange_header(
    rank: int, addresses: Sequence[int], max_polls: int = MAX_POLLS
) -> np.ndarray:
    """What a device knows of the others, int32 [W].

    Args:
        rank: the device's place among them.
        addresses: of each one's exchange memory, which is filled with -1, belongs to these headers
            alone and stays where it is; every device can store there.
        max_polls: how often a word is read before its device counts as lost.
    """
    if not 0 <= rank < len(addresses):
        raise ValueError(f"rank is {rank}; it must be from 0 to {len(addresses) - 1}")
    words = np.zeros(header_words(len(addresses)), np.int32)
    words[RANK_WORD], words[MAX_POLLS_WORD] = rank, max_polls
    words[FIRST_ADDRESS_WORD:] = np.array([addresses[rank], *addresses], np.uint64).view(np.int32)
    return words


def nan_if_peer_lost(header: Int32[Array, "W"]) -> Float32[Array, ""]:
    """NaN if the device has lost another by now, else 0.

    A program begins with a sum of these over all devices by XLA, and adds it to what it computes:
    so all of them learn of it, and none polls before the others have loaded the program.
    """
    return jnp.where(header[LOST_PEER_WORD] == 0, jnp.float32(0), jnp.float32(jnp.nan))


def check_sum(x, header, buffer_index):
    """Rows, and a header for a number of devices."""
    checks.check_array("x", x, "[T, D]")
    if buffer_index not in (0, 1):
        raise ValueError(f"turn is {buffer_index!r}; it must be 0 or 1")
    if header is None:
        return
    (words,) = checks.check_array("header", header, "[W]", jnp.int32).values()
    if words not in [header_words(n) for n in range(2, 9)]:
        raise ValueError(f"header has {words} words; make it with make_exchange_header")


def _num_devices(header):
    return (header.shape[0] - FIRST_ADDRESS_WORD) // 2 - 1


def _fits(num_bytes, num_devices):
    return 0 < num_bytes <= max_payload_bytes(num_devices) and num_bytes % CHUNK_BYTES == 0


__all__ = [
    "EMPTY_WORD",
    "device_sum",
    "device_sum_norm",
    "exchange_word_counts",
    "make_exchange_header",
    "nan_if_peer_lost",
]
