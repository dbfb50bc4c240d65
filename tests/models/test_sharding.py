"""Test the shards of a model on tensor-parallel devices."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from jpaged.models import loader
from jpaged.models.config import ModelConfig
from jpaged.models.linear import Embedding
from jpaged.models.loader import make_abstract_model, model_parameters, plan_model
from jpaged.models.registry import read_model_config, weight_rules
from jpaged.models.sharding import (
    MESH_AXIS,
    ShardSlice,
    all_max,
    make_mesh,
    per_device_shape,
    shard_slices,
    sharded_axis,
)
from jpaged.runtime.programs import DeviceShapes
from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend, quantize_rows
from tests.covering import covering

SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "max_position_embeddings": 16,
}
LLAMA = SHAPE | {"model_type": "llama", "intermediate_size": 24, "head_dim": 4}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": SHAPE | {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 8},
    "opt": SHAPE | {"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16},
    "heads": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "groups": LLAMA | {"num_key_value_heads": 2, "attention_bias": True},
    "one-kv-head": LLAMA | {"num_key_value_heads": 1, "vocab_size": 49},
}
COUNTS = (2, 4, 8)
SHARED = covering(
    CASES, (2, 8), strength=1, keep=lambda case, count: count == (2 if case == "gpt2" else 8)
)
"""Models and devices: of those with fewer KV heads than devices, most devices."""


def config_of(case: str) -> ModelConfig:
    return read_model_config(CASES[case])


def test_array_is_sharded_along_the_axis_that_differs():
    assert shard_slices((6, 4), (6, 2), device_index=1, count=2) == [
        ShardSlice((0, 2), (0, 0), (6, 2))
    ]
    assert shard_slices((6, 4), (6, 4), device_index=1, count=2) == [
        ShardSlice((0, 0), (0, 0), (6, 4))
    ]
    assert sharded_axis((6, 4), (6, 2)) == 1
    assert sharded_axis((6,), (6,)) is None


def test_each_device_has_its_fused_qkv_rows():
    parts = [(4, 2), (2, 1), (2, 1)]
    assert shard_slices((3, 8, 5), (3, 4, 5), 1, 2, parts) == [
        ShardSlice((0, 2, 0), (0, 0, 0), (3, 2, 5)),
        ShardSlice((0, 5, 0), (0, 2, 0), (3, 1, 5)),
        ShardSlice((0, 7, 0), (0, 3, 0), (3, 1, 5)),
    ]


def test_devices_beyond_the_kv_heads_replicate_a_head():
    """Eight query heads over two KV heads, a query head a device: the first four have the first."""
    parts = [(8, 1), (2, 1), (2, 1)]
    held = [
        [it.unsharded_start[0] for it in shard_slices((12,), (3,), device_index, 8, parts)]
        for device_index in range(8)
    ]
    assert held == [[i, 8 + i // 4, 10 + i // 4] for i in range(8)]


def test_devices_with_one_kv_head_hold_all_its_scale_blocks():
    """Heads of 256 numbers are two blocks with a scale each: four query heads, two KV heads."""
    parts = [(8, 2), (4, 2), (4, 2)]
    held = [
        [it.unsharded_start[0] for it in shard_slices((16,), (6,), device_index, 4, parts)]
        for device_index in range(4)
    ]
    assert held == [[0, 8, 12], [2, 8, 12], [4, 10, 14], [6, 10, 14]]


@pytest.mark.parametrize(
    ("case", "count", "field"),
    [
        ("gpt2", 3, "num_attention_heads=8"),
        ("groups", 3, "num_attention_heads=8"),
        ("heads", 7, "num_attention_heads=8; use 1 or 2 or 4 or 8"),
    ],
)
def test_indivisible_heads_are_refused_by_name(case: str, count: int, field: str):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={count} .*{field}"):
        config_of(case).shard(count)


def test_indivisible_kv_heads_and_widths_are_refused_by_name():
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6}
    with pytest.raises(ValueError, match="num_key_value_heads=6; use 1 or 2 or 3 or 6"):
        read_model_config(LLAMA | heads).shard(4)
    with pytest.raises(ValueError, match="intermediate_size=20; use 1 or 2 or 4"):
        read_model_config(LLAMA | {"intermediate_size": 20}).shard(8)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("case", [*CASES])
def test_each_device_holds_only_its_shard(case: str, count: int):
    config, mesh = config_of(case), make_mesh(jax.devices(), count)
    whole = model_parameters(make_abstract_model(config, jnp.float32))
    shared = model_parameters(make_abstract_model(config, jnp.float32, mesh))
    for path, spec in shared.items():
        own, all_of_it = math.prod(per_device_shape(spec)), math.prod(whole[path].shape)
        projection = config.projections.get(path.removeprefix("layers.0.").rpartition(".")[0])
        is_cut = path.endswith("weight") and projection is not None and "layers" in path
        is_table = path in ("embed.weight", "lm_head.weight") and config.vocab_size % count == 0
        if is_table or (is_cut and "qkv" not in path):
            assert own * count == all_of_it, path
        elif is_cut:
            heads = config.num_heads + 2 * max(config.num_kv_heads, count)
            assert per_device_shape(spec)[1] * count == heads, path
        elif not path.endswith("bias"):
            assert own == all_of_it, path


def assembled(array: jax.Array, whole: tuple[int, ...], parts: list[tuple[int, int]]) -> np.ndarray:
    """Return the single-device array from the shards of all devices. Replicated parts must be
    equal."""
    found = np.full(whole, np.nan, np.float32)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    for device_index, shard in enumerate(shards):
        for piece in shard_slices(whole, shard.data.shape, device_index, len(shards), parts):
            there = tuple(
                slice(a, a + n) for a, n in zip(piece.unsharded_start, piece.shape, strict=True)
            )
            own = tuple(
                slice(a, a + n) for a, n in zip(piece.local_start, piece.shape, strict=True)
            )
            values, before = np.asarray(shard.data)[own], found[there]
            assert (np.isnan(before) | (before == values)).all()
            found[there] = values
    return found


def parts_of(config: ModelConfig, count: int, path: str) -> list[tuple[int, int]]:
    if "qkv" not in path:
        return []
    own = config.shard(count)
    kv = config.num_kv_heads, own.num_kv_heads
    return [(config.num_heads, own.num_heads), kv, kv]


@pytest.mark.parametrize(("case", "count"), SHARED)
def test_random_weights_do_not_depend_on_the_number_of_devices(case: str, count: int):
    config, mesh = config_of(case), make_mesh(jax.devices(), count)
    options: dict[str, Any] = {"dtype": jnp.float32, "load_format": "dummy", "seed": 5}
    alone = model_parameters(plan_model("", config, **options).load())
    shared = model_parameters(plan_model("", config, mesh=mesh, **options).load())
    for path, array in alone.items():
        parts = parts_of(config, count, path)
        got = assembled(shared[path], array.shape, parts)
        np.testing.assert_array_equal(got, array, err_msg=path)


@pytest.mark.parametrize(("case", "count"), SHARED)
def test_checkpoint_gives_the_same_model_on_any_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, count: int
):
    """From tensors that lie apart and transposed, and GPT-2's, which have q, k and v in one; slab
    by slab."""
    monkeypatch.setattr(loader, "SLAB_BYTES", 700)
    config, mesh = config_of(case), make_mesh(jax.devices(), count)
    specs, rng = (
        model_parameters(make_abstract_model(config, jnp.float32)),
        np.random.default_rng(count),
    )
    tensors: dict[str, np.ndarray] = {}
    for rule in weight_rules(config).rules:
        if rule.target in specs:
            shape = rule.shape or specs[rule.target].shape
            axes = rule.file_axes or [(axis,) for axis in range(len(shape))]
            size = [math.prod(shape[axis] for axis in own) for own in axes]
            tensors[rule.source] = rng.standard_normal(size).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    alone = model_parameters(plan_model(tmp_path, config, dtype=jnp.float32).load())
    shared = model_parameters(plan_model(tmp_path, config, dtype=jnp.float32, mesh=mesh).load())
    for path, array in alone.items():
        got = assembled(shared[path], array.shape, parts_of(config, count, path))
        np.testing.assert_array_equal(got, array, err_msg=path)


def test_sharded_embedding_clamps_ids_out_of_range():
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None
    rows = jnp.arange(8, dtype=jnp.float32).reshape(8, 1)

    def read(own: jax.Array, ids: jax.Array) -> jax.Array:
        table = Embedding(4, 1, dtype=jnp.float32, is_sharded=True)
        table.weight[...] = own
        return table(ids)

    ids = jnp.asarray([-1, 0, 3, 4, 7, 8, 99], jnp.int32)
    specs = PartitionSpec("tensor"), PartitionSpec()
    run = jax.shard_map(read, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    assert jax.jit(run)(rows, ids).ravel().tolist() == [0, 0, 3, 4, 7, 7, 7]


def test_sharded_config_cannot_be_sharded_again():
    config, mesh = config_of("heads"), make_mesh(jax.devices(), 2)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2: shard the whole"):
        config.shard(2).shard(2)
    limits = RuntimeConfig(16, 4, 16, 2, 8, config.vocab_size, Backend.XLA)
    with pytest.raises(
        ValueError, match="tensor_parallel_size is 1, which is not the number of devices"
    ):
        DeviceShapes.of(config, limits, jnp.float32, mesh)


def test_all_reduce_runs_in_every_iteration_of_a_loop():
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None
    table = Embedding(97, 4, dtype=jnp.float32)

    def burst(ids: jax.Array, peer_header: jax.Array) -> jax.Array:
        def turn(ids: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            rows = table(ids, peer_header)
            return jnp.argmax(rows, axis=1).astype(jnp.int32), rows

        return jax.lax.scan(turn, ids, None, length=3)[1]

    specs = {"in_specs": (PartitionSpec(), PartitionSpec(MESH_AXIS)), "out_specs": PartitionSpec()}
    run = jax.jit(jax.shard_map(burst, mesh=mesh, check_vma=False, **specs))
    text = run.lower(jnp.zeros(2, jnp.int32), jnp.zeros(20, jnp.int32)).compile().as_text()
    assert text is not None
    before, after = text.split("\nENTRY ")
    assert "all-reduce(" in before
    assert "all-reduce(" not in after


@pytest.mark.gpu2
def test_sharded_rows_are_quantized_like_whole_rows():
    mesh = make_mesh(jax.devices(), 2)
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((8, 256)), jnp.float32)

    def each(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_rows(part, reduce_max=all_max, backend=Backend.XLA)

    parts = PartitionSpec(None, MESH_AXIS)
    specs = {"in_specs": parts, "out_specs": (parts, PartitionSpec()), "check_vma": False}
    found = jax.jit(jax.shard_map(each, mesh=mesh, **specs))(rows)
    wanted = jax.jit(lambda x: quantize_rows(x, backend=Backend.XLA))(rows)
    for own, whole in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(own.astype(jnp.float32), whole.astype(jnp.float32))
