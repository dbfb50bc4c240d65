"""Test sampling with a vocabulary that is split over devices. The devices are virtual CPU devices;
with `-m gpu2`, they are GPUs."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jpaged.config import LogprobsMode
from jpaged.core.plan import NO_TOKEN
from jpaged.models.sharding import MESH_AXIS, make_mesh
from jpaged.runtime.sampler import (
    FULL_LEVEL,
    SCORED_GREEDY,
    SampledTokens,
    SamplerLevel,
    bias_row,
    init_sampling_state,
    load_bias,
    pack_params,
    sample,
    unpack_params,
)
from jpaged.runtime.steps import mask_step
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend
from tests.covering import covering

pytestmark = pytest.mark.gpu2

COUNTS = (2, 4, 8)
B, V = 6, 40
EXCHANGING = SamplerLevel.GREEDY, SamplerLevel.RANDOM
GATHERING = SamplerLevel.TRUNCATED, SCORED_GREEDY, FULL_LEVEL
PARAMS = [SamplingParams(temperature=value) for value in (0.0, 0.7, 1.3, 1.0, 0.0, 5.0)]
ASKING = [
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.3, top_p=0.8, logprobs=0),
    SamplingParams(top_k=5),
    SamplingParams(min_p=0.05, logit_bias={3: 9.0, V - 1: 8.0}),
    SamplingParams(temperature=0.0, allowed_token_ids=[1, V - 2]),
    SamplingParams(temperature=5.0),
]


def run_on_devices(function: Callable, count: int, logits_out: bool = False) -> Callable:
    """Return a function that runs `function` on `count` devices, each with a shard of the logits.

    If `logits_out`, `function` returns the logits of one shard, and the result has the logits of
    the whole vocabulary. Otherwise, the first axis of each result is the device.
    """
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    mesh = make_mesh(jax.devices(), count)
    vocab_split = PartitionSpec(None, MESH_AXIS)

    def each(logits: jax.Array, others: tuple) -> Any:
        found = function(logits, *others)
        return found if logits_out else jax.tree.map(lambda it: it[None], found)

    specs: dict[str, Any] = {"in_specs": (vocab_split, PartitionSpec()), "check_vma": False}
    specs["out_specs"] = vocab_split if logits_out else PartitionSpec(MESH_AXIS)
    run = jax.jit(jax.shard_map(each, mesh=mesh, **specs))
    return lambda logits, *others: run(logits, others)


@cache
def sampler(
    count: int, level: SamplerLevel, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
) -> Callable:
    options = {"level": level, "backend": Backend.XLA, "max_logprobs": 4, "logprobs_mode": mode}
    if count == 1:
        return jax.jit(partial(sample, **options))
    return run_on_devices(partial(sample, is_vocab_sharded=True, **options), count)


def rows_of(params: list[SamplingParams]) -> tuple:
    """Return the arguments of the sampler for one row per item of `params`.

    Returns:
        The packed parameters, the sampling state with the logit biases, and the row indices.
    """
    packed = np.stack([pack_params(one, 2**33 * i - 7) for i, one in enumerate(params)])
    positions = jnp.arange(len(params), dtype=jnp.int32) * 5
    state, ids = init_sampling_state(len(params) + 1, V), jnp.arange(len(params), dtype=jnp.int32)
    for row, one in enumerate(params):
        if one.biases_logits:
            state = load_bias(state, jnp.int32(row), jnp.asarray(bias_row(one, V)))
    return unpack_params(jnp.asarray(packed), positions), state, ids


def run_on_one_and_many(
    logits: np.ndarray,
    level: SamplerLevel,
    count: int,
    params: list[SamplingParams],
    *mode: LogprobsMode,
) -> tuple[SampledTokens, SampledTokens]:
    """Run the sampler on one device and on `count` devices, and return both results. Check that all
    `count` devices return equal results."""
    one, shared = (
        sampler(n, level, *mode)(jnp.asarray(logits), *rows_of(params)) for n in (1, count)
    )
    first = jax.tree.map(lambda it: np.asarray(it)[0], shared)
    for leaf, own in zip(jax.tree.leaves(shared), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(leaf, np.stack([own] * count))
    return jax.tree.map(np.asarray, one), first


def random_logits(seed: int) -> np.ndarray:
    return (np.random.RandomState(seed).randn(B, V) * 3).astype(np.float32)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("level", EXCHANGING)
def test_split_vocabulary_gives_the_same_tokens_as_one_device(level: SamplerLevel, count: int):
    params = PARAMS if level else PARAMS[:1] * B
    found = set()
    for seed in range(8):
        one, shared = run_on_one_and_many(random_logits(seed), level, count, params)
        np.testing.assert_array_equal(shared.token_ids, one.token_ids)
        found |= set((one.token_ids * count // V).tolist())
    assert found == set(range(count))  # every device's shard was sampled


@pytest.mark.parametrize(
    ("level", "count"), covering(EXCHANGING, COUNTS, strength=1, keep=lambda _, count: count == 2)
)
def test_lowest_token_id_wins_a_tie_across_devices(level: SamplerLevel, count: int):
    """Test ties within one device, between adjacent devices, between distant devices, and between
    all devices."""
    own = V // count
    logits = np.zeros((B, V), np.float32)
    tied = [[own + 1, own + 2], [own - 1, own], [3, V - 1], [V - own, V - 1], [V - 1], []]
    for row, tokens in zip(logits, tied, strict=True):
        row[tokens] = 2.0
    one, shared = run_on_one_and_many(logits, level, count, PARAMS[:1] * B)
    assert shared.token_ids.tolist() == [min(tokens, default=0) for tokens in tied]
    np.testing.assert_array_equal(shared.token_ids, one.token_ids)


@pytest.mark.parametrize(
    ("num_real", "count"),
    covering([37, 33, 3], COUNTS, strength=1, keep=lambda _, count: count == 2),
)
def test_padded_vocabulary_gives_the_same_tokens(num_real: int, count: int):
    logits = random_logits(num_real)
    alone = sampler(1, SamplerLevel.RANDOM)(jnp.asarray(logits[:, :num_real]), *rows_of(PARAMS))
    logits[:, num_real:] = -np.inf
    _, shared = run_on_one_and_many(logits, SamplerLevel.RANDOM, count, PARAMS)
    np.testing.assert_array_equal(shared.token_ids, alone.token_ids)


NOT_FINITE: dict[str, dict[int, float]] = {
    "one NaN": {11: np.nan},
    "the last is NaN": {V - 1: np.nan},
    "infinite": {11: np.inf},
    "infinite on two devices": {0: np.inf, V - 1: np.inf},
    "all forbidden": dict.fromkeys(range(V), -np.inf),
    "forbidden or NaN": dict.fromkeys(range(V), -np.inf) | {20: np.nan},
}


@pytest.mark.parametrize("level", EXCHANGING)
@pytest.mark.parametrize("case", NOT_FINITE)
def test_a_row_without_a_finite_maximum_has_no_token_on_any_device(case: str, level: SamplerLevel):
    params = PARAMS if level else PARAMS[:1] * B
    expected, _ = run_on_one_and_many(random_logits(1), level, 2, params)
    for row in range(B):
        logits = random_logits(1)
        logits[row, list(NOT_FINITE[case])] = list(NOT_FINITE[case].values())
        one, shared = run_on_one_and_many(logits, level, 2, params)
        assert shared.token_ids[row] == one.token_ids[row] == NO_TOKEN
        np.testing.assert_array_equal(
            np.delete(shared.token_ids, row), np.delete(expected.token_ids, row)
        )


@pytest.mark.parametrize(
    ("level", "count"), covering(GATHERING, COUNTS, strength=1, keep=lambda _, count: count == 2)
)
def test_samplers_that_gather_logits_give_the_same_logprobs_as_one_device(
    level: SamplerLevel, count: int
):
    params = ASKING if level == FULL_LEVEL else PARAMS
    params = params if SamplerLevel.RANDOM in level else [ASKING[0], ASKING[4]] * 3
    one, shared = run_on_one_and_many(random_logits(2), level, count, params)
    for found, wanted in zip(jax.tree.leaves(shared), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("level", "mode"),
    covering(
        [SCORED_GREEDY, FULL_LEVEL],
        [mode for mode in LogprobsMode if mode is not LogprobsMode.RAW_LOGPROBS],
        strength=0,
        keep=lambda level, mode: level == FULL_LEVEL and mode == "processed_logprobs",
    ),
)
def test_each_logprobs_mode_gives_the_same_logprobs_as_one_device(
    level: SamplerLevel, mode: LogprobsMode
):
    params = ASKING if level == FULL_LEVEL else [ASKING[0], ASKING[4]] * 3
    one, shared = run_on_one_and_many(random_logits(2), level, 2, params, mode)
    np.testing.assert_array_equal(shared.token_ids, one.token_ids)
    # XLA may round a division by the temperature differently: allow two units in the last place.
    np.testing.assert_allclose(np.asarray(shared.scores), np.asarray(one.scores), rtol=0, atol=2)


@pytest.mark.parametrize("count", COUNTS)
def test_mask_applies_to_each_vocabulary_shard(count: int):
    logits = jnp.asarray(random_logits(3))
    words = np.random.RandomState(4).randint(-(2**31), 2**31, (B, 2), np.int64)
    allowed = jnp.asarray(words.astype(np.int32))
    shared = run_on_devices(partial(mask_step, is_vocab_sharded=True), count, logits_out=True)(
        logits, allowed
    )
    np.testing.assert_array_equal(shared, mask_step(logits, allowed))
    assert 0 < np.isinf(np.asarray(shared)).sum() < B * V


@pytest.mark.parametrize("level", [*EXCHANGING, *GATHERING])
def test_devices_exchange_only_the_numbers_that_the_sampler_needs(level: SamplerLevel):
    """Greedy and random sampling exchange two numbers per row. Random sampling also needs one
    all-reduce."""

    def run(logits: jax.Array, *others: Any) -> SampledTokens:
        options = {"level": level, "backend": Backend.XLA, "max_logprobs": 4}
        return sample(logits, *others, is_vocab_sharded=True, **options)

    call = partial(run_on_devices(run, 2), jnp.asarray(random_logits(0)), *rows_of(PARAMS))
    text = jax.jit(call).lower().as_text()
    gathered = re.findall(r"stablehlo\.all_gather.*-> tensor<(\S+)>", text)
    reduced = re.findall(r"stablehlo\.all_reduce", text)
    if level in EXCHANGING:
        assert gathered == [f"2x{B}x1x2xi32"]
        assert len(reduced) == (level is SamplerLevel.RANDOM)
    else:
        assert gathered == [f"2x{B}x{V // 2}xf32"]
        assert not reduced
