"""All-reduces through peer memory, in Pallas Mosaic GPU for Hopper (compute capability 9.0).

The exchange memory of a device has two sets of receive buffers (`buffer_index` 0 and 1), each with
one buffer for every device. A device stores its payload into its buffer in the exchange memory of
every other device. It reads the payloads of the other devices from its own exchange memory.

A word holds two bfloat16 numbers and is also the signal of its arrival, as in NCCL's LL protocol.
A buffer is initially filled with `EMPTY_WORD`, which is never stored as data. The receiver polls
until it reads a different word, and then resets the word to `EMPTY_WORD`. One launch needs neither
a barrier nor a counter:

    device_sum        grid (programs,); threads share the chunks of 16 bytes
        push          x -> the buffer of this device in the memory of every other device
        receive       poll the words of all other devices; sum in float32 in the order of the
                      devices; round once; reset the words
    device_sum_norm   grid (rows,); a program handles one row, which stays in registers
        push          sum the split-K partials; store as above
        receive       as above; add the residual stream; apply RMSNorm

Consecutive launches alternate between the buffer sets. A device must not overwrite a buffer of
launch n before its receiver has reset it. The receiver resets its buffers in launch n, and sends
its words of launch n + 1 only after that. Launch n + 2 uses the buffer set of launch n again. A
device starts launch n + 2 only after it has received the words of launch n + 1. Launches on one
exchange memory must therefore run sequentially, with `buffer_index` 0, 1, 0, 1 ... on all devices.

Polling is bounded. If a word does not arrive, the kernel stores NaN for the sums that need it, and
sets `LOST_PEER_WORD` in the header. From the next launch on, all sums on this device are NaN,
because late words of an earlier launch may arrive. The header is an argument that the caller keeps.
The kernel reads and writes it in place, without XLA's knowledge.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.all_reduce.tuning import (
    CHUNK_BYTES,
    AllReduceConfig,
    max_payload_bytes,
    norm_warp_groups,
)
from pallas_kernels.hopper_ops import EMPTY_WORD, Value, WordLoad

# Indices of the words in the peer-memory header. Addresses start at `FIRST_ADDRESS_WORD`; an
# address takes two words. The first address is the address of this device's exchange memory. The
# addresses of the exchange memories of all devices follow, by rank.
LOST_PEER_WORD, RANK_WORD, MAX_POLLS_WORD = range(3)
FIRST_ADDRESS_WORD = 4
# `NAN_WORD` holds two bfloat16 NaNs. If a word of the data equals `EMPTY_WORD`, the kernel stores
# `NAN_WORD` instead.
NAN_WORD = 0x7FFF7FFF

_WORDS_PER_CHUNK = CHUNK_BYTES // 4
_VALUES_PER_CHUNK = CHUNK_BYTES // 2
# `_ROW_BARRIER` is the index of a named barrier. Mosaic GPU itself uses the indices below 8.
_ROW_BARRIER = 8
_SYSTEM_SCOPE = "relaxed.sys.global"
_REF_TYPE = plgpu.RefType()


def header_words(num_devices: int) -> int:
    """Return the number of int32 words of a peer-memory header."""
    return FIRST_ADDRESS_WORD + 2 * (num_devices + 1)


def receive_buffer_words(num_devices: int) -> int:
    """Return the number of int32 words of one receive buffer."""
    return max_payload_bytes(num_devices) // 4


def device_sum(x, header, *, buffer_index: int, num_devices: int, config: AllReduceConfig):
    """Run the public op `device_sum` through peer memory."""
    body = functools.partial(
        _exchange,
        buffer_index=buffer_index,
        num_devices=num_devices,
        config=config,
        chunks=x.nbytes // CHUNK_BYTES,
    )

    def kernel(x_ref, header_ref, out_ref):
        run = plgpu.inline_mgpu(arg_types=(_REF_TYPE,) * 3, return_type=())(body)
        run(x_ref, header_ref, out_ref)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=config.num_warp_groups,
        thread_name="warp_group",
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name=f"device_sum_{buffer_index}",
    )
    return call(x, header)


def device_sum_norm(
    partials, hidden, weight, header, *, buffer_index: int, num_devices: int, eps: float
):
    """Run the public op `device_sum_norm` through peer memory."""
    num_warp_groups = norm_warp_groups(hidden.shape[1])
    body = functools.partial(
        _exchange_row,
        buffer_index=buffer_index,
        num_devices=num_devices,
        eps=eps,
        num_threads=num_warp_groups * 128,
        partials=jax.ShapeDtypeStruct(partials.shape, partials.dtype),
    )

    def kernel(*references, sums):
        plgpu.inline_mgpu(arg_types=(_REF_TYPE,) * 7, return_type=())(body)(*references, sums)

    shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
    call = plgpu.kernel(
        kernel,
        out_type=(shape, shape),
        grid=(hidden.shape[0],),
        grid_names=("program",),
        num_threads=num_warp_groups,
        thread_name="warp_group",
        scratch_types={"sums": plgpu.SMEM((num_warp_groups * 4,), jnp.float32)},
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name=f"device_sum_norm_{buffer_index}",
    )
    return call(partials, hidden, weight, header)


def _exchange(_, *references, buffer_index, num_devices, config, chunks):
    """Emit the code that each thread of the `device_sum` kernel runs."""
    x, header, out = map(ops.pointer, references)
    num_threads = config.num_warp_groups * 128
    first = ops.program_index() * num_threads + ops.thread_index()
    zero, stride = first * 0, config.num_programs * num_threads
    rank, has_lost_peer, limit, own_memory, memories = _read_header(header, zero, num_devices)
    others = [rank.ne(r) for r in range(num_devices)]
    receive_buffer_chunks = receive_buffer_words(num_devices) // _WORDS_PER_CHUNK

    def receive_address(memory, device, number):
        start = (device + buffer_index * num_devices) * receive_buffer_chunks
        return ops.offset(memory, start + number, CHUNK_BYTES)

    def load_own(numbers):
        sources = [ops.offset(x, number, CHUNK_BYTES) for number in numbers]
        return ops.load(
            [
                WordLoad(s, _WORDS_PER_CHUNK, n < chunks)
                for s, n in zip(sources, numbers, strict=True)
            ]
        )

    def push(numbers):
        for number, words in zip(numbers, load_own(numbers), strict=True):
            words = [_replace_empty(word) for word in words]
            for memory, other in zip(memories, others, strict=True):
                with ops.when(other & (number < chunks)):
                    ops.store(_SYSTEM_SCOPE, receive_address(memory, rank, number), words)

    def receive(numbers):
        mine = load_own(numbers)
        sources = [
            [receive_address(own_memory, zero + r, n) for r in range(num_devices)] for n in numbers
        ]
        loads = [
            WordLoad(source, _WORDS_PER_CHUNK, other & (number < chunks))
            for number, row in zip(numbers, sources, strict=True)
            for source, other in zip(row, others, strict=True)
        ]
        words, is_missing = ops.poll_with_limit(limit, header, loads)
        with ops.when(is_missing.eq(1)):
            ops.store("global", header, [is_missing])
        is_bad = (is_missing | has_lost_peer).ne(0)
        for i, number in enumerate(numbers):
            with ops.when(number < chunks):
                total = _sum_devices(
                    mine[i], words[i * num_devices : (i + 1) * num_devices], others
                )
                total = [ops.select(is_bad, zero + NAN_WORD, word) for word in total]
                ops.store("global", ops.offset(out, number, CHUNK_BYTES), total)
                for source, other in zip(sources[i], others, strict=True):
                    with ops.when(other):
                        ops.store(_SYSTEM_SCOPE, source, [zero + EMPTY_WORD] * _WORDS_PER_CHUNK)

    for part in (push, receive):
        with ops.loop(first, zero + chunks, stride * config.num_chunks) as at:
            part([at + i * stride for i in range(config.num_chunks)])
    return ()


def _exchange_row(
    _, *references, buffer_index, num_devices, eps, num_threads, partials: jax.ShapeDtypeStruct
):
    """Emit the code that each thread of the `device_sum_norm` kernel runs.

    A program handles one row. Thread i of the program handles the row's chunks i,
    i + num_threads, i + 2 * num_threads, ...
    """
    partials_pointer, hidden, weight, header, normed, out, sums = map(ops.pointer, references)
    num_partials, num_rows, width = partials.shape
    chunks, thread, row = width // _VALUES_PER_CHUNK, ops.thread_index(), ops.program_index()
    zero = thread * 0
    rank, has_lost_peer, limit, own_memory, memories = _read_header(header, zero, num_devices)
    others = [rank.ne(r) for r in range(num_devices)]
    receive_buffer_chunks = receive_buffer_words(num_devices) // _WORDS_PER_CHUNK
    columns = [thread + at for at in range(0, chunks, num_threads)]
    masks = [column < chunks for column in columns]

    def receive_address(memory, device, column):
        start = (device + buffer_index * num_devices) * receive_buffer_chunks
        return ops.offset(memory, start + row * chunks + column, CHUNK_BYTES)

    def word_load(base, number, mask):
        return WordLoad(ops.offset(base, number, CHUNK_BYTES), _WORDS_PER_CHUNK, mask)

    def partial_loads(column, mask):
        """Return the loads that read one chunk of 8 columns from every split-K partial.

        A bfloat16 partial needs one load of 16 bytes, a float32 partial needs two.
        """
        if partials.dtype == jnp.bfloat16:
            starts = [(row + part * num_rows) * chunks + column for part in range(num_partials)]
        else:
            firsts = [(row + part * num_rows) * chunks + column for part in range(num_partials)]
            starts = [first * 2 + half for first in firsts for half in range(2)]
        return [word_load(partials_pointer, start, mask) for start in starts]

    pairs = [*zip(columns, masks, strict=True)]
    found = [ops.load(partial_loads(*pair)) for pair in pairs]
    streams = ops.load([word_load(hidden, row * chunks + c, mask) for c, mask in pairs])
    weights = ops.load([word_load(weight, c, mask) for c, mask in pairs])
    mine = [_sum_partials(parts, partials.dtype) for parts in found]
    for (column, mask), words in zip(pairs, mine, strict=True):
        stored = [_replace_empty(word) for word in words]
        for memory, other in zip(memories, others, strict=True):
            with ops.when(other & mask):
                ops.store(_SYSTEM_SCOPE, receive_address(memory, rank, column), stored)
    sources = [
        [receive_address(own_memory, zero + r, c) for r in range(num_devices)] for c in columns
    ]
    loads = [
        WordLoad(source, _WORDS_PER_CHUNK, other & mask)
        for row_sources, mask in zip(sources, masks, strict=True)
        for source, other in zip(row_sources, others, strict=True)
    ]
    words, is_missing = ops.poll_with_limit(limit, header, loads)
    with ops.when(is_missing.eq(1)):
        ops.store("global", header, [is_missing])
    is_bad = (is_missing | has_lost_peer).ne(0)
    totals = []
    for i, stream in enumerate(streams):
        update = _sum_devices(mine[i], words[i * num_devices : (i + 1) * num_devices], others)
        update = [ops.select(is_bad, zero + NAN_WORD, word) for word in update]
        both = zip(ops.unpack_bf16(stream), ops.unpack_bf16(update), strict=True)
        totals.append(ops.pack_bf16([a + b for a, b in both]))
    scale = _row_scale([ops.unpack_bf16(total) for total in totals], sums, num_threads, width, eps)
    for i, (column, mask) in enumerate(pairs):
        with ops.when(mask):
            at = row * chunks + column
            ops.store("global", ops.offset(out, at, CHUNK_BYTES), totals[i])
            numbers = zip(ops.unpack_bf16(totals[i]), ops.unpack_bf16(weights[i]), strict=True)
            scaled = ops.pack_bf16([x * scale * factor for x, factor in numbers])
            ops.store("global", ops.offset(normed, at, CHUNK_BYTES), scaled)
            for source, other in zip(sources[i], others, strict=True):
                with ops.when(other):
                    ops.store(_SYSTEM_SCOPE, source, [zero + EMPTY_WORD] * _WORDS_PER_CHUNK)
    return ()


def _sum_partials(parts: list[list[Value]], dtype) -> list[Value]:
    """Sum the split-K partials of a chunk, and return the sums as words of two bfloat16 numbers."""
    if len(parts) == 1:
        return parts[0]
    if dtype == jnp.bfloat16:
        numbers = [ops.unpack_bf16(words) for words in parts]
    else:
        halves = [ops.bitcast_to_float32(words) for words in parts]
        numbers = [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)]
    return ops.pack_bf16([ops.sum_values(list(each)) for each in zip(*numbers, strict=True)])


def _row_scale(totals, sums, num_threads, width, eps) -> Value:
    """Return 1 / (root mean square) of the program's row; each thread has a part of the row.

    `sums` is shared memory for one float32 per warp.
    """
    squares = ops.warp_sum(ops.sum_values([x * x for numbers in totals for x in numbers]))
    thread = ops.thread_index()
    with ops.when((thread % 32).eq(0)):
        ops.store("shared", ops.offset(sums, thread // 32, 4), [squares])
    ops.barrier(_ROW_BARRIER, num_threads)
    warps = [ops.load_shared(ops.offset(sums, thread * 0 + i, 4)) for i in range(num_threads // 32)]
    return ops.rsqrt(ops.sum_values(warps) * (1.0 / width) + eps)


def _read_header(header, zero, num_devices):
    """Load the peer-memory header.

    Returns:
        Five values: the rank of this device; 1 if this device has lost a peer, else 0; the maximum
        number of polls (0 after a loss); a pointer to the exchange memory of this device; and a
        list of pointers to the exchange memories of all devices, by rank.
    """
    starts = range(FIRST_ADDRESS_WORD, header_words(num_devices), 2)
    pairs = [WordLoad(ops.offset(header, zero + at, 4), 2, zero.eq(0)) for at in starts]
    fields, *halves = ops.load([WordLoad(header, 4, zero.eq(0)), *pairs])
    has_lost_peer = fields[LOST_PEER_WORD]
    limit = ops.select(has_lost_peer.eq(0), fields[MAX_POLLS_WORD], zero)
    own_memory, *memories = (ops.make_pointer(*pair) for pair in halves)
    return fields[RANK_WORD], has_lost_peer, limit, own_memory, memories


def _replace_empty(word: Value) -> Value:
    """Return the word, or `NAN_WORD` if it equals `EMPTY_WORD`."""
    return ops.select(word.eq(EMPTY_WORD), word * 0 + NAN_WORD, word)


def _sum_devices(
    mine: list[Value], theirs: list[list[Value]], is_other: list[Value]
) -> list[Value]:
    """Sum words over the devices; a word holds two bfloat16 numbers.

    The numbers are added in float32, and each sum is rounded once.

    Args:
        mine: Words of this device.
        theirs: Words received from each device, by rank.
        is_other: For each rank, whether it is another device. For this device's own rank, the sum
            uses `mine` instead of the received words.
    """
    by_device = [
        [ops.select(other, word, own) for word, own in zip(words, mine, strict=True)]
        for words, other in zip(theirs, is_other, strict=True)
    ]
    numbers = zip(*map(ops.unpack_bf16, by_device), strict=True)
    return ops.pack_bf16([ops.sum_values(list(each)) for each in numbers])
