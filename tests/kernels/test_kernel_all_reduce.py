"""Test all-reduces: results, errors of absent devices, and where the kernel runs."""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec, use_abstract_mesh
from kernel_cases import BF16, F16, F32

from jpaged.models.sharding import MESH_AXIS, barrier_all_reduce, make_mesh
from jpaged.runtime.peer_memory import PeerMemory
from pallas_kernels import (
    Backend,
    device_sum,
    device_sum_norm,
    exchange_word_counts,
    make_exchange_header,
)
from pallas_kernels.all_reduce.tuning import all_reduce_config, max_payload_bytes
from tests.reference import kernels as reference

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
REPLICATED, SPLIT = PartitionSpec(), PartitionSpec(MESH_AXIS)
WIDTH = 4096
NO_TRITON_IN_MESH = pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="takes the kind of device from the mesh, whose devices are processors here",
)


def mesh_of(count: int) -> Mesh:
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    mesh = make_mesh(jax.devices(), count)
    assert mesh is not None
    return mesh


def gpus(count: int) -> Mesh:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs")
    return mesh_of(count)


def on_all(mesh: Mesh, function: Any, *specs: PartitionSpec, out: Any = SPLIT) -> Any:
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    )


def lowered(count: int, rows: int, dtype: Any = BF16, width: int = WIDTH) -> str:
    """Return the lowered text of two sums of rows, for H200s."""
    mesh = make_mesh(jax.devices(), count)
    assert mesh is not None

    def twice(x, header):
        x = device_sum(x, MESH_AXIS, header=header, buffer_index=0)
        return device_sum(x, MESH_AXIS, header=header, buffer_index=1)

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        words = exchange_word_counts(count, Backend.TRITON)
        assert words is not None
        given = (
            jax.ShapeDtypeStruct((rows, width), dtype),
            jax.ShapeDtypeStruct((count * words[0],), jnp.int32),
        )
        traced = on_all(mesh, twice, REPLICATED, SPLIT, out=REPLICATED).trace(*given)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


KERNEL, COLLECTIVE = "custom_call @mosaic_gpu", '"stablehlo.all_reduce"'


@pytest.mark.parametrize("count", [2, 4, 8])
def test_small_sums_use_peer_memory(count: int):
    most = max_payload_bytes(count) // (2 * WIDTH)
    assert most == {2: 256, 4: 128, 8: 64}[count]
    for rows in (1, 8, most):
        text = lowered(count, rows)
        assert (text.count(KERNEL), text.count(COLLECTIVE)) == (2, 0)
    text = lowered(count, most + 1)
    assert (text.count(KERNEL), text.count(COLLECTIVE)) == (0, 2)


@pytest.mark.parametrize(("dtype", "width"), [(F32, WIDTH), (F16, WIDTH), (BF16, 12)])
def test_unsupported_dtypes_and_widths_use_xla(dtype, width: int):
    text = lowered(2, 1, dtype, width)
    assert (text.count(KERNEL), text.count(COLLECTIVE)) == (0, 2)


@pytest.mark.parametrize(
    ("rows", "width", "parts", "dtype", "kernels"),
    [
        (8, WIDTH, 4, F32, 1),
        (128, 8192, 2, BF16, 1),
        pytest.param(129, 1024, 1, BF16, 1, marks=NO_TRITON_IN_MESH),
        pytest.param(512, WIDTH, 1, BF16, 0, marks=NO_TRITON_IN_MESH),
    ],
)
def test_norm_is_fused_if_each_program_has_a_row(
    rows: int, width: int, parts: int, dtype: Any, kernels: int
):
    """129 rows are summed by the unfused kernel, and 512 rows by XLA."""
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None

    def run(hidden, update, weight, header):
        options = {"header": header, "buffer_index": 1, "eps": 1e-6, "backend": Backend.TRITON}
        return device_sum_norm(hidden, update, weight, MESH_AXIS, **options)

    shape = jax.ShapeDtypeStruct
    given = shape((rows, width), BF16), shape((parts, rows, width), dtype)
    given = *given, shape((width,), BF16), shape((20,), jnp.int32)
    whole = (REPLICATED,) * 3
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = on_all(mesh, run, *whole, SPLIT, out=REPLICATED).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(KERNEL) == kernels
    assert text.count(COLLECTIVE) == 1 - kernels
    assert text.count("@__gpu$xla.gpu.triton") == (0 if rows <= 128 else 1)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_chunk_has_a_thread(count: int):
    for num_bytes in (16, 2048, 8192, 65536, 524288, max_payload_bytes(count)):
        config = all_reduce_config(num_bytes=num_bytes, num_devices=count)
        assert 1 <= config.num_programs <= 128
        assert 1 <= config.num_warp_groups <= 4
        assert 1 <= config.num_chunks * count <= 8
        threads = config.num_programs * config.num_warp_groups * 128
        assert threads >= min(num_bytes // 16, 128 * 4 * 128)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("count", [2, 8])
def test_xla_all_reduce_matches_the_reference(count: int, dtype):
    mesh, rng = mesh_of(count), np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((count * 3, 24)), dtype)
    run = on_all(mesh, lambda own: device_sum(own, MESH_AXIS), SPLIT)
    got = np.asarray(run(x), np.float32).reshape(count, 3, 24)
    want = reference.device_sum(np.asarray(x).reshape(count, 3, 24)).astype(np.float32)
    for own in got:
        np.testing.assert_array_equal(own, got[0])
    tolerance = 1e-6 if dtype == F32 else 2.0**-6
    np.testing.assert_allclose(got[0], want, rtol=tolerance, atol=tolerance)


def test_peer_exchange_needs_several_hopper_gpus():
    assert exchange_word_counts(2, Backend.XLA) is None
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        assert exchange_word_counts(1, Backend.TRITON) is None
        assert exchange_word_counts(9, Backend.TRITON) is None
        words = [exchange_word_counts(count, Backend.TRITON) for count in (2, 4, 8)]
    assert words == [(10, 2**21), (14, 2**21), (22, 2**21)]


def test_header_contains_the_addresses_of_all_devices():
    words = make_exchange_header(1, [0x1_0000_0002, 0xFEDC_0000_1234], max_polls=5)
    assert words[:4].tolist() == [0, 1, 5, 0]
    addresses = words[4:].view(np.uint64).tolist()
    assert addresses == [0xFEDC_0000_1234, 0x1_0000_0002, 0xFEDC_0000_1234]


def test_wrong_arguments_are_named():
    rows = jnp.zeros((2, 16), BF16)
    with pytest.raises(ValueError, match="buffer_index is 2: pass 0 or 1"):
        device_sum(rows, MESH_AXIS, buffer_index=2)
    with pytest.raises(ValueError, match="header has 9 words: create it with make_exchange_header"):
        device_sum(rows, MESH_AXIS, header=jnp.zeros(9, jnp.int32))
    with pytest.raises(ValueError, match="rank is 2: pass a number from 0 to 1"):
        make_exchange_header(2, [0, 0])


def hashed(*numbers: Any) -> jax.Array:
    """Return pseudo-random bits that are equal on all devices."""
    h = jnp.uint32(0x9E3779B9)
    for number in numbers:
        h = (h ^ jnp.asarray(number).astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        h ^= h >> 16
    return h


def rows_of(shape: tuple[int, int], index: Any, rank: Any) -> jax.Array:
    """Return a device's addend of sum number `index`: bfloat16 numbers from 2^-8 to 2^8 of both
    signs."""
    at = lax.broadcasted_iota(jnp.uint32, shape, 0) * jnp.uint32(shape[1])
    lot = hashed(index, rank)[None, None] ^ (at + lax.broadcasted_iota(jnp.uint32, shape, 1))
    lot = hashed(lot)
    exponent = jnp.uint32(127 - 8) + ((lot >> 8) & jnp.uint32(15))
    sign, fraction = lot & jnp.uint32(0x8000), (lot >> 16) & jnp.uint32(0x7F)
    return (sign | (exponent << 7) | fraction).astype(jnp.uint16)


def in_order(shape: tuple[int, int], index: Any, count: int) -> jax.Array:
    """Return the bits of the sum of all devices' rows, added in the order of the devices."""
    total = jnp.zeros(shape, F32)
    for rank in range(count):
        rows = rows_of(shape, index, jnp.uint32(rank)).astype(jnp.uint32)
        total += lax.bitcast_convert_type(rows << 16, F32)
    return bits(total.astype(BF16))


def held_back(x: jax.Array, turns: jax.Array) -> jax.Array:
    """Return `x` after a delay of about 3 ns per turn, on this device only."""

    def wait(turns_ref, out_ref):
        step = lambda _, state: state * jnp.int32(1664525) + jnp.int32(1013904223)  # noqa: E731
        out_ref[...] = lax.fori_loop(0, turns_ref[0], step, turns_ref[0]) | jnp.int32(1)

    out = jax.ShapeDtypeStruct((), jnp.int32)
    one_warp = plgpu.CompilerParams(num_warps=1)
    done = pl.pallas_call(wait, out_shape=out, compiler_params=one_warp)(turns.reshape(1))
    return jnp.where(done != 0, x, -x)  # `done` is odd, but XLA cannot know this


def bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


NONE_WRONG = [0, -1, -1, -1, -1]


def chain(shape: tuple[int, int], count: int, num_turns: int, most_late: int, late, peers):
    """Sum rows many times. Before each sum, each device waits, sometimes for long."""
    rank = lax.axis_index(MESH_AXIS)

    def once(index, buffer_index, found):
        lot = hashed(index, rank, jnp.uint32(7))
        turns = jnp.where(lot % jnp.uint32(16) == 0, lot % jnp.uint32(most_late), jnp.uint32(0))
        x = lax.bitcast_convert_type(rows_of(shape, index, rank), BF16)
        x = jnp.where(found[0] < 0, -x, x)  # never true; makes XLA wait for the previous sum
        x = held_back(x, turns.astype(jnp.int32) + late[0])
        got = bits(device_sum(x, MESH_AXIS, header=peers, buffer_index=buffer_index)).ravel()
        want = in_order(shape, index, count).ravel()
        differs = got != want
        place = jnp.argmax(differs).astype(jnp.int32)
        first = [index, place, got[place].astype(jnp.int32), want[place].astype(jnp.int32)]
        is_first = (found[0] == 0) & differs[place]
        total = found[0] + differs.sum(dtype=jnp.int32)
        return jnp.stack([total, *jnp.where(is_first, jnp.stack(first), found[1:])])

    def both(i, found):
        return once(2 * i + 1, 1, once(2 * i, 0, found))

    start = barrier_all_reduce(jnp.zeros((1, 1), F32), peers)[0].astype(jnp.int32)
    start = jnp.array(NONE_WRONG, jnp.int32) + start
    return lax.fori_loop(0, num_turns, both, start)[None]


def run_chain(mesh: Mesh, shape: tuple[int, int], num_turns: int, most_late: int = 100) -> Any:
    """Return the result of `chain` on each device, and the peer memory."""
    memory = PeerMemory(mesh)
    body = partial(chain, shape, mesh.size, num_turns, most_late)
    run = on_all(mesh, body, SPLIT, SPLIT)
    late = jnp.zeros(mesh.size, jnp.int32)
    return np.asarray(run(late, memory.headers)), memory


GPU_COUNTS = [2, 4, 8]


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("count", GPU_COUNTS)
@pytest.mark.parametrize("rows", [1, 8, 64, None])
def test_kernel_sums_in_device_order(rows: int | None, count: int):
    """All bits are equal on all devices. `rows=None` is the maximum that fits peer memory."""
    rows = rows or max_payload_bytes(count) // (WIDTH * 2)
    found, memory = run_chain(gpus(count), (rows, WIDTH), 4)
    memory.check_devices()
    assert found.tolist() == [NONE_WRONG] * count


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize(("rows", "num_turns"), [(8, 50_000), (64, 5_000), (3, 5_000)])
def test_kernel_sum_is_deterministic_with_late_devices(rows: int, num_turns: int):
    found, memory = run_chain(gpus(2), (rows, WIDTH), num_turns, 20_000)
    memory.check_devices()
    assert found.tolist() == [NONE_WRONG] * 2


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("num_partials", [1, 4])
@pytest.mark.parametrize("shape", [(1, 4096), (8, 4096), (64, 8192), (5, 1032), (128, 4096)])
def test_fused_norm_equals_the_norm_of_the_sum(shape: tuple[int, int], num_partials: int):
    """Compare all bits. Partials are equal fractions of the update, so their sum is exact."""
    mesh = gpus(2)
    memory, width = PeerMemory(mesh), shape[1]
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(width) + 1, BF16)

    def layers(weight, peers):
        rank = lax.axis_index(MESH_AXIS)
        stream = barrier_all_reduce(jnp.zeros(shape, BF16), peers)
        found = []
        for index in range(4):
            rows = lax.bitcast_convert_type(rows_of(shape, index, rank), BF16)
            update = rows[None]
            if num_partials > 1:
                parts = jnp.full((num_partials, 1, 1), 1 / num_partials, F32)
                update = jnp.broadcast_to(rows.astype(F32)[None], (num_partials, *shape)) * parts
            options = {
                "header": peers,
                "buffer_index": index % 2,
                "eps": 1e-5,
                "backend": Backend.TRITON,
            }
            normed, stream = device_sum_norm(stream, update, weight, MESH_AXIS, **options)
            found += [normed, stream]
        return jnp.stack(found)[None]

    run = on_all(mesh, layers, REPLICATED, SPLIT)
    found = np.asarray(run(weight, memory.headers))
    memory.check_devices()
    np.testing.assert_array_equal(found[0].view(np.uint16), found[1].view(np.uint16))
    stream = np.zeros(shape, np.float32)
    for index in range(4):
        update = np.asarray(in_order(shape, index, 2)).view(jnp.bfloat16).astype(np.float32)
        stream = (stream + update).astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(found[0, 2 * index + 1].astype(np.float32), stream)
        scale = 1 / np.sqrt((stream.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
        want = stream * scale * np.asarray(weight, np.float64)
        got = found[0, 2 * index].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=2.0**-8 * 1.01, atol=1e-30)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_kernel_sums_nan_and_infinity():
    """NaN stays NaN, even with the bits that mark an empty word, and no device waits forever."""
    mesh, memory = gpus(2), PeerMemory(gpus(2), max_polls=2**18)
    x = np.zeros((2, 8, 64), np.uint16)
    x[:] = np.asarray(jnp.bfloat16(1.5)).view(np.uint16)
    x[0, 2], x[1, 3], x[:, 4] = 0xFFFF, 0xFFFF, 0xFFFF
    x[0, 5], x[1, 6] = 0x7F80, 0xFF80

    def sums(own, peers):
        own += barrier_all_reduce(jnp.zeros((1, 1), BF16), peers)
        first = device_sum(own, MESH_AXIS, header=peers, buffer_index=0)
        own = jnp.where(bits(first)[:1, :1] == 77, -own, own)  # never true, but makes XLA wait
        return first, device_sum(own, MESH_AXIS, header=peers, buffer_index=1)

    given = lax.bitcast_convert_type(jnp.asarray(x.reshape(16, 64)), BF16)
    found = on_all(mesh, sums, SPLIT, SPLIT, out=(SPLIT, SPLIT))(given, memory.headers)
    memory.check_devices()
    for got in found:
        got = np.asarray(got, np.float32).reshape(2, 8, 64)
        np.testing.assert_array_equal(got[0], got[1])
        assert np.isnan(got[0, 2:5]).all()
        assert (got[0, [0, 1, 7]] == 3).all()
        assert (got[0, 5] == np.inf).all()
        assert (got[0, 6] == -np.inf).all()


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("place", [0, 1])
def test_delayed_device_ends_the_program_with_an_error(place: int):
    mesh, shape = gpus(2), (8, WIDTH)
    memory = PeerMemory(mesh, max_polls=2**14)

    def sums(late, peers):
        x = jnp.ones(shape, BF16) + barrier_all_reduce(jnp.zeros((1, 1), BF16), peers)
        for i in range(4):
            x = held_back(x, late[0] * jnp.int32(i == 2))
            x = device_sum(x, MESH_AXIS, header=peers, buffer_index=i % 2)
        return x

    run = on_all(mesh, sums, SPLIT, SPLIT)
    late = np.zeros(2, np.int32)
    got = np.asarray(run(jnp.asarray(late), memory.headers), np.float32)
    memory.check_devices()
    assert (got == 16).all()
    late[place] = 300_000_000  # about 1 s; the other device gives up after 10 ms
    begun = time.monotonic()
    got = np.asarray(run(jnp.asarray(late), memory.headers), np.float32).reshape(2, *shape)
    assert np.isnan(got[1 - place]).all()
    with pytest.raises(RuntimeError, match="received no data from another tensor-parallel device"):
        memory.check_devices()
    again = np.asarray(run(jnp.zeros(2, jnp.int32), memory.headers), np.float32)
    assert np.isnan(again).all()
    assert time.monotonic() - begun < 30
