"""Check how many kernels the steps of published models launch on an H200. The tests lower the steps
on a host without a GPU."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from bench.common import ALL_SHAPES, SHAPES
from examples import fused_jax_llama
from jpaged.compile.recipes import Recipe, Recipes
from jpaged.compile.sizing import GPU_DEFAULTS
from jpaged.compile.workers import select_worker_recipes
from jpaged.config import LogprobsMode, SpeculativeConfig
from jpaged.models.config import ModelConfig
from jpaged.models.jax_model import JaxDecoder, JaxModel, plan_jax_model
from jpaged.models.model_devices import ModelDevices
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import axis_sharding, make_mesh
from jpaged.models.sizes import JaxModelSizes, ModelSizes
from jpaged.models.weight_plan import make_abstract_model
from jpaged.runtime.drafting import make_drafter
from jpaged.runtime.programs import DeviceShapes, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import SCORED_GREEDY, SamplerLevel
from jpaged.sampling_params import MAX_LOGPROBS
from pallas_kernels import NUM_TOKEN_COLUMNS, Backend, tuning
from pallas_kernels.attention import prefill_hopper
from tests.covering import covering

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
KERNEL, PRODUCT = "stablehlo.custom_call @__gpu$xla.gpu.triton", "stablehlo.dot_general"
HOPPER_KERNEL, ALL_REDUCE = "stablehlo.custom_call @mosaic_gpu", '"stablehlo.all_reduce"'
NUM_LAYERS = 4

# jpaged launches these kernels per layer: two norms (each adds a residual first), attention, and in
# wide models the activation. XLA launches four GEMMs, and in narrow models the activation.
KERNELS_PER_LAYER, PRODUCTS_PER_LAYER = 4, 4
NUM_LEVELS = 4
BURST = "decode_burst", (8, SCORED_GREEDY)
FLOAT8 = "float8_e4m3fn"
reads_device_from_mesh = pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="newer JAX reads the device kind from the mesh, whose devices are CPUs here",
)
each_kind_of_step = pytest.mark.parametrize(
    "name",
    [("decode", 64), pytest.param(BURST, marks=pytest.mark.full), ("prefill", (512, 8))],
    ids=str,
)


def all_recipes(
    shape: str,
    num_layers: int,
    num_devices: int = 1,
    kv_cache_dtype: str | None = None,
    **options: Any,
) -> dict[Any, Recipe]:
    """Return a dict from program names to compilation inputs (`Recipe`), for the first `num_layers`
    layers of the published model `shape`."""
    config = read_model_config({**SHAPES[shape], "num_hidden_layers": num_layers})
    config = replace(config, kv_cache_dtype=kv_cache_dtype)
    return recipes_of(config, num_devices, **options)


def recipes_of(config: ModelConfig, num_devices: int, **options: Any) -> dict[Any, Recipe]:
    """Return a dict from program names to the compilation inputs (`Recipe`) of all programs that a
    GPU engine compiles."""
    mesh = make_mesh(jax.devices(), num_devices)
    split = SplitModel.of(make_abstract_model(config, jnp.bfloat16, mesh))
    return recipes_of_split(split, config.shard(num_devices), **options)


def recipes_of_split(split: SplitModel, sizes: ModelSizes, **options: Any) -> dict[Any, Recipe]:
    """Return a dict from program names to compilation inputs (`Recipe`). `sizes` are the model
    sizes of one device's shard."""
    limits = GPU_DEFAULTS.max_num_seqs, GPU_DEFAULTS.max_num_batched_tokens
    runtime = RuntimeConfig(
        16,
        1000,
        2048,
        *limits,
        sizes.vocab_size,
        Backend.TRITON,
        num_scheduler_steps=GPU_DEFAULTS.num_scheduler_steps,
        **options,
    )
    shapes = DeviceShapes.of(sizes, runtime, jnp.dtype(jnp.bfloat16), split.mesh)
    return {recipe.name: recipe for recipe in Recipes(split, shapes, runtime)}


@cache
def step(shape: str, *name: Any) -> str:
    return lowered_for_gpu(all_recipes(shape, NUM_LAYERS)[name])


def lowered(recipe: Recipe, step: Any) -> str:
    traced = step.trace(*recipe.arguments, **recipe.keywords)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def on_gpu(device: AbstractDevice = H200) -> Any:
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered_for_gpu(recipe: Recipe, device: AbstractDevice = H200) -> str:
    with on_gpu(device):
        return lowered(recipe, recipe.jitted_step)


def stored(recipe: Recipe) -> Any:
    """Export a program for CUDA, serialize the program, and return the deserialized program.

    `recipe` contains the compilation inputs: the step function and the shapes of the arguments.
    """
    with on_gpu():
        return export.deserialize(bytearray(recipe.exported(("cuda",)).serialize()))


def function_bodies(text: str) -> dict[str, str]:
    return dict(re.findall(r"func\.func (?:public|private) @(\S+?)\((.*?)\n  \}", text, re.DOTALL))


def launches(text: str, *more: str) -> Counter:
    """Count Triton kernels, Mosaic GPU kernels and GEMMs in the StableHLO `text`, in `main` and the
    functions that it calls. Also count each operation name in `more`."""
    bodies = function_bodies(text)

    @cache
    def count(name: str) -> Counter:
        counted = KERNEL, HOPPER_KERNEL, PRODUCT, *more
        total = Counter({what: bodies[name].count(what) for what in counted})
        for called in re.findall(r"\bcall @(\w+)", bodies[name]):
            total += count(called)
        return total

    return count("main")


@pytest.mark.parametrize(("shape", "rows"), covering(SHAPES, [8, 64], strength=1))
def test_decode_step_launches_no_more_kernels_than_recorded(shape: str, rows: int):
    counted = launches(step(shape, "decode", rows))
    assert NUM_LAYERS <= counted[KERNEL] <= NUM_LAYERS * KERNELS_PER_LAYER
    assert NUM_LAYERS <= counted[PRODUCT] <= NUM_LAYERS * PRODUCTS_PER_LAYER + 1  # the output head


@pytest.mark.parametrize("rows", [8, pytest.param(32, marks=pytest.mark.full), 256])
def test_multi_step_decode_program_contains_the_decode_step_once(rows: int):
    names = ("decode", rows), ("decode_burst", (rows, SCORED_GREEDY))
    single, burst = (step("qwen3-0.6b", *name) for name in names)
    assert burst.count("stablehlo.while") == 1 + single.count("stablehlo.while")
    assert launches(burst) == launches(single) + Counter({KERNEL: 2})  # sampling and scores


def test_a_prefill_step_has_no_loop():
    assert "stablehlo.while" not in step("qwen3-0.6b", "prefill", (512, 8))


@pytest.mark.parametrize("shape", covering(SHAPES, strength=0, keep=lambda it: it == "qwen3-0.6b"))
def test_prefill_step_with_many_sequences_adds_one_decode_attention_per_layer(shape: str):
    """A prefill step may include decode rows: sequences with one new token. With few sequences, the
    prefill attention kernel computes the decode rows. With many sequences, a decode kernel does."""
    kernels = [launches(step(shape, "prefill", (512, seqs))) for seqs in (8, 256)]
    assert [counted[HOPPER_KERNEL] for counted in kernels] == [NUM_LAYERS] * 2
    few, many = (counted[KERNEL] for counted in kernels)
    assert many - few == NUM_LAYERS
    # Besides attention, one more launch per layer rotates the keys of all tokens, and writes keys
    # and values to the KV cache.
    assert many <= NUM_LAYERS * (KERNELS_PER_LAYER + 1)


DRAFTS = SpeculativeConfig(num_speculative_tokens=3)
JAX_MODEL_STEPS = [
    ("decode", 64),
    ("prefill", (512, 8)),
    pytest.param(("verify", (8, 1, SamplerLevel.GREEDY, make_drafter(DRAFTS))), id="verify"),
]


@pytest.mark.parametrize("name", JAX_MODEL_STEPS, ids=str)
def test_jax_model_step_launches_one_kv_write_and_one_attention_per_layer(name: tuple):
    def forward(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
        x = params[tokens]
        for layer in range(2):
            heads = x.reshape(-1, 4, 64)
            x += step.attend(layer, heads, heads, heads, window=(100, None)[layer]).reshape(x.shape)
        return x

    model = JaxModel(forward, lambda params, x: x @ params.T, 2, 4, 64, 128, 2048)
    params = jnp.zeros((128, 256), jnp.bfloat16)
    plan = plan_jax_model(model, params, jax.local_devices()[0])
    recipes = recipes_of_split(SplitModel.of(plan.load()), plan.config, speculation=DRAFTS)
    counted = launches(lowered_for_gpu(recipes[name]))
    assert counted[PRODUCT] == 1  # the logits
    assert counted[KERNEL] + counted[HOPPER_KERNEL] == 2 * 2


def fused_jax_recipes(num_layers: int, num_devices: int = 1) -> dict[Any, Recipe]:
    """Return a dict from program names to compilation inputs (`Recipe`), for a `JaxModel` with the
    fused operations and the first `num_layers` layers of Qwen3-0.6B."""
    fields = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": num_layers}
    config = read_model_config(fields)
    width, inner, size = config.hidden_size, fields["intermediate_size"], config.head_size
    heads, kv_heads = config.num_heads * size, config.num_kv_heads * size
    sizes = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    sizes |= {f"self_attn.{it}_norm": (size,) for it in "qk"}
    sizes |= {f"self_attn.{it}_proj": (kv_heads, width) for it in "kv"}
    sizes |= {"self_attn.q_proj": (heads, width), "self_attn.o_proj": (width, heads)}
    sizes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    sizes |= {"mlp.down_proj": (width, inner)}
    weights = {
        f"model.layers.{layer}.{name}.weight": it
        for layer in range(num_layers)
        for name, it in sizes.items()
    }
    weights |= {"model.embed_tokens.weight": (config.vocab_size, width)}
    weights |= {"model.norm.weight": (width,)}
    shapes = {name: jax.ShapeDtypeStruct(it, jnp.bfloat16) for name, it in weights.items()}
    params = jax.eval_shape(lambda it: fused_jax_llama.fuse(it, fields), shapes)
    model = fused_jax_llama.make_model({"eos_token_id": None, **fields})
    own = JaxModelSizes(
        config.vocab_size,
        width,
        num_layers,
        config.num_kv_heads,
        size,
        model.max_positions,
        "bfloat16",
    )
    devices = None
    if (mesh := make_mesh(jax.devices(), num_devices)) is not None:
        leaves, tree = jax.tree.flatten_with_path(params)
        axes = [split_fused(jax.tree_util.keystr(path)) for path, _ in leaves]
        placed = [
            jax.ShapeDtypeStruct(it.shape, it.dtype, sharding=axis_sharding(mesh, axis))
            for (_, it), axis in zip(leaves, axes, strict=True)
        ]
        params, devices = jax.tree.unflatten(tree, placed), ModelDevices(mesh, tuple(axes))
    split = SplitModel.of(JaxDecoder(model, own, params, devices))
    return recipes_of_split(split, own.shard(num_devices), speculation=DRAFTS)


def split_fused(path: str) -> int | None:
    """Return the axis along which devices split a parameter of `fused_jax_llama`."""
    axes = {"'embed'": 0, "'qkv'": 1, "'gate_up'": 2, "'out'": 0, "'down'": 0}
    return next((axis for name, axis in axes.items() if name in path), None)


def lowered_with_numpy_rules(recipe: Recipe) -> str:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return lowered_for_gpu(recipe)


@pytest.mark.full
@pytest.mark.parametrize("name", [("decode", 64), ("prefill", (512, 8))], ids=str)
def test_fused_jax_model_launches_the_same_kernels_as_the_built_in_qwen3(name: tuple):
    found = launches(lowered_with_numpy_rules(fused_jax_recipes(2)[name]))
    assert found == launches(lowered_for_gpu(all_recipes("qwen3-0.6b", 2)[name]))


@pytest.fixture
def mesh_of_hopper_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels treat the CPU devices of a mesh as Hopper GPUs.

    `on_gpu` sets the GPU for one device only. With a mesh, the kernels see the devices of the mesh.
    """
    jax.clear_caches()  # a cached trace has the kernels of another GPU
    monkeypatch.setattr(tuning, "HOPPER_GPUS", (*tuning.HOPPER_GPUS, "cpu"))
    yield
    jax.clear_caches()


@pytest.mark.full
@pytest.mark.usefixtures("mesh_of_hopper_gpus")
@pytest.mark.parametrize("name", JAX_MODEL_STEPS, ids=str)
def test_each_device_of_a_jax_model_launches_the_kernels_of_one_device(name: tuple):
    """With two devices, each layer also has two all-reduces: one after the attention, and one after
    the feed-forward."""
    alone, both = (lowered_with_numpy_rules(fused_jax_recipes(2, count)[name]) for count in (1, 2))
    kinds = KERNEL, HOPPER_KERNEL, PRODUCT
    one, two = launches(alone), launches(both, *kinds, ALL_REDUCE)
    assert one[KERNEL] > 0
    assert {kind: two[kind] for kind in kinds} == {kind: one[kind] for kind in kinds}
    assert two[ALL_REDUCE] == 2 * 2
    assert _num_reused(both) == _num_reused(alone)


@pytest.mark.parametrize("name", JAX_MODEL_STEPS, ids=str)
def test_identical_layers_of_a_jax_model_share_lowered_functions(name: tuple):
    few, many = (lowered_with_numpy_rules(fused_jax_recipes(count)[name]) for count in (2, 5))
    # A layer has seven calls: two norms, three plain GEMMs, one gated GEMM and one attention.
    assert many.count(" call @") == few.count(" call @") + 3 * 7
    for line in ("func.func private", "stablehlo."):
        assert many.count(line) == few.count(line)
    found, added = launches(many), launches(few)
    assert found[KERNEL] + found[HOPPER_KERNEL] > added[KERNEL] + added[HOPPER_KERNEL]


def test_lowering_does_not_search_for_the_python_module_of_the_triton_dialect(
    monkeypatch: pytest.MonkeyPatch,
):
    searched = []

    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            searched.append(name)

    recipe = all_recipes("qwen3-0.6b", 1)["decode", 16]
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    lowered_for_gpu(recipe)
    assert not [name for name in searched if name.endswith(".tt")]


@reads_device_from_mesh
@each_kind_of_step
def test_tensor_parallel_step_has_two_all_reduces_per_layer(name: tuple):
    counted = launches(
        lowered_for_gpu(all_recipes("qwen3-0.6b", 2, num_devices=2)[name]), ALL_REDUCE
    )
    assert counted[ALL_REDUCE] == 2 * 2 + 1  # one for the token embeddings
    assert counted[KERNEL] >= 2 * 3


@reads_device_from_mesh
@each_kind_of_step
def test_tensor_parallel_step_all_reduces_through_peer_memory(name: tuple):
    """XLA performs only the first all-reduce, which sums the token embeddings."""
    with on_gpu():
        recipe = all_recipes("qwen3-0.6b", 2, num_devices=2, has_peer_memory=True)[name]
        text = lowered(recipe, recipe.jitted_step)
        exported = recipe.exported(("cuda",))
    kernel = "device_sum" if name[0] == "prefill" else "device_sum_norm"
    turns = [f"{kernel}_{turn}" for turn in (0, 1)]
    counted = launches(text, ALL_REDUCE, *turns)
    assert counted[ALL_REDUCE] == 1
    # The lowered text of a kernel call contains the kernel's name twice.
    assert [counted[turn] for turn in turns] == [2 * 2, 2 * 2]
    assert recipe.keywords["peer_header"].shape == (2 * 10,)
    assert not any("peer_header" in it for it in recipe.donate)
    export.deserialize(bytearray(exported.serialize()))


@reads_device_from_mesh
@pytest.mark.parametrize("by_expert", [True, pytest.param(False, marks=pytest.mark.full)])
def test_mixture_of_experts_layers_all_reduce_through_peer_memory(by_expert: bool):
    """A mixture-of-experts layer needs the same all-reduces as a dense feed-forward layer, with
    expert parallelism and with tensor parallelism."""
    fields = {**ALL_SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 2}
    config = replace(read_model_config(fields), enable_expert_parallel=by_expert)
    with on_gpu():
        recipe = recipes_of(config, 2, has_peer_memory=True)["decode", 8]
        text = lowered(recipe, recipe.jitted_step)
    turns = [f"device_sum_norm_{turn}" for turn in (0, 1)]
    counted = launches(text, ALL_REDUCE, *turns)
    assert counted[ALL_REDUCE] == 1
    assert [counted[turn] for turn in turns] == [2 * 2, 2 * 2]


@reads_device_from_mesh
def test_only_samplers_that_need_all_logits_of_a_row_gather_logits():
    made = all_recipes("qwen3-0.6b", 2, num_devices=2)

    def gathered(*name: Any) -> list[str]:
        return re.findall(r"stablehlo\.all_gather.*-> tensor<(\S+)>", lowered_for_gpu(made[name]))

    best, whole = ["2x64x1x2xi32"], ["2x64x75968xf32"]
    assert gathered("decode", 64) == gathered("prefill", (512, 8)) == gathered("mask", 64) == []
    assert gathered("sample", (64, SamplerLevel.GREEDY)) == best
    assert gathered("sample", (64, SamplerLevel.RANDOM)) == best
    assert gathered("sample", (64, SCORED_GREEDY)) == whole
    assert gathered("sample", (64, SamplerLevel.TRUNCATED)) == whole
    scores = f"2x128x{NUM_TOKEN_COLUMNS + 2 * MAX_LOGPROBS}xi32"
    assert gathered("prompt_logprobs", 1024) == [scores]
    assert gathered("score_targets", 1024) == ["2x1x1024x3xf32"]
    num_samplers = len([name for name in made if name[0] == "sample"])
    assert num_samplers == (NUM_LEVELS + 1) * len([name for name in made if name[0] == "mask"])


def test_logprobs_mode_changes_only_programs_that_return_scores():
    modes = LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS
    raw, processed = (all_recipes("qwen3-0.6b", 1, logprobs_mode=mode) for mode in modes)

    def returns_scores(name: tuple) -> bool:
        parts = name[1] if isinstance(name[1], tuple) else ()
        levels = [part for part in parts if isinstance(part, SamplerLevel)]
        return any(SamplerLevel.LOGPROBS in level for level in levels)

    assert {name for name in raw if raw[name].key != processed[name].key} == {
        name for name in raw if returns_scores(name)
    }
    name = "sample", (8, SamplerLevel.TRUNCATED)
    assert lowered_for_gpu(raw[name]) == lowered_for_gpu(processed[name])


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 512, "n_layer": 3, "n_head": 8, "n_positions": 2048, "vocab_size": 997},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 512},
    "opt-350m": {"ffn_dim": 512, "word_embed_proj_dim": 256, "do_layer_norm_before": False},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gemma3_text": {"sliding_window": 512},
}


@reads_device_from_mesh
@pytest.mark.parametrize(
    ("family", "name"),
    covering(FAMILIES, [("decode", 64), BURST, ("prefill", (512, 8))], strength=1),
)
def test_all_reduces_alternate_exchange_buffers(family: str, name: tuple):
    """XLA performs the first all-reduce of each step, which synchronizes the devices. jpaged's
    kernel performs the others."""
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 512}
    sizes |= {"max_position_embeddings": 2048, "vocab_size": 1000, "intermediate_size": 512}
    if family in ("llama", "gemma3_text"):
        sizes |= {"head_dim": 64, "num_key_value_heads": 2}
    kind = {"model_type": "opt" if family == "opt-350m" else family}
    fields = sizes | kind | FAMILIES[family]
    if family == "gpt2":
        fields = kind | FAMILIES[family]
    elif family.startswith("opt"):
        del fields["intermediate_size"]
    with on_gpu():
        recipe = recipes_of(read_model_config(fields), num_devices=2, has_peer_memory=True)[name]
        order = sums_in_order(lowered(recipe, recipe.jitted_step))
    first = order.index("all_reduce")
    # The lowered text of a kernel call contains the kernel's name twice.
    assert order[first + 1 :] == ["0", "0", "1", "1"] * 3
    assert name != BURST or "while" in order[:first]


def sums_in_order(text: str) -> list[str]:
    """List the loops and all-reduces of a lowered program in execution order. An all-reduce by
    jpaged is listed as the index (0 or 1) of its exchange buffer."""
    bodies = function_bodies(text)

    def walk(name: str) -> Iterator[str]:
        found = r"\bcall @(\w+)|device_sum(?:_norm)?_(\d)|stablehlo\.(all_reduce|while)"
        for called, turn, other in re.findall(found, bodies[name]):
            if called:
                yield from walk(called)
            else:
                yield turn or other

    return [*walk("main")]


@reads_device_from_mesh
def test_all_reduces_of_long_prompts_use_xla():
    with on_gpu():
        made = all_recipes("qwen3-0.6b", 2, num_devices=2, has_peer_memory=True)
    text = lowered_for_gpu(made["prefill", (8192, 8)])
    assert launches(text, ALL_REDUCE)[ALL_REDUCE] == 2 * 2 + 1


def test_equal_layers_are_lowered_once():
    text = step("qwen3-0.6b", "decode", 8)
    # The first layer differs from the other layers: no residual is added before its norm.
    assert len(re.findall(r"func\.func private @_run_layer\w*\(", text)) == 2


WHOLE_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        (("decode", 8), H200),
        (BURST, H200),
        (("prefill", (512, 8)), H200),
        (("decode", 8), WHOLE_H200),
        pytest.param(BURST, WHOLE_H200, marks=pytest.mark.full),
    ],
    ids=["decode", "burst", "prefill", "fused decode", "fused burst"],
)
def test_exported_step_lowers_to_the_same_text_after_deserialization(
    name: tuple, device: AbstractDevice
):
    recipe = all_recipes("qwen3-0.6b", NUM_LAYERS)[name]
    with on_gpu(device):
        exported = recipe.exported(("cuda",))
    loaded = export.deserialize(bytearray(exported.serialize()))
    cold, warm = (
        lowered(recipe, recipe.step_from_export(program)) for program in (exported, loaded)
    )
    # JAX compiles the loaded step again if its lowered text differs from the exported step's text.
    assert warm == cold
    direct = lowered_for_gpu(recipe, device)
    counted = launches(warm)
    assert counted == launches(direct)
    assert _num_reused(warm) == _num_reused(direct) == num_state_arrays(name)
    if device is H200:  # the number of SMs is unknown, so the layers are not fused
        assert warm.count(HOPPER_KERNEL) == direct.count(HOPPER_KERNEL) == (name[0] == "prefill")
        return
    num_links = NUM_LAYERS - 1 if jax.__version_info__ >= (0, 11) else 0
    num_products = PRODUCTS_PER_LAYER * (NUM_LAYERS - num_links)
    assert counted[HOPPER_KERNEL] == num_links + num_products


def test_every_compiled_program_can_be_exported_and_deserialized():
    kinds = {
        (*name[:1], name[1][1]) if name[0] == "sample" else name[:1]: recipe
        for name, recipe in all_recipes("qwen3-0.6b", 1).items()
    }
    assert len(kinds) == 11 + NUM_LEVELS
    made = all_recipes("qwen3-0.6b", 1, kv_cache_dtype=FLOAT8).items()
    kinds |= {(FLOAT8, it[0]): recipe for it, recipe in made if it[0] in ("decode", "prefill")}
    assert all(stored(recipe).platforms == ("cuda",) for recipe in kinds.values())


def test_no_sampling_program_sorts_logits():
    made = all_recipes("qwen3-0.6b", 1)
    names = [name for name in made if name[0] == "sample" and name[1][0] == 8]
    names.append(next(name for name in made if name[0] == "prompt_logprobs"))
    assert len(names) == NUM_LEVELS + 1
    for name in names:
        assert not re.findall(r"\b(?:sort|top_?k)\b", step("qwen3-0.6b", *name))


@pytest.mark.parametrize(
    ("shape", "name"),
    covering(
        ["qwen3-0.6b", "llama-3.1-8b"],
        [("decode", 8), ("decode", 256), ("prefill", (512, 256))],
        strength=1,
    ),
)
def test_float8_kv_cache_does_not_change_the_kernels_of_a_step(shape: str, name: tuple):
    text = lowered_for_gpu(all_recipes(shape, NUM_LAYERS, kv_cache_dtype=FLOAT8)[name])
    narrow, wide = launches(text), launches(step(shape, *name))
    # With an FP8 pool, prefill has two more kernels per layer. One converts FP8 blocks to bfloat16
    # in a buffer. The other computes attention over the blocks for which the buffer has no room.
    more = 2 * NUM_LAYERS if name[0] == "prefill" else 0
    assert narrow[KERNEL] == wide[KERNEL] + more
    assert [narrow[kind] for kind in (HOPPER_KERNEL, PRODUCT)] == [
        wide[kind] for kind in (HOPPER_KERNEL, PRODUCT)
    ]
    assert _num_reused(text) == num_state_arrays(name)
    assert len(re.findall(r"func\.func private @_run_layer\w*\(", text)) == 2
    outside = re.sub(r"backend_config = .*", "", text)  # without kernels
    assert "f8E4M3FN" not in outside
    # XLA only reshapes the packed FP8 pairs: any other operation would copy the pool.
    assert {*re.findall(r"stablehlo\.(\w+) .*ui16", outside)} == {"reshape"}


def test_prefill_programs_with_the_same_number_of_tokens_share_the_hopper_kernel(
    monkeypatch: pytest.MonkeyPatch,
):
    seen, attend = [], prefill_hopper._attend

    @wraps(attend)
    def counted(*arrays, **options):
        seen.append(arrays)
        return attend(*arrays, **options)

    def kernels(text: str) -> set[str]:
        return set(re.findall(r"kernel_hash = (\".+?\"),", text))

    # The programs for up to 8 and up to 256 sequences come from separate calls of `all_recipes`, so
    # each program lowers the kernel. XLA compiles equal kernels once.
    few, many = (
        lowered_for_gpu(all_recipes("qwen3-0.6b", 1)["prefill", (512, n)]) for n in (8, 256)
    )
    assert len(kernels(few)) == 1
    assert kernels(few) == kernels(many)

    monkeypatch.setattr(prefill_hopper, "_attend", counted)
    made = all_recipes("qwen3-0.6b", NUM_LAYERS)
    texts = [lowered_for_gpu(made["prefill", (512, seqs)]) for seqs in (8, 256)]
    assert len(seen) == 1
    assert [launches(text)[HOPPER_KERNEL] for text in texts] == [NUM_LAYERS] * 2


def num_state_arrays(name: tuple) -> int:
    """Return the number of arrays that a program updates in place. These are the KV cache pool and
    the block tables. A multi-step decode program also updates tokens and sampling state.
    """
    return 2 * NUM_LAYERS + 1 + (4 if name == BURST else 0)


def _num_reused(text: str) -> int:
    (signature,) = re.findall(r"func\.func public @main\(.*", text)
    return signature.count("tf.aliasing_output")


def test_programs_that_do_not_use_the_kv_pool_are_compiled_by_the_same_workers():
    """Worker processes first compile the programs that do not use the KV cache pool, because the
    size of the pool is not known yet."""
    made = [*all_recipes("qwen3-0.6b", 1).values()]
    poolless = [recipe for recipe in made if not recipe.needs_pool]
    kinds = {"mask", "sample", "load_rows", "load_bias"}
    kinds |= {"gather_hidden", "prompt_logprobs", "score_targets"}
    assert {recipe.name[0] for recipe in poolless} == kinds
    for worker in range(8):
        alone = select_worker_recipes(poolless, worker, 8)
        assert select_worker_recipes(made, worker, 8)[: len(alone)] == alone


def test_engine_compiles_no_more_programs_than_recorded():
    assert len(all_recipes("qwen3-0.6b", 1)) <= 91


def test_programs_that_compile_slowly_are_spread_over_all_compile_workers():
    made = [*all_recipes("qwen3-0.6b", 1).values()]
    shares = [select_worker_recipes(made, i, 8) for i in range(8)]
    assert Counter(it.name for share in shares for it in share) == Counter(it.name for it in made)
    assert not any(share[0].needs_pool for share in shares)
    for kind, most in (("decode_burst", 1), ("prefill", 2), ("sample", 1)):
        sizes = [{it.name[1][0] for it in share if it.name[0] == kind} for share in shares]
        assert max(map(len, sizes)) == most


def test_steps_with_fused_layers_are_compiled_first():
    """XLA compiles the kernel of a fused layer only while no other compilation runs."""
    first, *bursts = [*all_recipes("qwen3-0.6b", NUM_LAYERS)][:3]
    assert first == ("decode", 8)
    assert [(kind, size) for kind, (size, _) in bursts] == 2 * [("decode_burst", 8)]
