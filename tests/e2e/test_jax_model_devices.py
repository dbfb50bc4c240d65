"""Test engines of a `JaxModel` whose parameters are on several devices. The devices are GPUs or
virtual CPU devices."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from e2e_options import LOOPS, make_workload
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from test_batch_invariance import optimized_programs  # noqa: F401  # a fixture
from test_fused_jax_model import FUSED, ROWS, changed, fused_params
from test_jax_model import (
    GREEDY,
    PROMPTS,
    REQUESTS,
    SPECULATION,
    TINY,
    greedy_tokens,
    make_engine,
    tiny_params,
    tokens,
    user_settings,
)

from examples import fused_jax_llama, plain_jax_llama
from jpaged import Engine, JaxModel, SamplingParams
from jpaged.compile import builder
from jpaged.engine import startup
from jpaged.models import model_devices
from jpaged.models.sizes import JaxModelSizes

pytestmark = pytest.mark.gpu2

VOCAB_SIZE = 128  # half of the embedding table has a multiple of 64 rows, as Hopper kernels need


class Sizes(NamedTuple):
    """Sizes of a Qwen3 model with two layers."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int

    @property
    def config(self) -> dict[str, Any]:
        """Config of the model, as the examples read it."""
        return {
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "head_dim": self.head_size,
            "num_hidden_layers": 2,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 128,
            "eos_token_id": None,
        }


SMALL = Sizes(width=64, heads=8, kv_heads=4, head_size=16, inner=96)
# On two devices, the kernels for Hopper GPUs support these sizes.
WIDE = Sizes(width=256, heads=4, kv_heads=2, head_size=128, inner=256)


@cache
def weights(seed: int = 0, sizes: Sizes = SMALL) -> dict[str, jax.Array]:
    """Return random tensors of a checkpoint."""
    rng = np.random.default_rng(seed)
    width, queries, keys = sizes.width, *(it * sizes.head_size for it in sizes[1:3])
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (sizes.inner, width),
        "mlp.up_proj": (sizes.inner, width),
        "mlp.down_proj": (width, sizes.inner),
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    norms |= {"self_attn.q_norm": sizes.head_size, "self_attn.k_norm": sizes.head_size}
    shapes |= {name: (size,) for name, size in norms.items()}
    found = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(sizes.config["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    found |= {"model.embed_tokens.weight": (VOCAB_SIZE, width), "model.norm.weight": (width,)}
    random = {name: rng.normal(size=shape) / 4 for name, shape in found.items()}
    random = {name: it + (it.ndim == 1) for name, it in random.items()}
    # With large embeddings, answers repeat tokens, so that the model accepts n-gram drafts.
    random["model.embed_tokens.weight"] *= 4
    return {name: jnp.asarray(it, jnp.float32) for name, it in random.items()}


def split_plain(path: str) -> int | None:
    """Return the axis along which devices split a parameter of `plain_jax_llama`."""
    if any(name in path for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
        return 0
    return 1 if "o_proj" in path or "down_proj" in path else None


def split_fused(path: str) -> int | None:
    """Return the axis along which devices split a parameter of `fused_jax_llama`."""
    axes = {"'embed'": 0, "'qkv'": 1, "'gate_up'": 2, "'out'": 0, "'down'": 0}
    return next((axis for name, axis in axes.items() if name in path), None)


EXAMPLES: dict[str, tuple[Callable[..., JaxModel], Callable[..., Any], Callable[..., Any]]] = {
    "plain": (plain_jax_llama.make_model, lambda it, _: it, split_plain),
    "fused": (fused_jax_llama.make_model, fused_jax_llama.fuse, split_fused),
}


def make_mesh(count: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """Return a mesh with an axis of one device, and an axis of `count` devices."""
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    devices = np.array(jax.local_devices()[:count]).reshape(1, count)
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def shard(params: Any, mesh: Mesh, split: Callable[[str], int | None]) -> Any:
    """Split the parameters over the axis "model" of a mesh."""

    def place(path: Any, leaf: jax.Array) -> jax.Array:
        axis = split(jax.tree_util.keystr(path))
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "model")
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map_with_path(place, params)


def sharded_example(
    name: str, mesh: Mesh, seed: int = 0, dtype: Any = jnp.float32, sizes: Sizes = SMALL
) -> tuple[JaxModel, Any]:
    """Return an example model, and its parameters on a mesh."""
    make, fuse, split = EXAMPLES[name]
    with user_settings():
        fused = fuse(weights(seed, sizes), sizes.config)
        params = jax.tree.map(lambda it: it.astype(dtype), fused)
    model = make(sizes.config)
    if name == "plain":
        model = replace(
            model,
            forward=with_float32_products(model.forward),
            logits=with_float32_products(model.logits),
        )
    return model, shard(params, mesh, split)


def with_float32_products(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose matrix products use float32. By default, XLA rounds their factors to
    TF32 on a GPU."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return function(*args)

    return run


@pytest.fixture(scope="module")
def expected() -> Callable[[int], list[list[int]]]:
    """Return a function that maps the seed of the weights to the expected tokens.

    A model on one device, without a KV cache, computes the expected tokens.
    """
    model = plain_jax_llama.make_model(SMALL.config)

    @cache
    def compute(seed: int) -> list[list[int]]:
        with jax.default_matmul_precision("float32"):
            return [greedy_tokens(model, weights(seed), it) for it in PROMPTS]

    return compute


def check_census(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize(
    ("example", "count", "loop", "speculation"),
    [
        ("fused", 2, "overlapped", "drafts"),
        pytest.param("plain", 4, "bursts", "no drafts", marks=pytest.mark.full),
        pytest.param("plain", 2, "synchronous", "drafts", marks=pytest.mark.full),
        pytest.param("plain", 2, "bursts", "drafts", marks=pytest.mark.full),
        pytest.param("fused", 4, "synchronous", "no drafts", marks=pytest.mark.full),
        pytest.param("fused", 2, "bursts", "no drafts", marks=pytest.mark.full),
        pytest.param("fused", 4, "overlapped", "no drafts", marks=pytest.mark.full),
    ],
)
def test_several_devices_generate_the_tokens_of_one_device(
    expected: Callable[[int], list[list[int]]],
    example: str,
    count: int,
    loop: str,
    speculation: str,
):
    """The pool has room for 2 of the 3 requests, so that requests are swapped. Then the engine
    refuses weights on the wrong devices, and takes new weights."""
    mesh = make_mesh(count, AxisType.Explicit if example == "fused" else AxisType.Auto)
    options = {name: dict(value) for name, value in SPECULATION[speculation].items()}
    tight = {"num_blocks": 7, "preemption_mode": "swap", "max_model_len": 64}
    model, params = sharded_example(example, mesh)
    engine = make_engine(model, params, **LOOPS[loop], **tight, **options)
    for _ in range(2):  # the second run finds prefixes in the cache
        assert tokens(engine.generate(PROMPTS, GREEDY)) == expected(0)
    stats = engine.stats()
    assert stats.num_cached_tokens > 0
    assert stats.num_swapped_out_blocks > 0
    assert bool(stats.num_accepted_tokens) == bool(options)
    check_census(engine)
    new, others = (sharded_example(example, mesh, seed=1)[1] for _ in range(2))
    for wrong, message in (
        (shard(others, mesh, lambda _: None), "is replicated, but .* is split along axis"),
        (jax.device_put(others, jax.local_devices()[0]), "is on 1 device with"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(wrong)
    engine.update_weights(new)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected(1) != expected(0)
    check_census(engine)


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("loop", LOOPS)
def test_each_kind_of_request_gets_the_same_answer_on_one_and_two_devices(example: str, loop: str):
    prompts, params = make_workload(REQUESTS, 8, VOCAB_SIZE, max_tokens=24)
    model, arrays = sharded_example(example, make_mesh(2))
    alone = make_engine(model, jax.device_put(arrays, jax.local_devices()[0]), **LOOPS[loop])
    both = make_engine(model, arrays, **LOOPS[loop])
    one, two = (engine.generate(prompts, params) for engine in (alone, both))
    for own, other in zip(one, two, strict=True):
        assert [it.token_ids for it in own.outputs] == [it.token_ids for it in other.outputs]
    scores = [engine.score_completions([PROMPTS[0]], [[4, 5, 6]])[0] for engine in (alone, both)]
    np.testing.assert_allclose(scores[0].logprobs, scores[1].logprobs, atol=1e-4)
    check_census(both)


@pytest.mark.full
@pytest.mark.parametrize(
    "placed", ["whole weights", "split experts", "split vocabulary and inputs"]
)
def test_each_supported_split_of_a_weight_gives_the_same_tokens(placed: str):
    """The second layer has experts, and heads of 16 elements. The first layer has heads of 8
    elements. The engine pads them to 16, because all layers of its KV cache have one head size."""

    def split(path: str) -> int | None:
        if placed == "split experts":
            return 3 if "[1]['gate_up']" in path else 1 if "[1]['down']" in path else None
        if placed == "split vocabulary and inputs":
            return 1 if "embed" in path else 0 if "qkv" in path else None
        return None

    alone = make_engine(FUSED, fused_params())
    both = make_engine(FUSED, shard(fused_params(), make_mesh(2), split))
    assert tokens(both.generate(PROMPTS, GREEDY)) == tokens(alone.generate(PROMPTS, GREEDY))


@pytest.mark.full
@pytest.mark.usefixtures("optimized_programs")
def test_two_devices_compute_the_same_logprobs_for_a_prompt_alone_and_in_a_batch():
    model, params = sharded_example("fused", make_mesh(2), dtype=jnp.bfloat16, sizes=WIDE)
    engine = make_engine(model, params, batch_invariant=True, enable_prefix_caching=False)
    scored = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)

    def logprobs(prompts: list[list[int]]) -> list[list[float]]:
        found = engine.generate(prompts, scored)
        return [
            [next(iter(it.values())).logprob for it in output.outputs[0].logprobs or ()]
            for output in found
        ]

    prompts = [[3 + i, *range(5, 9 + 4 * i)] for i in range(7)]
    assert logprobs(prompts) == [logprobs([prompt])[0] for prompt in prompts]


@pytest.mark.full
def test_second_start_on_several_devices_loads_the_stored_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, params = sharded_example("fused", make_mesh(2))
    options = {"compilation_cache_dir": tmp_path, "max_model_len": 64}
    first = tokens(make_engine(model, params, **options).generate(PROMPTS, GREEDY))
    monkeypatch.setattr(builder, "_export", lambda _: pytest.fail("a program was traced"))
    assert tokens(make_engine(model, params, **options).generate(PROMPTS, GREEDY)) == first


def test_memory_account_reports_the_bytes_of_one_of_the_devices():
    model, params = sharded_example("fused", make_mesh(2))
    engine = make_engine(model, params, num_blocks=65)
    per_token = 2 * SMALL.config["num_hidden_layers"] * SMALL.kv_heads * SMALL.head_size * 4
    assert engine.memory_account.kv_cache * 2 == 65 * 16 * per_token
    halves = sum(it.addressable_shards[0].data.nbytes for it in jax.tree.leaves(params))
    assert engine.memory_account.weights == halves
    array = params["layers"][0]["qkv"]
    array.delete()  # simulates a function that donates the array
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        engine.generate(PROMPTS[:1], GREEDY)


@pytest.mark.parametrize("count", [1, 2])
def test_engine_sleeps_and_checks_new_weights_in_the_context_of_a_mesh(count: int):
    """In this context, JAX places new arrays on the mesh, and refuses arrays of other meshes."""
    mesh = make_mesh(2, AxisType.Explicit)
    model, params = sharded_example("plain", mesh)
    if count == 1:
        params = jax.device_put(params, jax.local_devices()[0])
    engine = make_engine(model, params)
    before = tokens(engine.generate(PROMPTS[:1], GREEDY))
    with jax.set_mesh(mesh):
        engine.sleep()
        engine.update_weights(params, check_finite=True)
        engine.wake_up()
        assert tokens(engine.generate(PROMPTS[:1], GREEDY)) == before
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    check_census(engine)


# Refusals


def place_params(place_embedding: Callable[[jax.Array, Mesh], jax.Array]) -> Any:
    """Return parameters that are replicated on two devices, except the embedding. The function
    `place_embedding` places the embedding."""
    mesh = make_mesh(2)
    params = shard(tiny_params(), mesh, lambda _: None)
    return {**params, "embed": place_embedding(tiny_params()["embed"], mesh)}


def on_two_axes(leaf: jax.Array, _: Mesh) -> jax.Array:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = Mesh(np.array(jax.local_devices()[:4]).reshape(2, 2), ("fsdp", "model"))
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("fsdp")))


def reversed_mesh(leaf: jax.Array, mesh: Mesh) -> jax.Array:
    other = Mesh(mesh.devices[:, ::-1], mesh.axis_names)
    return jax.device_put(leaf, NamedSharding(other, PartitionSpec()))


def unreduced(leaf: jax.Array, mesh: Mesh) -> jax.Array:
    """Return an unreduced array: each device holds a partial sum that is not yet all-reduced."""
    explicit = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    rows = jax.device_put(leaf, NamedSharding(explicit, PartitionSpec("model")))
    summands = NamedSharding(explicit, PartitionSpec(unreduced=frozenset({"model"})))
    return jax.jit(lambda it: jax.lax.dot(it.T, it, out_sharding=summands))(rows)


PARAMS: dict[str, tuple[Callable[[jax.Array, Mesh], Any], str]] = {
    "unreduced": (unreduced, r"params\['embed'\] is unreduced \(.*: sum them with jax.reshard"),
    "fsdp axis": (
        on_two_axes,
        r"params\['embed'\] is on a mesh with the axes fsdp=2 and model=2, but .* without an fsdp",
    ),
    "one device": (
        lambda leaf, _: jax.device_put(leaf, jax.local_devices()[0]),
        r"params\['embed'\] is on 1 device with .* a mesh of 2 devices \(data=1, model=2\): pass",
    ),
    "other order of devices": (reversed_mesh, "a mesh with other devices or another device order"),
    "host memory": (
        lambda leaf, mesh: jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
        ),
        r"params\['embed'\] is in pinned_host memory: pass jax.device_put",
    ),
    "NumPy array": (lambda leaf, _: np.asarray(leaf), "is a numpy.ndarray, not a JAX array"),
}


@pytest.mark.parametrize("name", PARAMS)
def test_unsupported_placement_of_a_parameter_is_refused(name: str):
    place_embedding, message = PARAMS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(params=place_params(place_embedding))


def test_sharding_without_a_mesh_is_refused(monkeypatch: pytest.MonkeyPatch):
    params = shard(tiny_params(), make_mesh(2), lambda _: None)

    # JAX has no other sharding that would pass the checks before this one.
    class OtherSharding:
        pass

    monkeypatch.setattr(model_devices, "NamedSharding", OtherSharding)
    with pytest.raises(ValueError, match="is on 2 devices with a NamedSharding: pass arrays with"):
        make_engine(params=params)


def test_mesh_with_devices_that_are_not_local_is_refused(monkeypatch: pytest.MonkeyPatch):
    params = shard(tiny_params(), make_mesh(2), lambda _: None)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    with pytest.raises(ValueError, match=r"\] is also on .*1, which is not one of jax.local_de"):
        make_engine(params=params)


def test_kv_heads_that_the_devices_cannot_split_are_refused():
    with pytest.raises(
        ValueError, match=r"layer 1 has num_kv_heads=1, which the 2 .* use 1 device,"
    ):
        make_engine(TINY, shard(tiny_params(), make_mesh(2), lambda _: None))
    with pytest.raises(ValueError, match="count=3 does not divide num_kv_heads=4: pass a divisor"):
        JaxModelSizes(64, 64, 2, 4, 16, 128, "float32").shard(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 is not the number of .* params, 2"),
        ({"num_compile_workers": 2}, "num_compile_workers=2 does not apply to params on 2 devices"),
    ],
)
def test_option_that_does_not_fit_the_devices_is_refused(options: dict[str, Any], message: str):
    model, params = sharded_example("plain", make_mesh(2))
    with pytest.raises(ValueError, match=message):
        make_engine(model, params, **options)


def jitted_logits(params: Any, hidden: Any, step: Any) -> Any:
    """Compute logits inside `jax.jit`. Operations of `step` then receive a new tracer instead of
    the parameter "embed"."""
    return jax.jit(step.project_vocabulary)(hidden, params["embed"])


OPERATIONS: dict[str, tuple[Any, Callable[[str], int | None], str]] = {
    "computed weight": (
        changed(lambda step: step.project(ROWS, ROWS.T)),
        lambda _: None,
        "project: weight is computed by the function, .* Pass an unchanged array of params",
    ),
    "weight of a jitted function": (
        replace(FUSED, logits=jitted_logits),
        lambda _: None,
        "project_vocabulary: table is computed by the function, .* through jax.jit, jax.checkpoint",
    ),
    "gate and up": (
        FUSED,
        lambda path: 0 if "[0]['gate_up']" in path else None,
        r"gated_project: weight \[D, 2, F\] is split over the devices along axis 0, but must be sp",
    ),
    "whole experts": (
        FUSED,
        lambda path: 0 if "[1]['down']" in path else None,
        r"experts: down \[E, F, D\] is split over the devices along axis 0, but must be split al",
    ),
    "half of the experts' weights": (
        FUSED,
        lambda path: 1 if "[1]['down']" in path else None,
        "experts: only one of gate_up and down is split",
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_weight_that_an_operation_does_not_support_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    model, split, message = OPERATIONS[name]
    monkeypatch.setattr(startup, "Compilation", lambda *_: pytest.fail("compilation started"))
    with pytest.raises(ValueError, match=message):
        make_engine(model, shard(fused_params(), make_mesh(2), split))
