"""Test that tensor-parallel devices give the same tokens as one device. The devices are GPUs or
virtual CPU devices."""

import ctypes
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import (
    LOOPS,
    QUESTION,
    Engines,
    in_full_tier,
    run,
    scores,
    text,
    token_ids,
    updates,
)
from random_models import random_model

from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.compile import sizing
from jpaged.runtime import model_runner, peer_memory, results
from jpaged.runtime.sampler import SamplingState
from tests.covering import covering

pytestmark = pytest.mark.gpu2

COUNTS = (2, 4, 8)
KV_HEADS = {"head_dim": 8, "intermediate_size": 48}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 96, "vocab_size": 96},
    "opt-350m": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "llama": KV_HEADS | {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": KV_HEADS | {"num_key_value_heads": 1, "sliding_window": 9, "vocab_size": 96},
    "qwen2": KV_HEADS | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": KV_HEADS | {"num_key_value_heads": 2, "vocab_size": 96},
    "qwen3_moe": KV_HEADS | MOE | {"num_key_value_heads": 2, "mlp_only_layers": [1]},
    "mixtral": KV_HEADS | {"num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 96},
    "olmoe": KV_HEADS | MOE | {"num_key_value_heads": 4},
    "gemma3_text": KV_HEADS | {"num_key_value_heads": 2, "sliding_window": 12, "vocab_size": 96},
}
"""Sizes of random models by model family. The models have 1 to 8 KV heads. The vocabulary has 96
tokens, which is divisible by 8, or 97 tokens."""
IN_DEFAULT_TIER = {("opt", 2), ("mistral", 2)}
"""Pairs (model family, number of devices) that the default test tier runs. The two devices share
the single KV head of the Mistral model."""

TINY: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "skip_tokenizer_init": True,
}
GREEDY_12 = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a random checkpoint of a model family."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            values = {"vocab_size": 97, "num_attention_heads": 8, "max_position_embeddings": 64}
            made[family] = tmp_path_factory.mktemp(family)
            model = random_model(family.partition("-")[0], seed=3, **values | FAMILIES[family])
            model.save_pretrained(made[family])
        return made[family]

    return folder


def on_devices(engines: Engines, count: int, model: Path | None = None, **options: Any) -> Engine:
    """Create or reuse an engine on `count` devices."""
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    return engines(model, tensor_parallel_size=count, **{"dtype": "float32"} | options)


def check_same_tokens(pair: Iterable[Engine], prompts: list[Any], params: Any = GREEDY_12) -> None:
    """Check that two engines generate the same tokens."""
    one, other = (token_ids(engine.generate(prompts, params)) for engine in pair)
    assert other == one


@pytest.mark.parametrize(
    ("family", "count"),
    [
        pytest.param(*each, marks=[] if each in IN_DEFAULT_TIER else [pytest.mark.full])
        for each in itertools.product(FAMILIES, COUNTS)
    ],
)
def test_every_model_family_gives_the_same_tokens_as_on_one_device(
    engines: Engines, folders: Callable[[str], Path], family: str, count: int
):
    rng = np.random.default_rng(count)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 17, 33)]
    pair = [on_devices(engines, n, folders(family), **TINY) for n in (1, count)]
    check_same_tokens(pair, prompts)


@pytest.mark.parametrize(
    ("family", "count"),
    [
        pytest.param(*each, marks=[] if each == ("olmoe", 2) else [pytest.mark.full])
        for each in itertools.product(("qwen3_moe", "mixtral", "olmoe"), COUNTS)
    ],
)
def test_expert_parallel_devices_give_the_same_tokens_as_one_device(
    engines: Engines, folders: Callable[[str], Path], family: str, count: int
):
    rng = np.random.default_rng(count)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 17, 33)]
    one = on_devices(engines, 1, folders(family), **TINY)
    options = TINY | {"enable_expert_parallel": True}
    check_same_tokens([one, on_devices(engines, count, folders(family), **options)], prompts)


def test_expert_parallelism_of_a_dense_model_is_refused(engines: Engines, shallow_folder: Path):
    with pytest.raises(ValueError, match="enable_expert_parallel is set, but model_type='qwen3'"):
        engines(shallow_folder, enable_expert_parallel=True)


@pytest.fixture(params=[*LOOPS])
def pair(engines: Engines, shallow_folder: Path, request: pytest.FixtureRequest) -> list[Engine]:
    """Return two engines of the same model: the first on one device, the second on two devices.
    Tests run with each kind of engine loop in `LOOPS`, such as the overlapped loop."""
    return [on_devices(engines, n, shallow_folder, **LOOPS[request.param]) for n in (1, 2)]


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "truncated": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 1},
    "samples": {"temperature": 1.0, "n": 5, "seed": 2},
    "beams": {"temperature": 0.0, "beam_width": 4, "n": 2},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3},
    "biases": {"temperature": 0.0, "logit_bias": {40: 5.0, 41: -5.0}, "min_tokens": 12},
    "structured": {"structured_outputs": StructuredOutputs(regex="[0-9]{2}(, [0-9]{2}){2,6}")},
}


@pytest.mark.parametrize(("pair", "name"), covering(LOOPS, SAMPLING, strength=1), indirect=["pair"])
def test_each_sampling_option_gives_the_same_tokens_as_on_one_device(pair: list[Engine], name: str):
    prompts = [QUESTION, "Say hello", "Count from 1 to 20"]
    check_same_tokens(pair, prompts, SamplingParams(**{"max_tokens": 24, **SAMPLING[name]}))


@pytest.mark.full
@pytest.mark.parametrize(
    ("loop", "count"),
    [
        ("bursts", 2),
        ("bursts", 4),
        ("synchronous", 2),
        ("overlapped", 2),
        ("synchronous", 8),
    ],
)
def test_step_with_mixed_sampling_options_gives_the_same_tokens_as_on_one_device(
    engines: Engines, folders: Callable[[str], Path], loop: str, count: int
):
    """The greedy and the seeded request generate the most tokens. So the last steps have only these
    two requests, and sample from the best token of each device instead of all logits."""
    kinds = {name: it for name, it in SAMPLING.items() if name != "structured"}
    kinds["scored"] = {"temperature": 0.8, "logprobs": 3}
    lengths = {"greedy": 24, "seeded": 16}
    common = {"ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(**{"max_tokens": lengths.get(name, 12), **common, **it, "seed": 5})
        for name, it in kinds.items()
    ]
    prompts = [[5 + i, 7, 9] for i in range(len(params))]
    options = {**TINY, **LOOPS[loop], "max_num_seqs": 16}
    pair = [on_devices(engines, n, folders("qwen3"), **options) for n in (1, count)]
    check_same_tokens(pair, prompts, params)


def test_logprobs_equal_the_logprobs_of_one_device(pair: list[Engine]):
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=4, prompt_logprobs=3)
    one, two = (engine.generate([QUESTION], params)[0] for engine in pair)
    found = [
        [it for it in (*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())) if it]
        for output in (one, two)
    ]
    assert len(found[0]) > 10
    for own, others in zip(*found, strict=True):
        assert [*own] == [*others]
        mine, theirs = ([entry.logprob for entry in it.values()] for it in (own, others))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_each_logprobs_mode_gives_the_values_of_one_device(
    engines: Engines, shallow_folder: Path, mode: str
):
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ]
    params = [SamplingParams(max_tokens=8, logprobs=4, seed=1, **kind) for kind in kinds]
    one, two = (
        on_devices(engines, count, shallow_folder, logprobs_mode=mode).generate(
            [QUESTION] * 2, params
        )
        for count in (1, 2)
    )
    assert token_ids(one) == token_ids(two)
    for own, others in zip(one, two, strict=True):
        pairs = zip(own.outputs[0].logprobs or (), others.outputs[0].logprobs or (), strict=True)
        for mine, theirs in pairs:
            assert [*mine] == [*theirs]
            for entry, other in zip(mine.values(), theirs.values(), strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert entry.kept_mass == pytest.approx(other.kept_mass, abs=1e-5)


def test_prefix_caching_works_on_tensor_parallel_devices(engines: Engines, shallow_folder: Path):
    both = on_devices(engines, 2, shallow_folder)
    prompt = "Count from 1 to 20. " * 6 + QUESTION
    first, again = (both.generate([prompt], GREEDY_12) for _ in range(2))
    assert (again[0].num_cached_tokens or 0) >= 64
    assert token_ids(again) == token_ids(first)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_preempted_sequences_continue_on_tensor_parallel_devices(
    engines: Engines, shallow_folder: Path, mode: str
):
    """The pool has 11 blocks, and each of the 6 sequences needs up to 4 blocks."""
    few = {"num_blocks": 12, "preemption_mode": mode, "swap_space": 0.0004, "max_model_len": 128}
    options = {"enable_prefix_caching": False, **few}
    prompts = [f"Count from {n} to {n + 20}" for n in range(1, 7)]
    alone, both = (on_devices(engines, count, shallow_folder, **options) for count in (1, 2))
    check_same_tokens((alone, both), prompts, replace(GREEDY_12, max_tokens=48))
    stats = both.stats()
    assert stats.num_preemptions > 0
    assert stats.num_host_blocks == alone.stats().num_host_blocks
    if mode == "swap":
        assert stats.num_swapped_out_blocks > 0


def test_memory_account_reports_the_bytes_of_one_device(engines: Engines):
    alone, both = (on_devices(engines, count) for count in (1, 2))
    one, two = alone.memory_account, both.memory_account
    assert two.kv_cache * 2 == one.kv_cache
    assert one.weights / 2 <= two.weights < 0.6 * one.weights


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, "cannot split the model's num_key_value_heads=2; use 1 or 2"),
        (4, "cannot split the model's num_attention_heads=6"),
    ],
)
def test_device_count_that_does_not_divide_the_heads_is_refused(count: int, message: str):
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    with pytest.raises(ValueError, match=f"tensor_parallel_size={count} {message}"):
        Engine(tensor_parallel_size=count)


def test_more_devices_than_the_host_has_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 is larger than .* has 1"):
        Engine(tensor_parallel_size=2)


def test_arrivals_and_aborts_change_no_answer_of_tensor_parallel_devices(
    engines: Engines, shallow_folder: Path
):
    both = on_devices(engines, 2, shallow_folder)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    wanted = text(both.generate([QUESTION], params)[0])
    both.add_request(QUESTION, params, request_id="a")
    both.step()
    both.add_request(QUESTION, params, request_id="b")
    both.add_request("Say hello", params, request_id="c")
    both.step()
    both.abort("c")
    found = run(both)
    assert text(found["a"]) == text(found["b"]) == wanted


@pytest.mark.full
def test_two_devices_change_bfloat16_logprobs_no_more_than_batching_does(
    engines: Engines, shallow_folder: Path
):
    texts = [f"Count from {n} to {n + 20}. {QUESTION}" for n in range(8)]
    options = {"dtype": "bfloat16", "enable_prefix_caching": False}
    alone, both = (on_devices(engines, count, shallow_folder, **options) for count in (1, 2))
    one_by_one = np.concatenate([scores(alone, [it]) for it in texts])
    in_a_batch, by_both = scores(alone, texts), scores(both, texts)
    noise = np.abs(in_a_batch - one_by_one).mean()
    # On a CPU, batching may leave every log-probability unchanged, so that `noise` is 0. The test
    # then accepts the change of a log-probability by one bfloat16 rounding.
    rounding = 2.0**-8 * np.abs(in_a_batch).mean()
    assert len(by_both) > 200
    assert 0 < np.abs(by_both - in_a_batch).mean() <= max(2 * noise, rounding)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "opt-350m", "llama", "gemma3_text"])
def test_two_devices_give_bfloat16_logprobs_close_to_one_device_for_each_layer_type(
    engines: Engines, folders: Callable[[str], Path], family: str
):
    """The tested model families differ in the operation after an all-reduce: the operation adds a
    bias, or is one of two kinds of norms."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 96, n).tolist() for n in (2, 16, 33, 50)]
    options = {"dtype": "bfloat16", **TINY}
    wanted, found = (
        scores(on_devices(engines, n, folders(family), **options), prompts) for n in (1, 2)
    )
    assert len(wanted) == 97
    assert np.abs(found - wanted).mean() <= 2.0**-7 * np.abs(wanted).mean()


def test_devices_sample_the_same_tokens(engines: Engines, shallow_folder: Path):
    both = on_devices(engines, 2, shallow_folder)
    for i, temperature in enumerate((0.0, 1.0, 2.0, 3.0)):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=150, ignore_eos=True)
        both.add_request(QUESTION, params)
    num_compared = 0
    while both.has_work:
        both.advance()
        for array in jax.live_arrays():
            is_on_both = len(array.sharding.device_set) == 2 and array.is_fully_replicated
            if is_on_both and array.dtype == np.int32:
                own, other = (np.asarray(shard.data) for shard in array.addressable_shards)
                np.testing.assert_array_equal(own, other)
                num_compared += 1
    both.take_deltas()
    assert num_compared > 100


@pytest.fixture
def peer_memories(monkeypatch: pytest.MonkeyPatch) -> list[peer_memory.PeerMemory]:
    """Return a list. Each new engine appends the `PeerMemory` of its devices, through which
    all-reduce kernels exchange data.

    On a CPU, the fixture enables peer memory too. The CPU then runs the programs of a GPU, except
    the all-reduces.
    """
    made: list[peer_memory.PeerMemory] = []

    class Noted(peer_memory.PeerMemory):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(model_runner, "PeerMemory", Noted)
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(sizing, "can_use_peer_memory", lambda devices, dtype: len(devices) > 1)
        monkeypatch.setattr(
            peer_memory, "exchange_word_counts", lambda n, backend: (4 + 2 * (n + 1), 64)
        )
    return made


@pytest.mark.parametrize(("loop", "device"), covering(LOOPS, [0, 1], strength=1))
def test_failed_peer_device_fails_the_engine_without_wrong_tokens(
    new_engine: Engines,
    shallow_folder: Path,
    peer_memories: list[peer_memory.PeerMemory],
    device: int,
    loop: str,
):
    if jax.default_backend() != "cpu":
        pytest.skip("writes the kernel's error flag, in memory of the host")
    options = {"tensor_parallel_size": 2, "dtype": "float32", **LOOPS[loop]}
    engine = new_engine(shallow_folder, **options)
    assert engine.runtime_config.has_peer_memory
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    whole = engine.generate([QUESTION], params)[0].outputs[0].token_ids
    (memory,) = peer_memories
    received = {engine.add_request(QUESTION, params): list[int]() for _ in range(2)}
    for _ in range(4):
        engine.advance()
    address = memory.headers.addressable_shards[device].data.unsafe_buffer_pointer()
    jax.block_until_ready(jax.live_arrays())
    ctypes.c_int32.from_address(address).value = 1

    def receive_all() -> None:
        for update in updates(engine):
            for delta in update.deltas:
                received[update.request_id] += delta.token_ids

    with pytest.raises(RuntimeError, match=r"received no data from another tensor-parallel device"):
        receive_all()
    with pytest.raises(RuntimeError, match="the engine failed in an earlier step"):
        engine.add_request(QUESTION, params)
    for tokens in received.values():
        assert len(tokens) < len(whole)
        assert tokens == list(whole[: len(tokens)])


@pytest.mark.parametrize("family", ["gemma3_text", *in_full_tier("gpt2", "opt-350m", "llama")])
def test_all_reduces_of_each_layer_type_use_peer_memory(
    engines: Engines,
    new_engine: Engines,
    peer_memories: list[peer_memory.PeerMemory],
    folders: Callable[[str], Path],
    family: str,
):
    """The tested model families differ in the bias and the norms before and after an all-reduce."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 33)]
    alone = on_devices(engines, 1, folders(family), **TINY)
    both = on_devices(new_engine, 2, folders(family), **TINY)
    assert len(peer_memories) == (jax.default_backend() == "cpu")  # on GPUs only for bfloat16
    check_same_tokens((alone, both), prompts)


def test_engine_waits_after_many_launches_of_small_programs(
    new_engine: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without this wait, a launch could block the thread forever if a device hangs."""
    waited: list[Any] = []
    monkeypatch.setattr(model_runner, "wait_for_devices", waited.append)
    monkeypatch.setattr(model_runner, "MAX_LAUNCHES_AHEAD", 1)
    engine = new_engine(shallow_folder, tensor_parallel_size=2, dtype="float32")
    for params, count in (
        (SamplingParams(max_tokens=2), 0),
        (SamplingParams(max_tokens=2, repetition_penalty=1.3), 1),
        (SamplingParams(max_tokens=2, logit_bias={3: 1.0}), 2),
    ):
        waited.clear()
        engine.generate([QUESTION], params)
        assert sum(isinstance(it, SamplingState) for it in waited) == count


def test_hanging_step_fails_the_engine(
    new_engine: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A step hangs, for example, if a device has failed and another device waits for it in a
    collective."""
    engine = new_engine(shallow_folder, tensor_parallel_size=2, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.add_request(QUESTION, params)
    for _ in range(3):
        engine.advance()
    never = SimpleNamespace(is_ready=lambda: False)

    def stuck(*arguments: Any, **more: Any) -> results.StepHandle:
        return replace(results.StepHandle(*arguments, **more), sampled=never)

    monkeypatch.setattr(model_runner, "StepHandle", stuck)
    monkeypatch.setattr(peer_memory, "MAX_STEP_S", 0.2)
    with pytest.raises(RuntimeError, match=r"a step has not ended after 0\.2 s: one of"):
        run(engine)
    with pytest.raises(RuntimeError, match="the engine failed in an earlier step"):
        engine.add_request(QUESTION, params)
