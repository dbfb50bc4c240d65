"""Test copying blocks to host memory and back."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jpaged.compile.recipes import Recipe, Recipes
from jpaged.core.plan import SwapIn, SwapOut
from jpaged.runtime import swap
from jpaged.runtime.kv_cache import KVState
from jpaged.runtime.programs import DeviceShapes, SplitModel, int32_shape
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import init_sampling_state
from jpaged.runtime.steps import fork_rows_step
from jpaged.runtime.swap import (
    MAX_STAGED_CHUNKS,
    SwapEntries,
    chunk_sizes,
    gather_blocks_step,
    scatter_blocks_step,
    split_into_chunks,
    staging_bytes,
)
from pallas_kernels import FP8, FP8_PAIR_DTYPE, Backend, LayerKV, pack_fp8_pairs

P, S, K, H, NUM_LAYERS = 100, 8, 2, 4, 3
SIZES = (8, 16)
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


def make_state(dtype=jnp.float32) -> KVState:
    rng = np.random.default_rng(0)

    def array():
        numbers = jnp.asarray(rng.standard_normal((P, S, K, H)), dtype)
        return pack_fp8_pairs(numbers) if dtype == FP8 else numbers

    layers = tuple(LayerKV(array(), array()) for _ in range(NUM_LAYERS))
    return KVState(layers, jnp.zeros((4, 5), jnp.int32))


def contents(state: KVState) -> list[np.ndarray]:
    return [np.array(array) for array in jax.tree.leaves(state.pool)]


def swap_recipes(state: KVState, size: int) -> tuple[Recipe, Recipe]:
    """Return the compilation inputs (`Recipe`) of two programs: one gathers `size` blocks from the
    KV cache, the other scatters them."""
    config = RuntimeConfig(S, P, 5 * S, 3, 64, 16, Backend.XLA)
    shapes = DeviceShapes(
        state, int32_shape(4), jax.eval_shape(lambda: init_sampling_state(4, 16)), int32_shape(8)
    )
    made = Recipes(SplitModel.of(nnx.Module()), shapes, config)
    return made["gather_blocks", size], made["scatter_blocks", size]


def compiled_swaps(state: KVState, *sizes: int) -> dict[Any, Any]:
    return {it.name: it.compile() for size in sizes for it in swap_recipes(state, size)}


class Pool:
    """Replace `ModelRunner`: hold the KV cache, and launch the swap programs with it."""

    def __init__(self, programs: dict[Any, Any], state: KVState):
        self.programs, self.state = programs, state

    def launch(self, kind: str, size: int, **inputs: Any) -> dict[str, Any]:
        found = self.programs[kind, size](state=self.state, **inputs)
        if kind == "gather_blocks":
            return {"blocks": found}
        self.state, done = found
        return {"done": done}


@pytest.fixture(scope="module")
def programs() -> dict[Any, Any]:
    return compiled_swaps(make_state(), *SIZES)


@pytest.fixture
def pool(programs: dict[Any, Any]) -> Pool:
    return Pool(programs, make_state())


@pytest.fixture
def entries(pool: Pool) -> SwapEntries:
    return SwapEntries(pool.state.pool, SIZES[-1])


def swap_out(entries: SwapEntries, pool: Pool, swap_entry_id: int, blocks) -> None:
    entries.swap_out(pool.launch, SwapOut(swap_entry_id, tuple(map(int, blocks))))


def swap_in(entries: SwapEntries, pool: Pool, *orders: SwapIn) -> None:
    entries.finish_swap_ins(pool.launch, entries.start_swap_ins(orders))


def check_copied(before: list[np.ndarray], pool: Pool, source, target) -> None:
    """Check that the blocks `target` now equal the blocks `source` of `before`, and that no other
    block changed."""
    for was, now in zip(before, contents(pool.state), strict=True):
        np.testing.assert_array_equal(now[target], was[source])
        np.testing.assert_array_equal(np.delete(now, target, 0), np.delete(was, target, 0))


@pytest.mark.parametrize("num_blocks", [1, 8, 9, 16, 25, 16 * (MAX_STAGED_CHUNKS + 1) + 3])
def test_swapped_blocks_can_return_to_other_block_ids(
    entries: SwapEntries, pool: Pool, num_blocks: int
):
    before = contents(pool.state)
    taken = np.random.default_rng(1).permutation(np.arange(1, P))
    source = taken[:num_blocks]
    swap_out(entries, pool, 5, source)
    freed = jnp.asarray(source, jnp.int32)
    overwritten = jax.tree.map(lambda a: a.at[freed].set(jnp.nan), pool.state.pool)
    pool.state = pool.state._replace(pool=overwritten)
    target = np.roll(source, 1)
    swap_in(entries, pool, SwapIn(5, tuple(enumerate(target.tolist()))))
    check_copied(before, pool, source, target)
    assert len(entries) == 0


def test_swap_out_waits_for_earlier_transfers_with_the_callers_wait_function(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
):
    """The caller's wait function has a time limit, so that a hanging device is detected."""
    waited: list[Any] = []
    never = SimpleNamespace(is_ready=lambda: False)
    monkeypatch.setattr(swap, "to_host", lambda blocks: never)
    entries = SwapEntries(pool.state.pool, SIZES[-1], wait=waited.append)
    for swap_entry_id in range(MAX_STAGED_CHUNKS + 1):
        swap_out(entries, pool, swap_entry_id, [3])
    assert waited == [never]
    entries.wait()
    assert waited[1] == [never] * MAX_STAGED_CHUNKS


def test_unneeded_blocks_of_a_swap_entry_are_not_copied(entries: SwapEntries, pool: Pool):
    before = contents(pool.state)
    swap_out(entries, pool, 1, range(1, 31))
    # The blocks to swap in belong to two chunks of the swap entry, and are not in ascending order.
    swap_in(entries, pool, SwapIn(1, ((29, 50), (2, 51), (17, 52))))
    check_copied(before, pool, source=[30, 3, 18], target=[50, 51, 52])


def test_swap_entry_whose_blocks_are_not_needed_is_dropped_without_a_copy(
    entries: SwapEntries, pool: Pool
):
    swap_out(entries, pool, 1, [1, 2])
    assert not entries.start_swap_ins([SwapIn(1, ())])
    assert len(entries) == 0


def test_one_call_copies_several_swap_entries_back_to_the_pool(entries: SwapEntries, pool: Pool):
    before = contents(pool.state)
    ids = range(1, 2 * MAX_STAGED_CHUNKS)
    for i in ids:
        swap_out(entries, pool, i, [i])
    swap_in(entries, pool, *(SwapIn(i, ((0, 40 + i),)) for i in ids))
    entries.wait()
    check_copied(before, pool, source=list(ids), target=[40 + i for i in ids])


def test_dropping_a_swap_entry_frees_its_host_memory(entries: SwapEntries, pool: Pool):
    swap_out(entries, pool, 1, [3])
    entries.drop(1)
    assert len(entries) == 0
    with pytest.raises(KeyError):
        entries.start_swap_ins([SwapIn(1, ((0, 3),))])
    swap_out(entries, pool, 1, [4])
    with pytest.raises(ValueError, match="swap entry 1 exists already: drop it first"):
        swap_out(entries, pool, 1, [3])


def test_swap_entries_can_be_swapped_in_or_dropped_in_any_order(entries: SwapEntries, pool: Pool):
    """Perform random swaps on the pool and on NumPy copies of the pool, and compare the results."""
    rng = np.random.default_rng(3)
    oracle = contents(pool.state)
    out: dict[int, list[np.ndarray]] = {}
    for step in range(60):
        ids = rng.permutation(np.arange(1, P))[: rng.integers(1, 40)]
        action = rng.choice(["out", "in", "drop"]) if len(out) > 1 else "out"
        if action == "out":
            swap_out(entries, pool, step, ids)
            out[step] = [array[ids] for array in oracle]
            continue
        swap_entry_id = int(rng.choice(list(out)))
        blocks = out.pop(swap_entry_id)
        if action == "drop":
            entries.drop(swap_entry_id)
            continue
        count = min(len(ids), len(blocks[0]))
        indices = rng.permutation(len(blocks[0]))[:count]
        places = tuple((int(e), int(b)) for e, b in zip(indices, ids[:count], strict=True))
        swap_in(entries, pool, SwapIn(swap_entry_id, places))
        for array, block in zip(oracle, blocks, strict=True):
            array[ids[:count]] = block[indices]
    for now, expected in zip(contents(pool.state), oracle, strict=True):
        np.testing.assert_array_equal(now, expected)
    assert len(entries) == len(out)


def test_swapping_without_host_blocks_is_refused(pool: Pool):
    with pytest.raises(ValueError, match="swap entry 1 cannot be made: num_host_blocks is 0"):
        swap_out(SwapEntries(pool.state.pool, 0), pool, 1, [3])


def test_swap_entries_are_in_pinned_host_memory(entries: SwapEntries, pool: Pool):
    def pinned() -> int:
        return sum(it.sharding.memory_kind == "pinned_host" for it in jax.live_arrays())

    before = pinned()
    swap_out(entries, pool, 1, [3])
    assert pinned() == before + 1
    entries.drop(1)


def test_swap_warm_up_does_not_change_the_kv_cache(entries: SwapEntries, pool: Pool):
    before = contents(pool.state)
    entries.warm_up(pool.launch)
    check_copied(before, pool, [], [])
    assert len(entries) == 0


def test_blocks_are_swapped_in_chunks_with_little_padding():
    sizes = (8, 16, 32, 64)
    for num_blocks in range(1, 400):
        chunks = list(split_into_chunks(num_blocks, sizes))
        assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
        padding = sum(chunks) - num_blocks
        assert 0 <= padding <= max(chunks[-1] / 4, 7)
        assert len(chunks) <= num_blocks // 64 + 3


def test_number_of_blocks_per_swap_chunk_is_limited():
    def pool(num_blocks: int, block_elements: int):
        return jax.ShapeDtypeStruct((num_blocks, block_elements), jnp.int8)

    assert chunk_sizes(pool(100, 8), 0) == ()
    assert chunk_sizes(pool(100, 8), 1) == (8,)
    assert chunk_sizes(pool(100, 8), 17) == (8, 16, 32)
    assert max(chunk_sizes(pool(10, 2**21), 10**6)) == 128  # 256 MiB
    assert max(chunk_sizes(pool(10, 8), 10**6)) == 1024
    assert chunk_sizes(pool(10, 2**28), 10**6) == (8,)
    assert staging_bytes(pool(10, 2**21), 10**6) == (MAX_STAGED_CHUNKS + 1) * 2**28
    assert staging_bytes(pool(10, 2**21), 0) == 0


def exported(recipe: Recipe) -> Any:
    return recipe.compile(recipe.exported())


@pytest.mark.parametrize("compiled", [Recipe.compile, exported])
@pytest.mark.parametrize(("dtype", "name"), [(jnp.float32, "f32"), (FP8, "u16")])
def test_scatter_updates_the_pool_in_place(compiled, dtype, name: str):
    state = make_state(dtype)
    program, shape = compiled(swap_recipes(state, 8)[1]), state.pool[0].k.shape
    pool = f"[{','.join(map(str, shape))}]"
    pool_bytes = sum(array.nbytes for array in jax.tree.leaves(state.pool))
    assert program.memory_analysis().alias_size_in_bytes >= pool_bytes
    assert f"{name}{pool}" in program.as_text()
    copies = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if pool in line]


def test_float8_blocks_are_swapped_exactly():
    array = np.resize(np.arange(256, dtype=np.uint8), (P, S, K, H)).view(np.uint16)
    layer = LayerKV(jnp.asarray(array), jnp.asarray(array))
    state = KVState((layer,), jnp.zeros((4, 5), jnp.int32))
    pool, entries = Pool(compiled_swaps(state, 64), state), SwapEntries(state.pool, 64)
    source = np.arange(1, 65)
    swap_out(entries, pool, 5, source)
    target = np.roll(source, 9)
    swap_in(entries, pool, SwapIn(5, tuple(enumerate(target.tolist()))))
    check_copied([array, array], pool, source, target)
    assert all(now.dtype == FP8_PAIR_DTYPE for now in contents(pool.state))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, FP8])
def test_swap_programs_lower_for_a_gpu(dtype):
    state = make_state(dtype)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    blocks = jax.eval_shape(gather_blocks_step, state, ids)
    pool = state.pool[0].k
    assert (blocks.shape, blocks.dtype) == ((2 * NUM_LAYERS, 8, *pool.shape[1:]), pool.dtype)
    for step, arguments in (
        (gather_blocks_step, (state, ids)),
        (scatter_blocks_step, (state, ids, blocks)),
        (fork_rows_step, (state, rows, rows)),
    ):
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
            jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
