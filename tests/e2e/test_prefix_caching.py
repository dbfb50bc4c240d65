"""Test that prefix caching changes no token, and that cached tokens are counted exactly."""

import random
from pathlib import Path
from typing import Any

import pytest
from e2e_options import GREEDY, QUESTION, SMALL, Engines, run, take_steps, text
from lazy_programs import lazy_programs

from jpaged import Engine, SamplingParams
from tests.covering import covering

PREFIX = "Count from 1 to 9. Reverse stone. Spell fox. What is 12 plus 30? "
TIGHT = 24  # blocks
BLOCK_SIZE = 16


@pytest.fixture(params=[True, False], ids=["overlapped", "synchronous"])
def engine(engines: Engines, shallow_folder: Path, request: pytest.FixtureRequest) -> Engine:
    made = engines(shallow_folder, async_scheduling=request.param)
    made.reset_prefix_cache()
    return made


def encode(engine: Engine, prompt: str) -> list[int]:
    tokenizer: Any = engine.tokenizer
    return tokenizer.encode(prompt)


def complete(engine: Engine, prompt: Any, params: Any = GREEDY) -> Any:
    return engine.generate([prompt], params)[0]


def cacheable(num_tokens: int) -> int:
    """Return how many tokens of a prompt can come from the cache: the tokens in full blocks that do
    not contain the last token."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_repeated_prompt_is_served_from_the_cache(engine: Engine):
    prompt = encode(engine, PREFIX + QUESTION)
    before = engine.stats()
    first, second = complete(engine, prompt), complete(engine, prompt)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == cacheable(len(prompt)) > 0
    now = engine.stats()
    assert now.num_cached_tokens - before.num_cached_tokens == second.num_cached_tokens
    assert now.prefix_cache_hits - before.prefix_cache_hits == second.num_cached_tokens
    assert now.prefix_cache_queries - before.prefix_cache_queries == 2 * len(prompt)
    assert now.num_cached_blocks > 0
    assert now.num_used_blocks == 0
    engine.reset_prefix_cache()
    assert engine.stats().num_cached_blocks == 0
    assert complete(engine, prompt).num_cached_tokens == 0


def test_blocks_of_a_running_request_are_shared(engine: Engine):
    prompt = encode(engine, PREFIX)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add_request(prompt, params, request_id="a")
    take_steps(engine, 5)
    used = engine.stats().num_used_blocks
    engine.add_request(prompt, params, request_id="b")
    engine.step()
    assert engine.stats().num_used_blocks - used < len(prompt) // BLOCK_SIZE
    engine.check_integrity()
    outputs = run(engine)
    assert outputs["b"].num_cached_tokens == cacheable(len(prompt))
    assert outputs["a"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids


def test_next_turn_of_a_conversation_reuses_the_cached_history(engines: Engines):
    engine, history, messages = engines(), [], []
    engine.reset_prefix_cache()
    for question in (QUESTION, "Reverse stone", "Spell fox", QUESTION):
        messages.append({"role": "user", "content": question})
        prompt = engine.render_chat(messages)
        output = complete(engine, prompt)
        # The keys and values of the last sampled token are never computed.
        common = next((i for i, (a, b) in enumerate(zip(history, prompt)) if a != b), len(history))  # noqa: B905
        most = min(common, max(len(history) - 1, 0)) // BLOCK_SIZE * BLOCK_SIZE
        assert output.num_cached_tokens == min(most, cacheable(len(prompt)))
        history = prompt + list(output.outputs[0].token_ids)
        messages.append({"role": "assistant", "content": text(output)})
    assert output.num_cached_tokens > len(engine.render_chat(messages[:3]))  # answers are cached


def test_full_blocks_of_generated_tokens_are_cached(engine: Engine):
    prompt = encode(engine, QUESTION)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    whole = prompt + list(complete(engine, prompt, params).outputs[0].token_ids)
    again = complete(engine, [*whole, 5])
    assert again.num_cached_tokens == (len(whole) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_prompts_with_different_cache_salts_share_no_blocks(engine: Engine):
    prompt = encode(engine, PREFIX)
    salted = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "b")]
    for it in (*salted, prompt):
        assert complete(engine, it).num_cached_tokens == 0
    for it in (*salted, {"prompt": PREFIX, "cache_salt": "a"}, PREFIX):
        assert complete(engine, it).num_cached_tokens == cacheable(len(prompt))


def test_request_with_prompt_logprobs_fills_the_cache_but_does_not_use_it(engine: Engine):
    prompt = encode(engine, PREFIX)
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, logprobs=1)
    first, second = complete(engine, prompt, params), complete(engine, prompt, params)
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert len(second.prompt_logprobs) == len(prompt)
    assert first.prompt_logprobs[1:] == second.prompt_logprobs[1:]
    third = complete(engine, prompt)
    assert third.num_cached_tokens == cacheable(len(prompt))


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that share prefixes of many lengths, and sampling parameters. Some prompts
    need more than one step."""
    rng = random.Random(0)
    prefix = [rng.randrange(5, 200) for _ in range(150)]
    prompts, params = [], []
    for i in range(24):
        prompt = prefix[: rng.randrange(1, 150)] + [rng.randrange(5, 200) for _ in range(i % 4)]
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": i, "top_p": 0.9},
            {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
            {"temperature": 0.8, "seed": i, "logprobs": 2},
            {"temperature": 0.0, "prompt_logprobs": 1},
        ]
        prompts.append(prompt)
        params.append(
            SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **kinds[i % 5])
        )
    return prompts, params


@pytest.fixture(scope="module")
def expected(kept_engines: Engines, shallow_folder: Path) -> list[Any]:
    """Return the outputs of the workload without prefix caching."""
    with lazy_programs():
        plain = kept_engines(shallow_folder, num_blocks=129, **SMALL, enable_prefix_caching=False)
    outputs = plain.generate(*workload())
    stats = plain.stats()
    assert stats.prefix_cache_queries == stats.num_cached_blocks == 0
    return outputs


@pytest.mark.parametrize(
    ("num_blocks", "async_scheduling"), covering([TIGHT, 129], [True, False], strength=1)
)
def test_prefix_caching_changes_no_token(
    engines: Engines,
    shallow_folder: Path,
    expected: list[Any],
    async_scheduling: bool,
    num_blocks: int,
):
    prompts, params = workload()
    options = {"num_blocks": num_blocks, "async_scheduling": async_scheduling}
    engine = engines(shallow_folder, **options)
    engine.reset_prefix_cache()
    before = engine.stats()
    for _ in range(2):
        outputs: Any = engine.generate(prompts, params)
        for got, want in zip(outputs, expected, strict=True):
            check_same(got, want)
        engine.check_integrity()
    now = engine.stats()
    assert now.num_cached_tokens - before.num_cached_tokens > 0.2 * sum(map(len, prompts))
    assert (now.num_preemptions > before.num_preemptions) == (num_blocks == TIGHT)


def check_same(got: Any, want: Any) -> None:
    (mine,), (theirs,) = got.outputs, want.outputs
    assert mine.token_ids == theirs.token_ids
    if theirs.logprobs is not None:
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    if want.prompt_logprobs is not None:
        assert len(got.prompt_logprobs) == len(want.prompt_logprobs)


def test_pinned_prefix_survives_eviction(engines: Engines, shallow_folder: Path):
    engine = engines(shallow_folder, num_blocks=TIGHT)
    answer = text(complete(engine, QUESTION))
    engine.reset_prefix_cache()
    prompt = encode(engine, PREFIX)
    num_blocks = len(prompt) // BLOCK_SIZE
    waiting = engine.add_request(QUESTION, GREEDY)
    pin = engine.pin_prefix(PREFIX)
    assert engine.stats().num_pinned_blocks == num_blocks
    again = engine.pin_prefix(prompt)  # all blocks of this prompt are cached
    engine.check_integrity()
    rng = random.Random(1)
    noise = [[rng.randrange(5, 200) for _ in range(100)] for _ in range(12)]
    engine.generate(noise, GREEDY)
    assert complete(engine, PREFIX + QUESTION).num_cached_tokens == num_blocks * BLOCK_SIZE
    assert text({it.request_id: it for it in engine.step()}[waiting]) == answer
    assert engine.stats().num_used_blocks == num_blocks
    with pytest.raises(ValueError, match="2 prefixes are pinned"):
        engine.reset_prefix_cache()
    for held in (pin, again):
        engine.unpin_prefix(held)
    with pytest.raises(ValueError, match=f"pin {pin} does not exist"):
        engine.unpin_prefix(pin)
    engine.check_integrity()
    engine.generate(noise, GREEDY)
    assert complete(engine, PREFIX + QUESTION).num_cached_tokens < num_blocks * BLOCK_SIZE


def test_pin_that_leaves_too_few_blocks_is_refused(engines: Engines, shallow_folder: Path):
    engine = engines(shallow_folder, num_blocks=TIGHT)
    engine.reset_prefix_cache()
    room = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    request_id = engine.add_request([7] * 50, room)  # needs 16 of 23 blocks
    with pytest.raises(
        ValueError, match=r"pinning 10 blocks leaves 13, but request .* may need 16"
    ):
        engine.pin_prefix([8] * 160)
    engine.abort(request_id)
    pin = engine.pin_prefix([8] * 160)
    with pytest.raises(ValueError, match=r"the pool has 13 in addition to 10 .* unpin a pre"):
        engine.add_request([7] * 50, room)
    assert len(complete(engine, [8] * 170).outputs[0].token_ids) > 0
    engine.unpin_prefix(pin)
    complete(engine, [7] * 50, room)


def test_evicted_prefix_is_computed_again_before_it_is_pinned(
    engines: Engines, shallow_folder: Path
):
    engine = engines(shallow_folder, num_blocks=5, max_model_len=64)
    engine.reset_prefix_cache()
    room = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for token in (7, 8):  # both requests need a second block while `pin_prefix` runs
        engine.add_request([token] * (BLOCK_SIZE - 1), room)
    engine.step()
    before = engine.stats()
    pin = engine.pin_prefix([9] * BLOCK_SIZE)
    assert engine.stats().num_preemptions > before.num_preemptions
    engine.abort_all()
    assert engine.stats().num_pinned_blocks == 1
    assert complete(engine, [9] * (BLOCK_SIZE + 1)).num_cached_tokens == BLOCK_SIZE
    engine.unpin_prefix(pin)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("Hi", "only full blocks of 16 are shared"),
        ([5] * 256, "leaves no room for an output token"),
        ({"prompt_token_ids": [5] * 20, "cache_salt": ""}, "cache_salt'] is empty"),
    ],
)
def test_invalid_pins_are_refused(engine: Engine, prompt: Any, message: str):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        engine.pin_prefix(prompt)
    assert engine.stats().num_pinned_blocks == 0


def test_disabled_prefix_cache_keeps_no_blocks(engines: Engines, shallow_folder: Path):
    engine = engines(shallow_folder, enable_prefix_caching=False)
    prompt = encode(engine, PREFIX)
    for _ in range(2):
        assert complete(engine, prompt).num_cached_tokens == 0
    assert engine.stats().num_cached_blocks == 0
    engine.reset_prefix_cache()
    with pytest.raises(ValueError, match="pin_prefix needs enable_prefix_caching=True"):
        engine.pin_prefix(prompt)
