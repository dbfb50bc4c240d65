"""Test engines that run a `JaxModel`: they generate the same tokens as the model's functions
without a KV cache."""

import gc
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from e2e_options import (
    LOOPS,
    MOSTLY_OVERLAPPED,
    QUESTION,
    SMALL,
    check_small_pool_changes_no_answer,
    generate_text,
    in_full_tier,
    make_workload,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from lazy_programs import lazy_programs

from examples.plain_jax_llama import load
from jpaged import Engine, JaxModel, SamplingParams, StructuredOutputs, Tokenizer
from jpaged.config import EMBEDDED_MODEL
from jpaged.engine import startup
from tests.covering import covering

VOCAB_SIZE, NUM_TOKENS = 64, 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PREFIX = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9]
PROMPTS = [[*PREFIX, 5], [*PREFIX, 11, 12, 13, 11, 12, 13, 11, 12], [3]]


class DenseStep:
    """Compute attention over the tokens of one sequence, without a KV cache.

    If `kv_dtype` is given, keys and values are rounded to it, as in a KV pool of this dtype.
    """

    def __init__(self, kv_dtype: Any = None):
        self._kv_dtype = kv_dtype

    def attend(self, layer, q, k, v, *, window=None, scale=None, soft_cap=None):
        if self._kv_dtype is not None:
            k, v = (it.astype(self._kv_dtype).astype(it.dtype) for it in (k, v))
        group, positions = q.shape[1] // k.shape[1], jnp.arange(len(q))
        scores = jnp.einsum("tnh,snh->nts", q, k.repeat(group, axis=1))
        scores *= scale or q.shape[2] ** -0.5
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        distance = positions[:, None] - positions[None]
        is_seen = (distance >= 0) & (distance < (window or len(q)))
        weights = jax.nn.softmax(jnp.where(is_seen[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("nts,snh->tnh", weights, v.repeat(group, axis=1))


@partial(jax.jit, static_argnums=(0, 3))
def dense_logits(
    model: JaxModel, params: Any, tokens: jax.Array, kv_dtype: Any = None
) -> jax.Array:
    hidden = model.forward(params, tokens, jnp.arange(len(tokens)), DenseStep(kv_dtype))
    return model.logits(params, hidden)


def dense_logprobs(tokens: list[int], params: Any, kv_dtype: Any = None) -> np.ndarray:
    """Compute the log-probabilities of `tokens[1:]` with the tiny model, without a KV cache."""
    with user_settings():
        logits = dense_logits(TINY, params, jnp.asarray(tokens, jnp.int32), kv_dtype)
    logprobs = np.asarray(jax.nn.log_softmax(logits))[:-1]
    return logprobs[np.arange(len(logprobs)), tokens[1:]]


def greedy_tokens(model: JaxModel, params: Any, prompt: list[int]) -> list[int]:
    """Generate tokens greedily by the model's functions, without a KV cache."""
    tokens = [*prompt]
    with user_settings():
        for _ in range(NUM_TOKENS):
            padded = jnp.asarray([*tokens, *[0] * (64 - len(tokens))], jnp.int32)
            tokens.append(int(dense_logits(model, params, padded)[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def user_settings() -> ExitStack:
    """Return a context with JAX's default dtype promotion, which users have. The other tests use
    strict promotion."""
    stack = ExitStack()
    stack.enter_context(jax.numpy_dtype_promotion("standard"))
    stack.enter_context(jax.numpy_rank_promotion("allow"))
    return stack


def tiny_forward(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    """Compute two layers with different heads, windows, scales and soft caps. Queries and keys are
    not rotated."""
    x = params["embed"][tokens] + params["positions"][positions]
    q, k, v = (jnp.einsum("td,dnh->tnh", x, it) for it in params["first"])
    x += step.attend(0, q, k, v, window=9, soft_cap=2.0).reshape(len(x), -1) @ params["out"]
    q, k, v = (jnp.einsum("td,dnh->tnh", x, it) for it in params["second"])
    return jnp.tanh(x + step.attend(1, q, k, v, scale=0.5).reshape(len(x), -1))


def tiny_logits(params: Any, hidden: Any) -> Any:
    return hidden @ params["embed"].T


TINY = JaxModel(
    tiny_forward,
    tiny_logits,
    num_layers=2,
    num_kv_heads=[2, 1],
    head_size=[8, 16],
    vocab_size=VOCAB_SIZE,
    max_positions=128,
)


@cache
def tiny_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def make(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    heads = {"first": (4, 2, 8), "second": (2, 1, 16)}
    layers = {
        name: tuple(make(32, count, size) for count in (num_heads, kv, kv))
        for name, (num_heads, kv, size) in heads.items()
    }
    return {
        "embed": make(VOCAB_SIZE, 32),
        "positions": make(128, 32),
        "out": make(32, 32),
        **layers,
    }


def make_engine(model: Any = TINY, params: Any = None, **options: Any) -> Engine:
    options = {"num_blocks": 65, **SMALL, "max_model_len": 128, **options}
    options.setdefault("compilation_cache_dir", None)
    with user_settings(), lazy_programs():
        return Engine(model, params=tiny_params() if params is None else params, **options)


@pytest.fixture(scope="module")
def jax_engines() -> Callable[..., Engine]:
    """Return a function that creates an engine of the tiny model, or reuses one with the same
    options."""
    return cache(make_engine)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [greedy_tokens(TINY, tiny_params(), prompt) for prompt in PROMPTS]


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


SPECULATION = {
    "no drafts": {},
    "drafts": {"speculative_config": (("method", "ngram"), ("num_speculative_tokens", 1))},
}


@pytest.mark.parametrize(("loop", "speculation"), covering(LOOPS, SPECULATION, strength=1))
def test_greedy_tokens_equal_those_of_the_model_without_a_kv_cache(
    expected: list[list[int]], loop: str, speculation: str
):
    options = {name: dict(value) for name, value in SPECULATION[speculation].items()}
    engine = make_engine(**LOOPS[loop], **options)
    for _ in range(2):  # the second run finds prefixes in the cache
        assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats().num_cached_tokens > 0
    assert bool(engine.stats().num_accepted_tokens) == bool(options)
    engine.check_integrity()


REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "n": 3},
    {"temperature": 0.0, "beam_width": 2, "n": 2},
    {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.1, "logprobs": 2},
]


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
@pytest.mark.parametrize("mode", ["swap", *in_full_tier("recompute")])
def test_preemption_changes_no_answer(jax_engines: Callable[..., Engine], loop: str, mode: str):
    prompts, params = make_workload(REQUESTS, 8, VOCAB_SIZE, max_tokens=NUM_TOKENS)
    tight = make_engine(num_blocks=14, preemption_mode=mode, **LOOPS[loop])
    check_small_pool_changes_no_answer(jax_engines(), tight, prompts, params)
    tight.check_integrity()


@pytest.mark.full
def test_seeded_samples_are_the_same_with_speculative_decoding(jax_engines: Callable[..., Engine]):
    prompts, params = make_workload(REQUESTS[1:2], 4, VOCAB_SIZE, max_tokens=NUM_TOKENS)
    drafting = make_engine(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    first, second = (engine.generate(prompts, params) for engine in (jax_engines(), drafting))
    for one, other in zip(first, second, strict=True):
        assert [it.token_ids for it in one.outputs] == [it.token_ids for it in other.outputs]


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)], ids=str
)
def test_kv_cache_has_the_dtype_of_16_bit_params(dtype: Any):
    params = jax.tree.map(lambda it: it.astype(dtype), tiny_params())
    engine = make_engine(params=params)
    (output,) = engine.generate(PROMPTS[:1], GREEDY)
    assert engine.model_config.kv_cache_dtype == jnp.dtype(dtype).name
    assert len(output.outputs[0].token_ids) == NUM_TOKENS


def test_model_with_a_weakly_typed_parameter_returns_prompt_logprobs():
    params = jax.tree.map(lambda it: it.astype(jnp.bfloat16), tiny_params())

    def forward(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
        return tiny_forward(params["own"], tokens, positions, step) * params["factor"]

    def logits(params: Any, hidden: Any) -> Any:
        return tiny_logits(params["own"], hidden.astype(jnp.bfloat16))

    given = {"own": params, "factor": jnp.asarray(1.0)}  # weakly typed float32
    engine = make_engine(replace(TINY, forward=forward, logits=logits), given)
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    (output,) = engine.generate([PROMPTS[1]], scored)
    assert len(output.prompt_logprobs or ()) == len(PROMPTS[1])


def test_end_token_may_be_an_int_or_none():
    assert replace(TINY, eos_token_ids=3).eos_token_ids == (3,)  # type: ignore
    assert replace(TINY, eos_token_ids=None).eos_token_ids == ()  # type: ignore


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("float16", jnp.float16, 1e-3), ("fp8", jnp.float8_e4m3fn, 1e-5)],
)
def test_kv_cache_may_have_another_dtype_than_the_keys(name: str, dtype: Any, tolerance: float):
    params = jax.tree.map(lambda it: it / 4, tiny_params())  # keys that FP8 can represent
    engine, completion = make_engine(params=params, kv_cache_dtype=name), [4, 5, 6, 7, 8, 9]
    (score,) = engine.score_completions([PREFIX], [completion])
    tokens = [*PREFIX, *completion]
    rounded, exact = (dense_logprobs(tokens, params, it)[-6:] for it in (dtype, None))
    np.testing.assert_allclose(score.logprobs, rounded, atol=tolerance)
    assert np.abs(np.asarray(score.logprobs) - exact).max() > 1e-4


def test_completion_scores_are_the_log_probabilities_of_the_model(
    jax_engines: Callable[..., Engine],
):
    engine, completion = jax_engines(), [4, 5, 6]
    (score,) = engine.score_completions([PREFIX], [completion])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = engine.generate([[*PREFIX, *completion]], params)
    entries = [next(iter(it.values())).logprob for it in output.prompt_logprobs or () if it]
    want = dense_logprobs([*PREFIX, *completion], tiny_params())
    np.testing.assert_allclose(entries, want, rtol=1e-4)
    np.testing.assert_allclose(score.logprobs, want[-len(completion) :], rtol=1e-4)


def test_grammar_constrains_the_answers_of_the_example_model(shallow_folder: Path):
    model, params = load(shallow_folder)
    engine = make_engine(model, params, tokenizer=shallow_folder)
    pattern = "[a-c]{3,9} [0-9]{2}"
    constrained = SamplingParams(
        temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputs(regex=pattern)
    )
    assert re.fullmatch(pattern, generate_text(engine, constrained))
    prompt = engine.tokenizer.encode(QUESTION) if engine.tokenizer else []
    want = greedy_tokens(model, params, prompt)
    assert tokens(engine.generate([prompt], GREEDY)) == [want]


@pytest.mark.full
def test_example_model_gives_the_same_answers_as_the_built_in_qwen3(
    engines: Callable, shallow_folder: Path
):
    """The built-in Qwen3 model and the example load the same checkpoint, and must give the same
    answers."""
    model, params = load(shallow_folder)
    engine = make_engine(model, params, tokenizer=shallow_folder, max_model_len=256, num_blocks=129)
    number = StructuredOutputs(regex="[a-c]{3,9} [0-9]{2}")
    for grammar in (None, number):
        asked = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=grammar)
        assert generate_text(engine, asked) == generate_text(engines(shallow_folder), asked)


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_example_jax_model_with_bundled_weights_answers_like_the_built_in_qwen3(loop: str):
    model, params = load(EMBEDDED_MODEL)
    engine = make_engine(model, params, tokenizer=EMBEDDED_MODEL, **LOOPS[loop])
    answer = generate_text(engine, SamplingParams(temperature=0.0, max_tokens=64))
    assert answer == generate_text(Engine(**SMALL, num_blocks=129), SamplingParams(temperature=0.0))
    assert answer.strip() == "3, 4, 5, 6, 7"
    assert QUESTION == "Count from 3 to 7"


# The start


def test_engine_start_changes_no_setting_of_jax_or_the_garbage_collector():
    gc.collect()
    settings, num_frozen = dict(jax.config.values), gc.get_freeze_count()
    engine = make_engine()
    assert dict(jax.config.values) == settings
    assert gc.get_freeze_count() <= num_frozen
    assert gc.isenabled()
    engine.check_integrity()


def test_engine_uses_the_arrays_of_a_one_device_mesh_without_a_copy(expected: list[list[int]]):
    sharding = NamedSharding(Mesh(np.array(jax.local_devices()[:1]), ("data",)), PartitionSpec())
    params = jax.device_put(jax.tree.map(jnp.copy, tiny_params()), sharding)
    engine = make_engine(params=params)
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    params["embed"].delete()  # donating an array to a jitted function also deletes the array
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        engine.generate(PROMPTS, GREEDY)


def test_engine_and_params_are_freed_with_the_last_reference():
    params = jax.tree.map(lambda it: it + 1, tiny_params())
    engine, embed = make_engine(params=params), ref(params["embed"])
    engine.generate(PROMPTS[:1], GREEDY)
    del params
    gc.collect()
    assert embed() is not None
    del engine
    gc.collect()
    assert embed() is None


def test_kv_cache_size_can_be_given_in_bytes():
    engine = make_engine(num_blocks=None, kv_cache_memory_bytes=2**20)
    block = 2 * 2 * 16 * 2 * 16 * 4  # factors: K and V, layers, slots, heads, head size, 4 bytes
    assert engine.memory_account.kv_cache <= 2**20 < engine.memory_account.kv_cache + 64 * block


OPTIONS = {
    "dtype": ("bfloat16", "cast params"),
    "quantization": ("fp8", "omit it"),
    "load_format": ("dummy", "params holds the weights"),
    "tensor_parallel_size": (2, "not the number of devices of params, 1: omit it"),
    "enable_expert_parallel": (True, "the sharding of params splits"),
    "skip_tokenizer_init": (True, "pass tokenizer=None"),
    "gpu_memory_utilization": (0.5, "kv_cache_memory_bytes"),
    "num_blocks": (None, "pass kv_cache_memory_bytes or num_blocks"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_engine_option_that_does_not_apply_to_a_jax_model_is_refused(name: str):
    value, remedy = OPTIONS[name]
    with pytest.raises(ValueError, match=f"{name}.*{remedy}|{remedy}"):
        make_engine(**{name: value})


@pytest.mark.parametrize("name", ["params", "tokenizer"])
def test_params_and_tokenizer_are_refused_if_the_model_is_no_jax_model(name: str):
    with pytest.raises(TypeError, match=f"{name} needs model=JaxModel"):
        Engine(**{name: EMBEDDED_MODEL})


def test_tokenizer_that_is_not_a_folder_is_refused():
    with pytest.raises(ValueError, match="tokenizer='/absent' is not a folder"):
        make_engine(tokenizer="/absent")
    with pytest.raises(TypeError, match="tokenizer is a list: pass a tokenizer of"):
        make_engine(tokenizer=[])


def test_tokenizer_that_cannot_be_saved_leaves_no_folder():
    folders = list[Path]()

    class Unsaved:
        def save_pretrained(self, folder: str) -> None:
            folders.append(Path(folder))
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_engine(tokenizer=Unsaved())
    assert not folders[0].exists()


def test_tokenizer_may_be_an_object_of_transformers():
    hf_tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL).hf_tokenizer
    model, params = replace(TINY, vocab_size=len(hf_tokenizer)), tiny_params()
    repeats = -(-len(hf_tokenizer) // VOCAB_SIZE)
    params = {**params, "embed": jnp.tile(params["embed"], (repeats, 1))[: len(hf_tokenizer)]}
    engine = make_engine(model, params, tokenizer=hf_tokenizer)
    folder = engine.tokenizer_folder
    assert engine.tokenizer is not None
    assert folder is not None
    text = [{"role": "user", "content": "a"}]
    assert engine.tokenizer.encode("Count") == hf_tokenizer.encode("Count")
    assert engine.tokenizer.hf_tokenizer.apply_chat_template(
        text, tokenize=False
    ) == hf_tokenizer.apply_chat_template(text, tokenize=False)
    assert folder.is_dir()
    del engine
    gc.collect()
    assert not folder.exists()


# Other weights


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_all_tokens_after_a_weight_update_use_the_new_weights(expected: list[list[int]], loop: str):
    old = jax.tree.map(lambda it: it[::-1], tiny_params())
    engine, old_embed = make_engine(params=old, **LOOPS[loop]), ref(old["embed"])
    assert tokens(engine.generate(PROMPTS, GREEDY)) != expected
    num_cached = engine.stats().num_cached_tokens
    del old
    engine.update_weights(tiny_params())
    gc.collect()
    assert old_embed() is None
    assert tokens(engine.generate(PROMPTS[:1], GREEDY)) == expected[:1]
    assert engine.stats().num_cached_tokens == num_cached  # no old prefix was reused
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.stats().num_cached_tokens > num_cached
    engine.check_integrity()


def test_donated_weights_are_replaced_before_the_next_request(expected: list[list[int]]):
    params = jax.tree.map(jnp.copy, tiny_params())
    engine = make_engine(params=params)
    engine.generate(PROMPTS[:1], GREEDY)
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # donating an array to a jitted function also deletes the array
    engine.update_weights(tiny_params())
    assert tokens(engine.generate(PROMPTS[:1], GREEDY)) == expected[:1]


def test_weights_are_not_updated_while_a_request_runs(expected: list[list[int]]):
    engine = make_engine()
    engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(RuntimeError, match=r"1 request unfinished: call pause\(\) first"):
        engine.update_weights(jax.tree.map(lambda it: it[::-1], tiny_params()))
    engine.abort_all()
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected


UPDATES = {
    "shape": (
        lambda: with_embed(jnp.zeros((64, 31))),
        r"params\['embed'\] is float32\[64, 31\], but",
    ),
    "dtype": (lambda: with_embed(jnp.zeros((64, 32), jnp.bfloat16)), "is bfloat16.*with float32"),
    "missing": (
        lambda: {"embed": tiny_params()["embed"]},
        r"params\['first'\]\[0\] is missing",
    ),
    "more": (
        lambda: {**tiny_params(), "more": jnp.zeros(1)},
        r"params\['more'\] is unknown",
    ),
    "tree": (
        lambda: {**tiny_params(), "first": list(tiny_params()["first"])},
        "pass a tree with the same containers",
    ),
    "NumPy array": (lambda: with_embed(np.ones((64, 32))), "is a numpy.ndarray, not a JAX array"),
    "NaN": (lambda: with_embed(jnp.full((64, 32), jnp.nan)), r"params\['embed'\] has values that"),
    "host memory": (lambda: with_embed(pinned(tiny_params()["embed"])), "is in pinned_host memory"),
}


@pytest.mark.parametrize("name", UPDATES)
def test_refused_weight_update_changes_nothing(jax_engines: Callable[..., Engine], name: str):
    make, message = UPDATES[name]
    engine = jax_engines()
    before = tokens(engine.generate(PROMPTS[:1], GREEDY))
    with pytest.raises((TypeError, ValueError), match=message):
        engine.update_weights(make(), check_finite=True)
    assert tokens(engine.generate(PROMPTS[:1], GREEDY)) == before


# Faults of the model


def scanning(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    x = params["embed"][tokens]

    def run(x: Any, layer: Any) -> Any:
        heads = jnp.tile(x[:, None, :8], (1, 2, 1))
        return x + step.attend(layer, heads, heads, heads).reshape(len(x), -1)[:, :1], None

    return jax.lax.scan(run, x, jnp.arange(2))[0]


def jitted_layer(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    heads = jnp.tile(params["embed"][tokens][:, None, :8], (1, 2, 1))
    return jax.jit(lambda it: step.attend(0, it, it, it))(heads).reshape(len(tokens), -1)


def branching(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    return params if tokens[0] else tokens


def attending(*layers: int, width: int = 8, heads: tuple[int, int] = (2, 2), **options: Any) -> Any:
    """Return a model function `forward` that calls `attend` for the given layers."""

    def forward(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
        x = params["embed"][tokens]
        q, k = (jnp.tile(x[:, None, :width], (1, count, 1)) for count in heads)
        for layer in layers:
            step.attend(layer, q, k, k, **options)
        return x

    return forward


@cache
def kept_table() -> Any:
    return jnp.arange(8.0)


def keeping(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    return tiny_forward(params, tokens, positions, step) + kept_table()[0]


def changed(**changes: Any) -> JaxModel:
    sizes = {"num_kv_heads": 2, "head_size": 8}
    return replace(TINY, **sizes | changes)


MODELS = {
    "scan over layers": (lambda: changed(forward=scanning), "layer is a traced value.*unroll"),
    "jitted layer": (
        lambda: changed(forward=jitted_layer),
        "inside a JAX transformation.*directly",
    ),
    "layer missing": (lambda: changed(forward=attending(1)), "1 of 2 layers.*for layer 0, or"),
    "layer twice": (
        lambda: changed(forward=attending(0, 0)),
        "attend was called twice for layer 0",
    ),
    "layer out of range": (
        lambda: changed(forward=attending(0, 1, 2)),
        "layer=2, but the model has",
    ),
    "keys": (
        lambda: changed(forward=attending(0, width=4)),
        r"layer 0: k has shape \[8, 2, 4\], but must be \[T, K, H\] = \[8, 2, 8\]",
    ),
    "queries": (
        lambda: changed(forward=attending(0, heads=(3, 2))),
        r"layer 0: q has shape \[8, 3, 8\].* with N a multiple of 2",
    ),
    "window": (lambda: changed(forward=attending(0, window=0)), "layer 0: window=0: pass a posit"),
    "hidden": (
        lambda: changed(forward=lambda p, t, pos, step: (attending(0, 1)(p, t, pos, step))[0]),
        r"forward returned shape \[32\], but must return \[T, D\] = \[8, D\]",
    ),
    "hidden is no array": (
        lambda: changed(forward=lambda *args: [attending(0, 1)(*args)]),
        r"forward returned a list: return one array \[T, D\]",
    ),
    "logits": (
        lambda: changed(forward=attending(0, 1), vocab_size=63),
        r"logits returned shape \[3, 64\], but must return \[R, V\] = \[3, 63\]",
    ),
    "dtype of logits": (
        lambda: changed(
            forward=attending(0, 1), logits=lambda p, x: tiny_logits(p, x).astype(jnp.int32)
        ),
        "logits returned int32: cast",
    ),
    "branch on a value": (
        lambda: changed(forward=branching),
        "traced array",
    ),
    "jitted function": (
        lambda: changed(logits=jax.jit(tiny_logits)),
        "logits is wrapped in jax",
    ),
    "number of heads": (lambda: changed(num_kv_heads=[2]), "num_kv_heads has 1 entry for num_lay"),
    "no layers": (lambda: changed(num_layers=0), "num_layers=0: pass an int, at least 1"),
    "array kept between calls": (
        lambda: replace(TINY, forward=keeping),
        "forward keeps an array between calls",
    ),
    "end token": (
        lambda: changed(eos_token_ids=[64]),
        "eos_token_ids has 64: pass ints from 0 to 63",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_invalid_jax_model_is_refused_before_the_kv_cache_is_allocated(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    make, message = MODELS[name]
    monkeypatch.setattr(startup, "Compilation", lambda *_: pytest.fail("the pool was sized"))
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(make())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"forward": None},
            "forward=None is not a function: pass a function forward\\(params, tok",
        ),
        ({"logits": 3}, "logits=3 is not a function: pass a function logits\\(params, hidden\\)"),
        ({"vocab_size": 1.5}, "vocab_size=1.5 is not an int: pass an int, at least 1"),
        ({"head_size": 1.5}, "head_size of layer 0=1.5 is not an int"),
    ],
)
def test_error_names_the_model_field_with_a_wrong_type(fields: dict[str, Any], message: str):
    unchecked: Any = SimpleNamespace(**vars(TINY) | fields)  # `JaxModel` would fail beartype first
    with pytest.raises(TypeError, match=message):
        JaxModel.__post_init__(unchecked)


def test_error_in_forward_says_that_jpaged_was_tracing_the_model():
    with pytest.raises(KeyError) as caught:
        make_engine(changed(forward=lambda params, *_: params["absent"]))
    note = "jpaged was tracing forward, which must be traceable as for jax.jit."
    assert caught.value.__notes__[-1] == note


def with_embed(embed: Any) -> dict[str, Any]:
    return {**tiny_params(), "embed": embed}


def donated() -> jax.Array:
    array = tiny_params()["embed"] + 1
    array.delete()
    return array


def pinned(array: jax.Array) -> jax.Array:
    device = jax.local_devices()[0]
    return jax.device_put(
        array, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    )


PARAMS = {
    "NumPy array": (lambda: np.ones((64, 32)), r"params\['embed'\] is a numpy.ndarray, not a JAX"),
    "function": (lambda: len, r"params\['embed'\] is a builtins.builtin_function_or_method"),
    "donated": (donated, r"params\['embed'\] was deleted or donated"),
    "other device": (
        lambda: jax.device_put(tiny_params()["embed"], jax.local_devices()[1]),
        r"params\['embed'\] is on .*1, but the engine runs on .*0: pass jax.device_put",
    ),
    "host memory": (lambda: pinned(tiny_params()["embed"]), "is in pinned_host memory: pass"),
}


@pytest.mark.parametrize("name", PARAMS)
def test_error_names_the_invalid_model_parameter(name: str):
    make, message = PARAMS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(params=with_embed(make()))


def test_mesh_of_several_devices_is_refused():
    with (
        jax.set_mesh(
            jax.make_mesh(
                (2,), ("data",), devices=jax.local_devices()[:2], axis_types=(AxisType.Auto,)
            )
        ),
        pytest.raises(ValueError, match=r"a mesh of 2 devices, but .* jax.set_mesh sets no mesh"),
    ):
        make_engine(params=jax.device_put(tiny_params(), jax.local_devices()[0]))


def test_empty_params_are_refused():
    with pytest.raises(ValueError, match="params has no array"):
        make_engine(params={})
