"""All-reduces through peer memory, in Pallas Mosaic GPU for Hopper (compute capability 9.0).

Each device has an exchange memory: of two turns a place for every device's words. A device stores
its payload into its place in the memories of all others, at their addresses, and waits for theirs
in its own. A word, two bfloat16, is its own signal, as in NCCL's LL protocol and in the fused
layer: a place is filled with a word that is never stored, its owner reads until it sees another,
and fills the place again. No barrier, no counter, one launch.

    push    x -> the place of this device in each other one's memory, of this turn
    take    the others' words, polled; sums in float32 by the devices' order, rounded once; the
            words are emptied behind

Launches take turns. A device stores into a place only when it has got the owner's words of the
launch between, and the owner sent those behind its own launch before, in which it emptied the
place. So launches on one memory run one after the other, with turns 0, 1, 0, 1 ... on all devices.

With a residual stream and a norm's weight, a program takes a row: it sums the split-K partials of
what it pushes, and what it takes it adds to the stream and normalizes, so that the row is in
registers from the one to the other.

A word is read a bounded number of times. If it does not come, a word in the header says from then
on that this device has lost another, its sum is NaN there, and all its sums are from the next
launch on, whose words may be those of a launch before. The header is read, and that word of it
written, where XLA does not see it: in place, in an argument that the caller keeps.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.all_reduce.tuning import (
    CHUNK_BYTES,
    AllReduceConfig,
    most_bytes,
    norm_warp_groups,
)
from pallas_kernels.hopper_ops import EMPTY, Value, Words

LOST, RANK, LIMIT = range(3)  # words of the header
ADDRESSES = 4  # from here on two words an address: the device's own memory's, then all by rank
NAN = 0x7FFF7FFF  # what is stored for two numbers whose bits are those of `EMPTY`

_WORDS = CHUNK_BYTES // 4
_NUMBERS = CHUNK_BYTES // 2
_ROW = 8  # named barrier; those below are Mosaic GPU's
_EVERYWHERE = "relaxed.sys.global"
_REF = plgpu.RefType()


def header_words(num_devices: int) -> int:
    """Words of a header."""
    return ADDRESSES + 2 * (num_devices + 1)


def place_words(num_devices: int) -> int:
    """Words of a place of the exchange memory."""
    return most_bytes(num_devices) // 4


def device_sum(x, header, *, turn: int, num_devices: int, config: AllReduceConfig):
    """See the public entry of the same name."""
    body = functools.partial(
        _exchange, turn=turn, num_devices=num_devices, config=config, chunks=x.nbytes // CHUNK_BYTES
    )

    def kernel(x_ref, header_ref, out_ref):
        run = plgpu.inline_mgpu(arg_types=(_REF,) * 3, return_type=())(body)
        run(x_ref, header_ref, out_ref)

    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=config.num_warp_groups,
        thread_name="warp_group",
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name=f"device_sum_{turn}",
    )
    return call(x, header)


def device_sum_norm(partials, hidden, weight, header, *, turn: int, num_devices: int, eps: float):
    """See the public entry of the same name."""
    num_warp_groups = norm_warp_groups(hidden.shape[1])
    body = functools.partial(
        _exchange_row,
        turn=turn,
        num_devices=num_devices,
        eps=eps,
        num_threads=num_warp_groups * 128,
        partials=jax.ShapeDtypeStruct(partials.shape, partials.dtype),
    )

    def kernel(*references, sums):
        plgpu.inline_mgpu(arg_types=(_REF,) * 7, return_type=())(body)(*references, sums)

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
        kernel_name=f"device_sum_norm_{turn}",
    )
    return call(partials, hidden, weight, header)


def _exchange(_, *references, turn, num_devices, config, chunks):
    """What a thread does."""
    x, header, out = map(ops.pointer, references)
    num_threads = config.num_warp_groups * 128
    first = ops.program_index() * num_threads + ops.thread_index()
    zero, stride = first * 0, config.num_programs * num_threads
    rank, has_lost, limit, own, memories = _read_header(header, zero, num_devices)
    others = [rank.is_not(r) for r in range(num_devices)]
    place_chunks = place_words(num_devices) // _WORDS

    def place(memory, device, number):
        start = (device + turn * num_devices) * place_chunks
        return ops.offset(memory, start + number, CHUNK_BYTES)

    def load_own(numbers):
        spots = [ops.offset(x, number, CHUNK_BYTES) for number in numbers]
        return ops.load([Words(s, _WORDS, n < chunks) for s, n in zip(spots, numbers, strict=True)])

    def push(numbers):
        for number, words in zip(numbers, load_own(numbers), strict=True):
            words = [_stored(word) for word in words]
            for memory, other in zip(memories, others, strict=True):
                with ops.when(other & (number < chunks)):
                    ops.store(_EVERYWHERE, place(memory, rank, number), words)

    def take(numbers):
        mine = load_own(numbers)
        spots = [[place(own, zero + r, n) for r in range(num_devices)] for n in numbers]
        loads = [
            Words(spot, _WORDS, other & (number < chunks))
            for number, row in zip(numbers, spots, strict=True)
            for spot, other in zip(row, others, strict=True)
        ]
        words, is_missing = ops.poll_at_most(limit, header, loads)
        with ops.when(is_missing.is_(1)):
            ops.store("global", header, [is_missing])
        is_bad = (is_missing | has_lost).is_not(0)
        for i, number in enumerate(numbers):
            with ops.when(number < chunks):
                total = _total(mine[i], words[i * num_devices : (i + 1) * num_devices], others)
                total = [ops.select(is_bad, zero + NAN, word) for word in total]
                ops.store("global", ops.offset(out, number, CHUNK_BYTES), total)
                for spot, other in zip(spots[i], others, strict=True):
                    with ops.when(other):
                        ops.store(_EVERYWHERE, spot, [zero + EMPTY] * _WORDS)

    for part in (push, take):
        with ops.loop(first, zero + chunks, stride * config.num_chunks) as at:
            part([at + i * stride for i in range(config.num_chunks)])
    return ()


def _exchange_row(
    _, *references, turn, num_devices, eps, num_threads, partials: jax.ShapeDtypeStruct
):
    """What a thread does of a row: it has the chunks `thread`, `thread + num_threads` ..."""
    given, hidden, weight, header, normed, out, sums = map(ops.pointer, references)
    num_partials, num_rows, width = partials.shape
    chunks, thread, row = width // _NUMBERS, ops.thread_index(), ops.program_index()
    zero = thread * 0
    rank, has_lost, limit, own, memories = _read_header(header, zero, num_devices)
    others = [rank.is_not(r) for r in range(num_devices)]
    place_chunks = place_words(num_devices) // _WORDS
    columns = [thread + at for at in range(0, chunks, num_threads)]
    masks = [column < chunks for column in columns]

    def place(memory, device, column):
        start = (device + turn * num_devices) * place_chunks
        return ops.offset(memory, start + row * chunks + column, CHUNK_BYTES)

    def words_of(base, number, mask):
        return Words(ops.offset(base, number, CHUNK_BYTES), _WORDS, mask)

    def of_partials(column, mask):
        """A chunk's numbers in all partials, of which one is as wide as two chunks."""
        if partials.dtype == jnp.bfloat16:
            starts = [(row + part * num_rows) * chunks + column for part in range(num_partials)]
        else:
            firsts = [(row + part * num_rows) * chunks + column for part in range(num_partials)]
            starts = [first * 2 + half for first in firsts for half in range(2)]
        return [words_of(given, start, mask) for start in starts]

    pairs = [*zip(columns, masks, strict=True)]
    found = [ops.load(of_partials(*pair)) for pair in pairs]
    streams = ops.load([words_of(hidden, row * chunks + c, mask) for c, mask in pairs])
    weights = ops.load([words_of(weight, c, mask) for c, mask in pairs])
    mine = [_rounded_sum(parts, partials.dtype) for parts in found]
    for (column, mask), words in zip(pairs, mine, strict=True):
        stored = [_stored(word) for word in words]
        for memory, other in zip(memories, others, strict=True):
            with ops.when(other & mask):
                ops.store(_EVERYWHERE, place(memory, rank, column), stored)
    spots = [[place(own, zero + r, c) for r in range(num_devices)] for c in columns]
    loads = [
        Words(spot, _WORDS, other & mask)
        for spots_of, mask in zip(spots, masks, strict=True)
        for spot, other in zip(spots_of, others, strict=True)
    ]
    words, is_missing = ops.poll_at_most(limit, header, loads)
    with ops.when(is_missing.is_(1)):
        ops.store("global", header, [is_missing])
    is_bad = (is_missing | has_lost).is_not(0)
    totals = []
    for i, stream in enumerate(streams):
        update = _total(mine[i], words[i * num_devices : (i + 1) * num_devices], others)
        update = [ops.select(is_bad, zero + NAN, word) for word in update]
        both = zip(ops.unpack(stream), ops.unpack(update), strict=True)
        totals.append(ops.pack([a + b for a, b in both]))
    scale = _row_scale([ops.unpack(total) for total in totals], sums, num_threads, width, eps)
    for i, (column, mask) in enumerate(pairs):
        with ops.when(mask):
            at = row * chunks + column
            ops.store("global", ops.offset(out, at, CHUNK_BYTES), totals[i])
            numbers = zip(ops.unpack(totals[i]), ops.unpack(weights[i]), strict=True)
            scaled = ops.pack([x * scale * factor for x, factor in numbers])
            ops.store("global", ops.offset(normed, at, CHUNK_BYTES), scaled)
            for spot, other in zip(spots[i], others, strict=True):
                with ops.when(other):
                    ops.store(_EVERYWHERE, spot, [zero + EMPTY] * _WORDS)
    return ()


def _rounded_sum(parts: list[list[Value]], dtype) -> list[Value]:
    """The words of a chunk, summed over split-K partials."""
    if len(parts) == 1:
        return parts[0]
    if dtype == jnp.bfloat16:
        numbers = [ops.unpack(words) for words in parts]
    else:
        halves = [ops.as_float(words) for words in parts]
        numbers = [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)]
    return ops.pack([ops.total(list(each)) for each in zip(*numbers, strict=True)])


def _row_scale(totals, sums, num_threads, width, eps) -> Value:
    """1 / rms of the program's row, of which each thread has some numbers."""
    squares = ops.warp_sum(ops.total([x * x for numbers in totals for x in numbers]))
    thread = ops.thread_index()
    with ops.when((thread % 32).is_(0)):
        ops.store("shared", ops.offset(sums, thread // 32, 4), [squares])
    ops.barrier(_ROW, num_threads)
    warps = [ops.load_shared(ops.offset(sums, thread * 0 + i, 4)) for i in range(num_threads // 32)]
    return ops.rsqrt(ops.total(warps) * (1.0 / width) + eps)


def _read_header(header, zero, num_devices):
    """The device's rank, whether it has lost another, how often it polls at most, and where the
    exchange memories are: its own, and all by rank."""
    starts = range(ADDRESSES, header_words(num_devices), 2)
    pairs = [Words(ops.offset(header, zero + at, 4), 2, zero.is_(0)) for at in starts]
    facts, *halves = ops.load([Words(header, 4, zero.is_(0)), *pairs])
    has_lost = facts[LOST]
    limit = ops.select(has_lost.is_(0), facts[LIMIT], zero)
    own, *memories = (ops.address(*pair) for pair in halves)
    return facts[RANK], has_lost, limit, own, memories


def _stored(word: Value) -> Value:
    """The word, or another NaN for that which means none."""
    return ops.select(word.is_(EMPTY), word * 0 + NAN, word)


def _total(mine: list[Value], theirs: list[list[Value]], is_other: list[Value]) -> list[Value]:
    """Sums of two numbers a word, over the devices in their order, rounded once."""
    by_device = [
        [ops.select(other, word, own) for word, own in zip(words, mine, strict=True)]
        for words, other in zip(theirs, is_other, strict=True)
    ]
    numbers = zip(*map(ops.unpack, by_device), strict=True)
    return ops.pack([ops.total(list(each)) for each in numbers])
