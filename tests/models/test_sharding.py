"""Test the shards of a model on tensor-parallel devices."""

import math
from dataclasses import replace
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
from jpaged.models.weight_plan import make_abstract_model, model_parameters, plan_model
from jpaged.runtime.programs import DeviceShapes
from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend, quantize_rows
from tests.covering import covering

SHAPE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 8, "max_position_embeddings": 16}
LLAMA = SHAPE | {"model_type": "llama", "intermediate_size": 24, "head_dim": 4}
MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_key_value_heads": 8}
MOE |= {"num_experts": 8, "num_experts_per_tok": 2}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": SHAPE | {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 8},
    "opt": SHAPE | {"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16},
    "heads": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "groups": LLAMA | {"num_key_value_heads": 2, "attention_bias": True},
    "experts": LLAMA | MOE | {"vocab_size": 49, "decoder_sparse_step": 1},
    "whole-experts": LLAMA | MOE,
    "one-kv-head": LLAMA | {"num_key_value_heads": 1, "vocab_size": 49},
}
COUNTS = (2, 4, 8)
# "groups" and "one-kv-head" run on 8 devices, so that there are more devices than KV heads.
CASES_AND_COUNTS = covering(
    [pytest.param(it, marks=[pytest.mark.full] if it == "experts" else []) for it in CASES],
    (2, 8),
    strength=1,
    keep=lambda case, count: (
        count == (2 if case in ("gpt2", "opt", "heads", "whole-experts") else 8)
    ),
)


def config_of(case: str) -> ModelConfig:
    config = read_model_config(CASES[case])
    return replace(config, enable_expert_parallel=case == "whole-experts")


def test_sharded_axis_is_the_axis_that_is_smaller_on_each_device():
    assert shard_slices((6, 4), (6, 2), device_index=1, count=2) == [
        ShardSlice((0, 2), (0, 0), (6, 2))
    ]
    assert shard_slices((6, 4), (6, 4), device_index=1, count=2) == [
        ShardSlice((0, 0), (0, 0), (6, 4))
    ]
    assert sharded_axis((6, 4), (6, 2)) == 1
    assert sharded_axis((6,), (6,)) is None


def test_each_device_holds_its_own_query_key_and_value_heads():
    parts = [(4, 2), (2, 1), (2, 1)]
    assert shard_slices((3, 8, 5), (3, 4, 5), 1, 2, parts) == [
        ShardSlice((0, 2, 0), (0, 0, 0), (3, 2, 5)),
        ShardSlice((0, 5, 0), (0, 2, 0), (3, 1, 5)),
        ShardSlice((0, 7, 0), (0, 3, 0), (3, 1, 5)),
    ]


@pytest.mark.parametrize(
    ("count", "parts", "starts"),
    [
        # With 8 devices, 8 query heads and 2 KV heads, four devices hold the same KV head.
        (8, [(8, 1), (2, 1), (2, 1)], [[i, 8 + i // 4, 10 + i // 4] for i in range(8)]),
        # This case has 4 devices, 4 query heads, 2 KV heads, and 2 scale blocks for each head.
        (4, [(8, 2), (4, 2), (4, 2)], [[2 * i, 8 + i // 2 * 2, 12 + i // 2 * 2] for i in range(4)]),
    ],
    ids=["heads", "scale blocks"],
)
def test_kv_heads_are_replicated_if_there_are_more_devices_than_kv_heads(
    count: int, parts: list, starts: list
):
    whole, local = (sum(sizes) for sizes in zip(*parts, strict=True))
    held = [
        [it.unsharded_start[0] for it in shard_slices((whole,), (local,), index, count, parts)]
        for index in range(count)
    ]
    assert held == starts


@pytest.mark.parametrize(
    ("fields", "count", "complaint"),
    [
        (CASES["gpt2"], 3, "num_attention_heads=8"),
        (CASES["groups"], 3, "num_attention_heads=8"),
        (CASES["heads"], 7, "num_attention_heads=8; use 1 or 2 or 4 or 8"),
        (LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6}, 4,
         "num_key_value_heads=6; use 1 or 2 or 3 or 6"),
        (LLAMA | {"intermediate_size": 20}, 8, "intermediate_size=20; use 1 or 2 or 4"),
        (LLAMA | MOE | {"moe_intermediate_size": 20}, 8,
         "moe_intermediate_size=20 of an expert; use 1 or 2 or 4, or set enable_expert_parallel"),
        (LLAMA | MOE | {"moe_intermediate_size": 20, "num_experts": 6}, 8,
         "moe_intermediate_size=20 of an expert; use 1 or 2 or 4$"),
    ],
)  # fmt: skip
def test_error_for_an_indivisible_size_names_the_field(fields: dict, count: int, complaint: str):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={count} .*{complaint}"):
        read_model_config(fields).shard(count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("case", [*CASES])
def test_each_device_holds_the_expected_part_of_each_parameter(case: str, count: int):
    config, mesh = config_of(case), make_mesh(jax.devices(), count)
    whole = model_parameters(make_abstract_model(config, jnp.float32))
    sharded = model_parameters(make_abstract_model(config, jnp.float32, mesh))
    for path, spec in sharded.items():
        per_device, total = math.prod(per_device_shape(spec)), math.prod(whole[path].shape)
        projection = config.projections.get(path.removeprefix("layers.0.").rpartition(".")[0])
        is_matrix = path.endswith("weight") and projection is not None and "layers" in path
        is_table = path in ("embed.weight", "lm_head.weight") and config.vocab_size % count == 0
        if (
            is_table
            or (is_matrix and "qkv" not in path)
            or path.endswith(("mlp.gate_up", "mlp.down"))
        ):
            assert per_device * count == total, path
        elif is_matrix:
            heads = config.num_heads + 2 * max(config.num_kv_heads, count)
            assert per_device_shape(spec)[1] * count == heads, path
        elif not path.endswith("bias"):
            assert per_device == total, path


def assembled(array: jax.Array, whole: tuple[int, ...], parts: list[tuple[int, int]]) -> np.ndarray:
    """Return the whole array from the shards of all devices. Check that replicas are equal."""
    found = np.full(whole, np.nan, np.float32)
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    for device_index, shard in enumerate(shards):
        for piece in shard_slices(whole, shard.data.shape, device_index, len(shards), parts):
            unsharded, local = (
                tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                for start in (piece.unsharded_start, piece.local_start)
            )
            values, before = np.asarray(shard.data)[local], found[unsharded]
            assert (np.isnan(before) | (before == values)).all()
            found[unsharded] = values
    return found


def parts_of(config: ModelConfig, count: int, path: str) -> list[tuple[int, int]]:
    if "qkv" not in path:
        return []
    local = config.shard(count)
    kv = config.num_kv_heads, local.num_kv_heads
    return [(config.num_heads, local.num_heads), kv, kv]


def check_sharded(config: ModelConfig, count: int, folder: Path | str, **options: Any) -> None:
    """Check that loading on `count` devices gives the same parameters as on one device."""
    one, sharded = (
        model_parameters(plan_model(folder, config, dtype=jnp.float32, mesh=mesh, **options).load())
        for mesh in (None, make_mesh(jax.devices(), count))
    )
    for path, array in one.items():
        found = assembled(sharded[path], array.shape, parts_of(config, count, path))
        np.testing.assert_array_equal(found, array, err_msg=path)


@pytest.mark.parametrize(("case", "count"), CASES_AND_COUNTS)
def test_random_weights_do_not_depend_on_the_number_of_devices(case: str, count: int):
    check_sharded(config_of(case), count, "", load_format="dummy", seed=5)


@pytest.mark.parametrize(("case", "count"), CASES_AND_COUNTS)
def test_checkpoint_gives_the_same_model_on_any_number_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, count: int
):
    monkeypatch.setattr(loader, "SLAB_BYTES", 700)
    config, rng = config_of(case), np.random.default_rng(count)
    specs = model_parameters(make_abstract_model(config, jnp.float32))
    tensors: dict[str, np.ndarray] = {}
    for rule in weight_rules(config).rules:
        if rule.target in specs and not rule.is_alternative:
            shape = rule.shape or specs[rule.target].shape
            axes = rule.file_axes or [(axis,) for axis in range(len(shape))]
            size = [math.prod(shape[axis] for axis in merged) for merged in axes]
            tensors[rule.source] = rng.standard_normal(size).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    check_sharded(config, count, tmp_path)


def test_sharded_embedding_clamps_ids_out_of_range():
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None
    rows = jnp.arange(8, dtype=jnp.float32).reshape(8, 1)

    def read(local_rows: jax.Array, ids: jax.Array) -> jax.Array:
        table = Embedding(4, 1, dtype=jnp.float32, is_sharded=True)
        table.weight[...] = local_rows
        return table(ids)

    ids = jnp.asarray([-1, 0, 3, 4, 7, 8, 99], jnp.int32)
    specs = PartitionSpec("tensor"), PartitionSpec()
    run = jax.shard_map(read, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    assert jax.jit(run)(rows, ids).ravel().tolist() == [0, 0, 3, 4, 7, 7, 7]


def test_number_of_experts_that_devices_cannot_split_is_refused():
    config = read_model_config(LLAMA | MOE | {"num_experts": 6})
    with pytest.raises(ValueError, match="cannot split the model's num_experts=6; use 1 or 2"):
        replace(config, enable_expert_parallel=True).shard(8)


def test_sharded_config_cannot_be_sharded_again():
    config, mesh = config_of("heads"), make_mesh(jax.devices(), 2)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2: call this method on"):
        config.shard(2).shard(2)
    limits = RuntimeConfig(16, 4, 16, 2, 8, config.vocab_size, Backend.XLA)
    complaint = "tensor_parallel_size is 1, which is not the number of devices"
    with pytest.raises(ValueError, match=complaint):
        DeviceShapes.of(config, limits, jnp.float32, mesh)


def test_all_reduce_inside_a_loop_runs_in_every_iteration():
    mesh = make_mesh(jax.devices(), 2)
    assert mesh is not None
    table = Embedding(97, 4, dtype=jnp.float32)

    def burst(ids: jax.Array, peer_header: jax.Array) -> jax.Array:
        def iteration(ids: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            rows = table(ids, peer_header)
            return jnp.argmax(rows, axis=1).astype(jnp.int32), rows

        return jax.lax.scan(iteration, ids, None, length=3)[1]

    specs = {"in_specs": (PartitionSpec(), PartitionSpec(MESH_AXIS)), "out_specs": PartitionSpec()}
    run = jax.jit(jax.shard_map(burst, mesh=mesh, check_vma=False, **specs))
    text = run.lower(jnp.zeros(2, jnp.int32), jnp.zeros(20, jnp.int32)).compile().as_text()
    assert text is not None
    loop_body, entry = text.split("\nENTRY ")
    assert "all-reduce(" in loop_body
    assert "all-reduce(" not in entry


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
    for got, whole in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got.astype(jnp.float32), whole.astype(jnp.float32))
