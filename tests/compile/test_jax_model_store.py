"""Test that the program store identifies a user's functions by their traces, and never returns the
program of an older version."""

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpaged import Engine, JaxModel, SamplingParams
from jpaged.compile import lowered_workers
from jpaged.compile.builder import lower, store_program
from jpaged.compile.lowered_workers import LoweredPool
from jpaged.compile.recipes import Recipe, Recipes
from jpaged.compile.store import open_program_store
from jpaged.compile.workers import EngineSettings
from jpaged.config import SpeculativeConfig
from jpaged.models.jax_model import JaxDecoder, plan_jax_model
from jpaged.processes import Child
from jpaged.runtime.programs import DeviceShapes, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend

VOCAB_SIZE, DEVICE = 32, jax.local_devices()[0]
ZEROS = jnp.zeros((1, 16))
DECODE, LARGE_DECODE, SCORE = ("decode", 8), ("decode", 16), ("score_targets", 64)


def forward(
    params: Any,
    tokens: Any,
    positions: Any,
    step: Any,
    *,
    factor: float = 1.0,
    added: Any = ZEROS,
    names: str = "qkv",
    window: int | None = None,
) -> Any:
    x = params["embed"][tokens] * jnp.float32(factor) + added
    q, k, v = (step.project(x, params[name]).sum() for name in names)
    return x + step.attend(0, q, k, v, window=window).reshape(x.shape)


def logits(params: Any, hidden: Any, *, factor: float = 1.0) -> Any:
    return hidden @ params["embed"].T * jnp.float32(factor)


MODEL = JaxModel(forward, logits, 1, 2, 8, VOCAB_SIZE, 64)


@cache
def params() -> dict[str, jax.Array]:
    keys = dict(zip(["embed", *"qkv"], jax.random.split(jax.random.key(0), 4), strict=True))
    shapes = dict.fromkeys("qkv", (16, 2, 8)) | {"embed": (VOCAB_SIZE, 16)}
    return {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}


def changed(**options: Any) -> JaxModel:
    return replace(MODEL, forward=partial(forward, **options))


def recipes(
    model: JaxModel,
    max_num_seqs: int = 16,
    speculation: SpeculativeConfig | None = None,
    arrays: Any = None,
) -> Mapping[Any, Recipe]:
    """Return a dict from an engine's program names to compilation inputs (`Recipe`).

    The engine serves `model` with the parameters `arrays`. If `arrays` is None, use `params()`.
    """
    plan = plan_jax_model(model, params() if arrays is None else arrays, DEVICE)
    split = SplitModel.of(plan.abstract_model)
    split = replace(split, digests=plan.digests())
    limits = 16, 9, 64, max_num_seqs, 512, VOCAB_SIZE
    config = RuntimeConfig(*limits, Backend.XLA, few_programs=True, speculation=speculation)
    sizes = plan.config.shard(len(plan.devices))
    shapes = DeviceShapes.of(sizes, config, plan.dtype, split.mesh)
    return {it.name: it for it in Recipes(split, shapes, config)}


def test_equal_model_functions_have_equal_keys_in_the_program_store():
    found = recipes(changed(factor=2.0)), recipes(changed(factor=2.0))
    for name in (DECODE, SCORE):
        assert found[0][name].key == found[1][name].key


def branching(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    return forward(params, tokens, positions, step, factor=2.0 if len(tokens) > 8 else 1.0)


CHANGES: dict[str, tuple[JaxModel, tuple[str, int]]] = {
    "number": (changed(factor=1.0 + 2**-23), DECODE),
    "array": (changed(added=ZEROS.at[0, 7].set(1e-7)), DECODE),
    "parameter of the same shape": (changed(names="kqv"), DECODE),
    "argument of attend": (changed(names="qvk"), DECODE),
    "option of attend": (changed(window=3), DECODE),
    "logits": (replace(MODEL, logits=partial(logits, factor=2.0)), SCORE),
    "other number of tokens": (replace(MODEL, forward=branching), LARGE_DECODE),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_model_function_has_another_key_in_the_program_store(name: str):
    model, program = CHANGES[name]
    assert recipes(model)[program].key != recipes(MODEL)[program].key
    if name == "other number of tokens":
        assert recipes(model)[DECODE].key == recipes(MODEL)[DECODE].key


def test_program_key_depends_on_which_parameters_a_model_function_uses():
    both = [recipes(changed(names=names))[DECODE].key for names in ("qqv", "kkv")]
    assert both[0] != both[1]


def test_program_key_depends_on_how_devices_split_the_parameters():
    mesh = Mesh(np.array(jax.local_devices()[:2]), ("x",))

    def key(spec: PartitionSpec) -> str:
        arrays = jax.device_put(params(), NamedSharding(mesh, spec))
        return recipes(MODEL, arrays=arrays)[DECODE].key

    whole, rows = key(PartitionSpec()), key(PartitionSpec("x"))
    assert len({recipes(MODEL)[DECODE].key, whole, rows}) == 3
    assert rows == key(PartitionSpec("x", None))


def test_deleted_digests_of_model_functions_are_freed_without_garbage_collection():
    digests = plan_jax_model(MODEL, params(), DEVICE).digests()
    found = ref(digests)
    digests.digest(4, [2])
    # A user's functions must be freed without a run of the garbage collector.
    gc.disable()
    try:
        del digests
        assert found() is None
    finally:
        gc.enable()


@pytest.mark.full
def test_program_key_covers_all_input_sizes_with_which_a_program_calls_the_model(
    monkeypatch: pytest.MonkeyPatch,
):
    called: list[tuple[str, int]] = []

    def spy(name: str, method: Callable[..., Any]) -> None:
        def run(self: JaxDecoder, rows: jax.Array, *arguments: Any) -> Any:
            called.append((name, rows.shape[0]))
            return method(self, rows, *arguments)

        monkeypatch.setattr(JaxDecoder, name, run)

    spy("__call__", JaxDecoder.__call__)
    spy("logits", JaxDecoder.logits)
    # 48 sequences with 8 tokens each have 384 rows of logits. The program computes 240 rows of
    # logits, and then the other 144 rows.
    found = recipes(MODEL, 48, SpeculativeConfig(num_speculative_tokens=7))
    assert {kind for kind, _ in found} >= {"verify", "decode", "prefill", "prompt_logprobs"}
    for recipe in found.values():
        called.clear()
        jax.eval_shape(recipe.function, *recipe.arguments, **recipe.keywords)
        covered: Any = recipe.digest
        num_tokens, rows = covered.args if covered else (None, set())
        assert set(called) <= {("__call__", num_tokens), *(("logits", each) for each in rows)}


def test_model_function_that_cannot_be_exported_is_traced_at_each_start(tmp_path: Path):
    def printing(*arguments: Any) -> Any:
        jax.debug.print("a step")
        return forward(*arguments)

    model = replace(MODEL, forward=printing)
    plan = plan_jax_model(model, params(), DEVICE)
    store = open_program_store(tmp_path, plan.config, plan.abstract_model, DEVICE)
    assert store is not None
    with pytest.warns(UserWarning, match="the decode program is not stored"):
        lowered = lower(recipes(model)[DECODE], store)
    assert "custom_call" in lowered.as_text()


@pytest.mark.full
def test_second_start_loads_the_programs_of_the_same_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    num_exported, export = 0, Recipe.exported

    def count(self: Recipe) -> Any:
        nonlocal num_exported
        num_exported += self.digest is not None
        return export(self)

    monkeypatch.setattr(Recipe, "exported", count)
    answers = []
    for model in (MODEL, changed(), changed(factor=3.0), MODEL):
        num_exported = 0
        engine = Engine(
            model,
            params=params(),
            num_blocks=9,
            max_num_seqs=8,
            max_num_batched_tokens=8,
            compilation_cache_dir=tmp_path,
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
        (output,) = engine.generate([[3, 1, 4, 1, 5]], sampling)
        answers.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
        assert bool(num_exported) == (len(answers) in (1, 3))
    assert answers[0] == answers[1] == answers[3] != answers[2]


WORKERS_START = """
import json, sys
from collections import Counter
import jax

events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from jpaged import Engine, SamplingParams
from tests.compile.test_jax_model_store import MODEL, params

limits = {"num_blocks": 9, "max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 64}
arrays = params()
events.clear()
cache = {"compilation_cache_dir": sys.argv[1], "num_compile_workers": 2, "verbose": True}
engine = Engine(MODEL, params=arrays, **limits, **cache)
hits, misses = events["cache_hits"], events["cache_misses"]
(output,) = engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
print(json.dumps([output.outputs[0].token_ids, hits, misses]))
"""


@pytest.mark.full
def test_engine_finds_programs_that_workers_compiled(tmp_path: Path):
    command = [sys.executable, "-c", WORKERS_START, str(tmp_path)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    first, second = (subprocess.run(command, check=True, **options) for _ in range(2))
    assert "worker failed" not in first.stderr
    tokens, hits, misses = json.loads(first.stdout)
    (total,) = {int(n) for n in re.findall(r"compiled (\d+) of \1 programs", first.stderr)}
    assert hits == total
    assert json.loads(second.stdout) == [tokens, total + misses, 0]


def ignore_progress(*_: int) -> None:
    pass


@pytest.mark.full
def test_engine_compiles_the_programs_of_a_killed_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def start_killed(module: str) -> Child:
        child = Child(module)
        child.process.kill()
        return child

    monkeypatch.setattr(lowered_workers, "Child", start_killed)
    plan = plan_jax_model(MODEL, params(), DEVICE)
    store = open_program_store(tmp_path, plan.config, plan.abstract_model, DEVICE)
    assert store is not None
    found = recipes(MODEL, 8)
    needed = [found["load_bias", None], found["load_rows", None], found["copy_blocks", None]]
    runtime = RuntimeConfig(16, 9, 64, 8, 512, VOCAB_SIZE, Backend.XLA)
    with LoweredPool(1, store, EngineSettings({}, {}), print) as pool:
        yielded = pool.iter_compiled(needed, runtime, ignore_progress)
        assert {it.name for it in yielded} == {it.name for it in needed}
        assert len(pool.processes) == 1
    assert all(store_program(it, store) for it in needed)
    with LoweredPool(1, store, EngineSettings({}, {}), print) as pool:  # a warm start
        assert [*pool.iter_compiled(needed, runtime, ignore_progress)] == needed
        assert not pool.processes


@pytest.mark.full
def test_worker_pool_stops_tracing_user_functions_after_a_failed_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """After a failed export, only the thread that builds the engine traces the user's functions.
    Two threads must not call these functions at the same time."""
    tried = list[Any]()

    def refuse(recipe: Recipe, store: Any) -> bool:
        tried.append(recipe.name)
        return False

    monkeypatch.setattr(lowered_workers, "store_program", refuse)
    plan = plan_jax_model(MODEL, params(), DEVICE)
    store = open_program_store(tmp_path, plan.config, plan.abstract_model, DEVICE)
    assert store is not None
    found = recipes(MODEL)
    needed = [found[name] for name in (DECODE, ("load_bias", None), LARGE_DECODE, SCORE)]
    runtime = RuntimeConfig(16, 9, 64, 8, 512, VOCAB_SIZE, Backend.XLA)
    with LoweredPool(1, store, EngineSettings({}, {}), print) as pool:
        assert [*pool.iter_compiled(needed, runtime, ignore_progress)] == needed
    assert tried == [DECODE, ("load_bias", None)]
