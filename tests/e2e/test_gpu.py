"""Test the engine on an NVIDIA GPU, with the Pallas Triton kernels."""

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import Engines, answers, scores, text
from random_models import Logits, continue_greedily
from test_generation import TIGHT, greedy, prompts, tokens
from test_samples import alone, check_same
from test_under_pressure import POOL, ROOMY, SHAPE, params

from jpaged import Engine, RequestOutput, SamplingParams
from jpaged.runtime.model_runner import ModelRunner
from pallas_kernels import Backend
from tools.tiny.world import sample_examples

# Sizes of a model that the kernels for Hopper GPUs support.
WIDE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MEDIUM = WIDE | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
DUMMY: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


def save_config(folder: Path, values: dict[str, Any] = WIDE) -> None:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("num_blocks", [129, TIGHT])
def test_float32_tokens_equal_transformers(
    engines: Engines, qwen_folder: Path, qwen_logits: Logits, num_blocks: int
):
    engine = engines(qwen_folder, skip_tokenizer_init=True, dtype="float32", num_blocks=num_blocks)
    assert engine.runtime_config.backend is Backend.TRITON
    given = prompts()
    got = tokens(engine, given, greedy())
    assert got == [continue_greedily(qwen_logits, prompt, 20) for prompt in given]


@pytest.mark.parametrize(
    ("dtype", "count"),
    # The values are (dtype, number of requests). In bfloat16, results depend on the batch, so all
    # requests must fit in one batch.
    [("float32", 12), ("bfloat16", 8)],
)
def test_overlapped_and_synchronous_loops_give_the_same_tokens(
    engines: Engines, qwen_folder: Path, dtype: str, count: int
):
    options = {"skip_tokenizer_init": True, "dtype": dtype}
    overlapped = engines(qwen_folder, **options)
    synchronous = engines(qwen_folder, async_scheduling=False, **options)
    given = prompts(count)
    params = [
        SamplingParams(temperature=float(i % 3), top_p=0.9, seed=i, max_tokens=30, ignore_eos=True)
        for i in range(len(given))
    ]
    assert tokens(overlapped, given, params) == tokens(synchronous, given, params)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "fp8")]
)
def test_bundled_model_answers_95_percent_of_questions_correctly(
    engines: Engines, dtype: str, quantization: str | None
):
    options = {"dtype": dtype, "quantization": quantization}
    engine = engines(max_model_len=960, num_blocks=80, **options)
    examples = sample_examples(3, 100)
    params = SamplingParams(temperature=0.0, max_tokens=800)
    outputs = engine.generate([e.prompt for e in examples], params)
    right = [text(o) == e.completion for o, e in zip(outputs, examples, strict=True)]
    assert np.mean(right) >= 0.95


def test_shared_blocks_and_preemption_change_no_answer(engines: Engines):
    """The test compares with single requests that share no blocks. One test covers all preemption
    modes, so that the single requests run only once."""
    examples = [e for e in sample_examples(11, 400) if len(e.prompt + e.completion) < 60][:64]
    shape = {**SHAPE, "dtype": "float32"}
    roomy = engines(num_blocks=ROOMY, enable_prefix_caching=False, **shape)
    want = [answers(roomy.generate(e.prompt, params(i)))[0] for i, e in enumerate(examples)]
    for mode in ("swap", "recompute", "auto"):
        tight = engines(num_blocks=POOL + 1, preemption_mode=mode, **shape)
        before = tight.stats()
        outputs = tight.generate([e.prompt for e in examples], [params(i) for i in range(64)])
        assert answers(outputs) == want, mode
        assert tight.stats().num_preemptions > before.num_preemptions
        if mode == "swap":
            assert tight.stats().num_swapped_in_blocks > before.num_swapped_in_blocks


def test_each_sample_equals_the_output_of_a_single_request_with_the_same_seed(engines: Engines):
    shape = {**SHAPE, "dtype": "float32"}
    sharing = engines(num_blocks=ROOMY, **shape)
    apart = engines(num_blocks=ROOMY, enable_prefix_caching=False, **shape)
    own = SamplingParams(temperature=3.0, n=5, seed=3, max_tokens=30, logprobs=1)
    prompt = "Count from 3 to 20"
    check_same(sharing.generate(prompt, own)[0].outputs, alone(apart, prompt, own))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "name", "in_one"), [("auto", "bf16", 1), ("fp8", "u16", 2)]
)
def test_no_compiled_program_copies_the_kv_cache(
    engines: Engines, kv_cache_dtype: str, name: str, in_one: int
):
    needed = []
    for num_blocks in (129, 100_000):
        engine = engines(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, num_blocks=num_blocks)
        model, programs = engine.model_config, engine._runner.programs.items()
        row = engine.runtime_config.block_size, model.num_kv_heads, model.head_size // in_one
        pattern = f"{name}[{','.join(map(str, (num_blocks, *row)))}]"
        kinds = "decode", "decode_burst", "prefill"
        steps = {key: it.program for key, it in programs if key[0] in kinds}
        for program in steps.values():
            lines = [line for line in program.as_text().splitlines() if pattern in line]
            assert lines
            assert not [line for line in lines if " copy(" in line]
        needed.append({key: it.memory_analysis().temp_size_in_bytes for key, it in steps.items()})
    assert needed[0].keys() == needed[1].keys()
    assert max(needed[1][key] - needed[0][key] for key in needed[0]) < num_blocks * np.prod(row)


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), [("auto", 0.1), ("fp8", 0.2)])
def test_bfloat16_model_with_head_size_128_gives_logprobs_close_to_float32(
    engines: Engines, tmp_path: Path, kv_cache_dtype: str, bound: float
):
    """Compare the log-probabilities of the Hopper prefill kernel with those in float32, for each
    prefill bucket."""
    save_config(tmp_path)
    options = {**DUMMY, "max_model_len": 512, "kv_cache_dtype": kv_cache_dtype}
    options |= {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    rng = np.random.default_rng(0)
    given = [rng.integers(0, 128, n).tolist() for n in (1, 7, 16, 17, 130, 300, 500, 33, 64)]
    exact, rounded = (
        scores(engines(tmp_path, dtype=dtype, **options), given)
        for dtype in ("float32", "bfloat16")
    )
    assert len(exact) == sum(map(len, given)) - len(given)
    np.testing.assert_allclose(rounded, exact, atol=bound)


MEMORY_SCRIPT = """
import json, sys
import jax, numpy, pytest
from jpaged import Engine, SamplingParams

def bytes_in_use():
    return jax.local_devices()[0].memory_stats()["bytes_in_use"]

before, options = bytes_in_use(), json.loads(sys.argv[2])
engine = Engine(sys.argv[1], **options)
account = engine.memory_account
assert bytes_in_use() - before == pytest.approx(account.resident, rel=0.01)
rng = numpy.random.default_rng(0)
given = [rng.integers(0, 32000, 504).tolist() for _ in range(32)]
params = SamplingParams(
    temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20, max_tokens=8, ignore_eos=True
)
outputs = engine.generate(given, params, use_tqdm=False)
assert {len(output.outputs[0].token_ids) for output in outputs} == {8}
assert bytes_in_use() - before == pytest.approx(account.resident, rel=0.01)
assert account.total <= account.limit
"""


def test_memory_account_equals_the_device_statistics(tmp_path: Path):
    """The memory that the account predicts and the memory that the device reports may differ by 1
    %, before and after a batch of the largest size.

    A process of its own measures, because the device's statistics also count what other tests of
    this process have allocated.
    """
    save_config(tmp_path, MEDIUM)
    options = {**DUMMY, "max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 512}
    options |= {"num_scheduler_steps": 1, "kv_cache_memory_bytes": 2 * 2**30}
    options["compilation_cache_dir"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), json.dumps(options)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr


def test_fused_decode_steps_in_bfloat16_give_logprobs_close_to_prefill(
    engines: Engines, tmp_path: Path
):
    """Send the generated tokens as a prompt, and compare the log-probabilities of the prompt with
    those of the decode steps."""
    save_config(tmp_path)
    engine = engines(tmp_path, dtype="bfloat16", num_blocks=200, max_num_seqs=8, **DUMMY)
    rng = np.random.default_rng(1)
    given = [rng.integers(0, 128, n).tolist() for n in (3, 40, 16, 90, 17)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, logprobs=0, ignore_eos=True)
        for n in (60, 20, 45, 9, 33)
    ]
    outputs = engine.generate(given, params)
    for output, entries in zip(outputs, score_as_prompts(engine, outputs), strict=True):
        answer = output.outputs[0]
        for token, want, got in zip(answer.token_ids, entries, answer.logprobs or [], strict=True):
            assert abs(got[token].logprob - want[token].logprob) < 0.1


def score_as_prompts(engine: Engine, outputs: list[RequestOutput]) -> list[list[Any]]:
    """Send each prompt with its generated tokens as a new prompt, and score the generated tokens.

    Returns:
        For each output and each generated token: the log-probabilities of the generated token and
        of the most probable token, as prompt logprobs.
    """
    prompts = [[*it.prompt_token_ids, *it.outputs[0].token_ids] for it in outputs]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    scored = zip(outputs, engine.generate(prompts, params), strict=True)
    return [list(it.prompt_logprobs or ())[len(output.prompt_token_ids) :] for output, it in scored]


@pytest.mark.parametrize(
    ("max_num_seqs", "copies", "sizes"), [(8, 1, {8}), (20, 3, {8, 32}), (48, 9, {32, 48})]
)
def test_multi_step_decode_in_bfloat16_chooses_the_most_probable_tokens(
    engines: Engines, tmp_path: Path, max_num_seqs: int, copies: int, sizes: set[int]
):
    """Send the generated tokens as a prompt. Except for rounding, no other token may have a higher
    log-probability than the generated token."""
    save_config(tmp_path)
    limits = {"num_blocks": 600, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 512}
    engine = engines(tmp_path, dtype="bfloat16", **limits, **DUMMY)
    rng = np.random.default_rng(1)
    given = [rng.integers(0, 128, n).tolist() for n in copies * (3, 40, 16, 90, 17)]
    lengths = copies * (60, 20, 45, 9, 33)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    with engine.record_steps() as steps:
        outputs = engine.generate(given, params)
    assert {it.batch_size("decode_burst") for it in steps.launches} - {None} == sizes
    for output, entries in zip(outputs, score_as_prompts(engine, outputs), strict=True):
        for token, entry in zip(output.outputs[0].token_ids, entries, strict=True):
            assert entry[token].logprob > max(found.logprob for found in entry.values()) - 0.1


def test_logits_buffer_keeps_its_address_between_decode_steps(
    tmp_path: Path, compilation_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    save_config(tmp_path, WIDE | {"vocab_size": 32000})
    options = {**DUMMY, "max_num_seqs": 64, "num_blocks": 400, "max_num_batched_tokens": 256}
    options |= {"num_scheduler_steps": 1, "num_compile_workers": 0}
    engine = Engine(tmp_path, compilation_cache_dir=compilation_cache, **options)
    launch, held, seen = ModelRunner._launch, deque(), []

    def watched(runner: ModelRunner, kind: str, key: Any = None, **inputs: Any) -> Any:
        if kind == "sample":
            logits = inputs["logits"]
            seen.append((logits.shape[0], logits.unsafe_buffer_pointer()))
            held.append(inputs["inputs"].packed_params)
            while len(held) > len(seen) % 3:
                held.popleft()
        return launch(runner, kind, key, **inputs)

    monkeypatch.setattr(ModelRunner, "_launch", watched)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.generate([[i, 7, 8, 9] for i in range(64)], params)
    assert len(seen) >= 40
    assert {rows for rows, _ in seen[10:30]} == {64}
    assert len({address for _, address in seen[10:30]}) == 1
