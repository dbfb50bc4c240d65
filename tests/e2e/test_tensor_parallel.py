"""Test that tensor-parallel devices give the tokens of one device. The devices are virtual, except
with `-m gpu2` on GPUs."""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import LOOPS, QUESTION, Engines, run, scores

from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.compile import sizing
from jpaged.runtime import model_runner, peer_memory, results
from jpaged.runtime.sampler import SamplingState
from tests.covering import covering

pytestmark = pytest.mark.gpu2

COUNTS = (2, 4, 8)
HEADS = {"num_attention_heads": 8, "hidden_size": 64}
KV_HEADS = {"head_dim": 8, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 96, "vocab_size": 96},
    "opt-350m": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "llama": KV_HEADS | {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True},
    "mistral": KV_HEADS | {"num_key_value_heads": 1, "sliding_window": 9, "vocab_size": 96},
    "qwen2": KV_HEADS | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": KV_HEADS | {"num_key_value_heads": 2, "vocab_size": 96},
    "gemma3_text": KV_HEADS | {"num_key_value_heads": 2, "sliding_window": 12, "vocab_size": 96},
}
"""With as many KV heads as devices, fewer and one; with a vocabulary that 8 divides, and 97."""
IN_DEFAULT_TIER = {("opt", 8), ("mistral", 4)}
"""Families and numbers of devices: as many as KV heads, and more. Tests below have the others."""

TINY = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a random checkpoint of a family."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            values = {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 64}
            values |= {"bos_token_id": 0, "eos_token_id": 1} | HEADS | FAMILIES[family]
            config = transformers.AutoConfig.for_model(family.partition("-")[0], **values)
            torch.manual_seed(3)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return folder


def shared(engines: Engines, count: int, model: Path | None = None, **options: Any) -> Engine:
    """Return an engine on several devices."""
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    return engines(model, tensor_parallel_size=count, **{"dtype": "float32"} | options)


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    ("family", "count"),
    [
        pytest.param(*each, marks=[] if each in IN_DEFAULT_TIER else [pytest.mark.full])
        for each in itertools.product(FAMILIES, COUNTS)
    ],
)
def test_every_family_gives_the_tokens_of_one_device(
    engines: Engines, folders: Callable[[str], Path], family: str, count: int
):
    rng = np.random.default_rng(count)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 17, 33)]
    options = {"skip_tokenizer_init": True, **TINY}
    alone, all_of_them = (shared(engines, n, folders(family), **options) for n in (1, count))
    assert tokens_of(all_of_them, prompts) == tokens_of(alone, prompts)


@pytest.fixture(params=[*LOOPS])
def pair(
    engines: Engines, shallow_folder: Path, request: pytest.FixtureRequest
) -> tuple[Engine, Engine]:
    """A model on one device and on two, in each loop."""
    options = LOOPS[request.param]
    alone, both = (shared(engines, count, shallow_folder, **options) for count in (1, 2))
    return alone, both


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "truncated": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 1},
    "samples": {"temperature": 1.0, "n": 5, "seed": 2},
    "beams": {"temperature": 0.0, "beam_width": 4, "n": 2},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3},
    "biases": {"temperature": 0.0, "logit_bias": {40: 5.0, 41: -5.0}, "min_tokens": 12},
    "structured": {"structured_outputs": StructuredOutputs(regex="[0-9]{2}(, [0-9]{2}){2,6}")},
}


@pytest.mark.parametrize(("pair", "asked"), covering(LOOPS, ASKED, strength=1), indirect=["pair"])
def test_all_sampling_options_give_the_texts_of_one_device(pair: tuple[Engine, Engine], asked: str):
    prompts = [QUESTION, "Say hello", "Count from 1 to 20"]
    params = SamplingParams(**{"max_tokens": 24, **ASKED[asked]})
    alone, both = ([it.outputs for it in engine.generate(prompts, params)] for engine in pair)
    assert [[c.token_ids for c in one] for one in both] == [
        [c.token_ids for c in one] for one in alone
    ]


def test_rows_that_gather_logits_change_no_other_row(pair: tuple[Engine, Engine]):
    """In one step with such as need the best token of each device alone, and after these."""
    lengths = {"greedy": 24, "seeded": 24}
    params = [
        SamplingParams(**{"seed": 5, "max_tokens": lengths.get(name, 12), **it})
        for name, it in ASKED.items()
    ]
    alone, both = (engine.generate([QUESTION] * len(params), params) for engine in pair)
    for one, two in zip(alone, both, strict=True):
        assert [it.token_ids for it in two.outputs] == [it.token_ids for it in one.outputs]


@pytest.mark.parametrize(
    "count", [4, *(pytest.param(count, marks=pytest.mark.full) for count in (2, 8))]
)
def test_mixed_rows_in_one_step_give_the_tokens_of_one_device(
    engines: Engines, folders: Callable[[str], Path], count: int
):
    options = {"skip_tokenizer_init": True, **TINY, "max_num_seqs": 16}
    kinds = {name: it for name, it in ASKED.items() if name != "structured"}
    kinds["scored"] = {"temperature": 0.8, "logprobs": 3, "seed": 9}
    lengths = {"greedy": 24, "seeded": 16}
    common = {"ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(**{"max_tokens": lengths.get(name, 12), **common, **it, "seed": 5})
        for name, it in kinds.items()
    ]
    prompts = [[5 + i, 7, 9] for i in range(len(params))]
    alone, all_of_them = (
        shared(engines, n, folders("qwen3"), **options).generate(prompts, params)
        for n in (1, count)
    )
    for one, two in zip(alone, all_of_them, strict=True):
        assert [it.token_ids for it in two.outputs] == [it.token_ids for it in one.outputs]


def test_logprobs_equal_those_of_one_device(pair):
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=4, prompt_logprobs=3)
    one, two = (engine.generate([QUESTION], params)[0] for engine in pair)
    found = [
        [[(token, entry.logprob) for token, entry in place.items()] for place in places if place]
        for output in (one, two)
        for places in [[*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]]
    ]
    assert len(found[0]) > 10
    for own, others in zip(*found, strict=True):
        assert [token for token, _ in own] == [token for token, _ in others]
        np.testing.assert_allclose([p for _, p in own], [p for _, p in others], atol=1e-4)


def test_tensor_parallel_devices_share_prefixes(engines: Engines, shallow_folder: Path):
    both = shared(engines, 2, shallow_folder)
    text = "Count from 1 to 20. " * 6
    params = SamplingParams(temperature=0.0, max_tokens=8)
    first = both.generate([text + QUESTION], params)[0]
    again = both.generate([text + QUESTION], params)[0]
    assert (again.num_cached_tokens or 0) >= 64
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize(
    "mode", ["swap", *(pytest.param(it, marks=pytest.mark.full) for it in ("recompute", "auto"))]
)
def test_preempted_sequences_continue_on_tensor_parallel_devices(
    engines: Engines, shallow_folder: Path, mode: str
):
    """Eleven blocks for six sequences of up to four."""
    few = {"num_blocks": 12, "preemption_mode": mode, "swap_space": 0.0004, "max_model_len": 128}
    options = {"enable_prefix_caching": False, **few}
    prompts = [f"Count from {n} to {n + 20}" for n in range(1, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    alone, both = (shared(engines, count, shallow_folder, **options) for count in (1, 2))
    one, two = (engine.generate(prompts, params) for engine in (alone, both))
    assert [it.outputs[0].text for it in two] == [it.outputs[0].text for it in one]
    stats = both.stats()
    assert stats.num_preemptions > 0
    assert stats.num_host_blocks == alone.stats().num_host_blocks
    if mode == "swap":
        assert stats.num_swapped_out_blocks > 0


def test_memory_account_is_per_device(engines: Engines):
    alone, both = (shared(engines, count) for count in (1, 2))
    one, two = alone.memory_account, both.memory_account
    assert two.kv_cache * 2 == one.kv_cache
    assert one.weights / 2 <= two.weights < 0.6 * one.weights


REFUSED = {
    3: "tensor_parallel_size=3 cannot split the model's num_key_value_heads=2; use 1 or 2",
    4: "tensor_parallel_size=4 cannot split the model's num_attention_heads=6",
}


@pytest.mark.parametrize("count", [*REFUSED])
def test_indivisible_sizes_are_refused_by_name(count: int):
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices, which are looked for first")
    with pytest.raises(ValueError, match=REFUSED[count]):
        Engine(tensor_parallel_size=count)


def test_missing_devices_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 is larger than .* has 1"):
        Engine(tensor_parallel_size=2)


def test_random_arrivals_and_aborts_on_tensor_parallel_devices(
    engines: Engines, shallow_folder: Path
):
    both = shared(engines, 2, shallow_folder)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    wanted = both.generate([QUESTION], params)[0].outputs[0].text
    both.add_request(QUESTION, params, request_id="a")
    both.step()
    both.add_request(QUESTION, params, request_id="b")
    both.add_request("Say hello", params, request_id="c")
    both.step()
    both.abort("c")
    found = run(both)
    assert found["a"].outputs[0].text == found["b"].outputs[0].text == wanted


@pytest.mark.full
def test_bfloat16_logprobs_differ_no_more_than_between_batches(
    engines: Engines, shallow_folder: Path
):
    """Between two devices and one as between a prompt in a batch and the same alone."""
    texts = [f"Count from {n} to {n + 20}. {QUESTION}" for n in range(8)]
    options = {"dtype": "bfloat16", "enable_prefix_caching": False}
    alone, both = (shared(engines, count, shallow_folder, **options) for count in (1, 2))
    one_by_one = np.concatenate([scores(alone, [text]) for text in texts])
    in_a_batch, by_both = scores(alone, texts), scores(both, texts)
    noise = np.abs(in_a_batch - one_by_one).mean()
    rounding = 2.0**-8 * np.abs(in_a_batch).mean()  # a processor's batches all round alike
    assert len(by_both) > 200
    assert 0 < np.abs(by_both - in_a_batch).mean() <= max(2 * noise, rounding)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "opt-350m", "llama", "gemma3_text"])
def test_every_layer_type_in_bfloat16_gives_close_logprobs(
    engines: Engines, folders: Callable[[str], Path], family: str
):
    """Where rows are summed before a bias, a norm of their own, or one of another kind."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 96, n).tolist() for n in (2, 16, 33, 50)]
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16", **TINY}
    alone, both = (shared(engines, n, folders(family), **options) for n in (1, 2))
    found, wanted = scores(both, prompts), scores(alone, prompts)
    assert len(wanted) == 97
    assert np.abs(found - wanted).mean() <= 2.0**-7 * np.abs(wanted).mean()


def test_devices_sample_the_same_tokens(engines: Engines, shallow_folder: Path):
    both = shared(engines, 2, shallow_folder)
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
    """Return the peer memory of the engines of a test. Virtual devices have it too; their programs
    equal those of GPUs except for the all-reduces."""
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


@pytest.mark.parametrize(("loop", "place"), covering(LOOPS, [0, 1], strength=1))
def test_lost_peer_device_fails_the_engine(
    new_engine: Engines,
    shallow_folder: Path,
    peer_memories: list[peer_memory.PeerMemory],
    place: int,
    loop: str,
):
    """Whichever it is, no request gets a token of what was computed since, and all get an error."""
    if jax.default_backend() != "cpu":
        pytest.skip("writes where a kernel would, in memory that a processor has")
    options = {"tensor_parallel_size": 2, "dtype": "float32", **LOOPS[loop]}
    engine = new_engine(shallow_folder, **options)
    assert engine.runtime_config.has_peer_memory
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    whole = engine.generate([QUESTION], params)[0].outputs[0].token_ids
    (memory,) = peer_memories
    for name in ("first", "second"):
        engine.add_request(QUESTION, params, request_id=name)
    told: dict[str, list[int]] = {"first": [], "second": []}

    def go_on() -> None:
        while engine.has_work:
            engine.advance()
            for delta in engine.take_deltas():
                for one in delta.deltas:
                    told[delta.request_id] += one.token_ids

    for _ in range(4):
        engine.advance()
    address = memory.headers.addressable_shards[place].data.unsafe_buffer_pointer()
    jax.block_until_ready(jax.live_arrays())
    ctypes.c_int32.from_address(address).value = 1
    with pytest.raises(RuntimeError, match=r"received no data from another tensor-parallel device"):
        go_on()
    with pytest.raises(RuntimeError, match="the engine failed in an earlier step"):
        engine.add_request(QUESTION, params)
    for tokens in told.values():
        assert len(tokens) < len(whole)
        assert tokens == list(whole[: len(tokens)])


@pytest.mark.parametrize(
    "family",
    [
        "gemma3_text",
        *(pytest.param(it, marks=pytest.mark.full) for it in ("gpt2", "opt-350m", "llama")),
    ],
)
def test_all_reduces_of_each_layer_type_use_peer_memory(
    engines: Engines,
    new_engine: Engines,
    peer_memories: list[peer_memory.PeerMemory],
    folders: Callable[[str], Path],
    family: str,
):
    """Before a norm, after a bias, with the norm on the sum, and with one more before the sum."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 33)]
    options = {"skip_tokenizer_init": True, **TINY}
    alone = shared(engines, 1, folders(family), **options)
    both = new_engine(folders(family), tensor_parallel_size=2, dtype="float32", **options)
    assert len(peer_memories) == (jax.default_backend() == "cpu")  # on GPUs bfloat16 alone has any
    assert tokens_of(both, prompts) == tokens_of(alone, prompts)


def test_launches_of_row_loads_are_bounded(
    new_engine: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A device that hangs would stop the thread in a launch, where nothing ends its wait."""
    waited: list[Any] = []
    monkeypatch.setattr(model_runner, "wait_for_devices", waited.append)
    monkeypatch.setattr(model_runner, "MAX_LAUNCHES_AHEAD", 1)
    engine = new_engine(shallow_folder, tensor_parallel_size=2, dtype="float32")
    for params, count in (
        (SamplingParams(max_tokens=2), 0),
        (SamplingParams(max_tokens=2, repetition_penalty=1.3), 1),
        (SamplingParams(max_tokens=2, logit_bias={3: 1.0}), 2),  # its bias, and its marks
    ):
        waited.clear()
        engine.generate([QUESTION], params)
        assert sum(isinstance(it, SamplingState) for it in waited) == count


def test_hanging_step_fails_the_engine(
    new_engine: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where a device waits in a collective for one that has failed."""
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
