"""Test that a paused engine keeps, recomputes, finishes or aborts its requests, and that its
weights can be updated."""

import gc
import signal
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import pytest
from e2e_options import LOOPS, MOSTLY_OVERLAPPED, run, take_steps
from test_jax_model import (
    GREEDY,
    NUM_TOKENS,
    PREFIX,
    PROMPTS,
    TINY,
    DenseStep,
    greedy_tokens,
    make_engine,
    tiny_params,
    user_settings,
)

from jpaged import Engine, SamplingParams
from jpaged.runtime.model_runner import ModelRunner

NEW: dict[str, Any] = jax.tree.map(lambda it: it[::-1], tiny_params())
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class RecordingStep(DenseStep):
    """Model step without a KV cache that records the keys and values of each layer in `found`."""

    def __init__(self):
        super().__init__()
        self.found: dict[int, Any] = {}

    def attend(self, layer, q, k, v, **options):
        self.found[layer] = k, v
        return super().attend(layer, q, k, v, **options)


class MixedStep(DenseStep):
    """Model step without a KV cache that mixes stored and new keys and values.

    Tokens that `is_stored` marks use the stored keys and values. Other tokens use new keys and
    values.
    """

    def __init__(self, stored: dict[int, Any], is_stored: jax.Array):
        super().__init__()
        self._stored, self._is_stored = stored, is_stored[:, None, None]

    def attend(self, layer, q, k, v, **options):
        k, v = (
            jnp.where(self._is_stored, old, it)
            for old, it in zip(self._stored[layer], (k, v), strict=True)
        )
        return super().attend(layer, q, k, v, **options)


@jax.jit
def mixed_logits(tokens: jax.Array, num_old: jax.Array) -> jax.Array:
    """Return the logits that the new weights compute for `tokens`, if the old weights have computed
    the keys and values of the first `num_old` tokens."""
    positions = jnp.arange(len(tokens))
    step = RecordingStep()
    TINY.forward(tiny_params(), tokens, positions, step)
    hidden = TINY.forward(NEW, tokens, positions, MixedStep(step.found, positions < num_old))
    return TINY.logits(NEW, hidden)


def continued(prompt: list[int], output: list[int]) -> list[int]:
    """Continue `output` greedily with the new weights, and return `output` with the new tokens.

    The old weights have computed the keys and values of all tokens except the last of `output`.
    """
    tokens, num_old = [*prompt, *output], len(prompt) + len(output) - 1
    with user_settings():
        while len(tokens) < len(prompt) + NUM_TOKENS:
            padded = jnp.asarray([*tokens, *[0] * (64 - len(tokens))], jnp.int32)
            tokens.append(int(mixed_logits(padded, jnp.int32(num_old))[len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def pause_after(engine: Engine, num_steps: int, **options: Any) -> dict[str, list[int]]:
    """Run `num_steps` steps, then pause the engine. Return the output tokens by request, without
    the requests that have no output yet."""
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    engine.pause(**options)
    outputs += engine.step()  # returns the outputs of steps that were in flight
    assert engine.step() == []
    return {it.request_id: list(it.outputs[0].token_ids) for it in outputs if it.outputs}


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_paused_request_continues_with_new_weights_and_its_old_kv_cache(loop: str):
    engine = make_engine(**LOOPS[loop])
    engine.add_request(PROMPTS[0], GREEDY, request_id="kept")
    old = pause_after(engine, 4)["kept"]
    assert 0 < len(old) < NUM_TOKENS
    engine.update_weights(NEW, version=5)
    engine.add_request(PROMPTS[1], GREEDY, request_id="new")
    engine.resume()
    outputs = {name: it.outputs[0] for name, it in run(engine).items()}
    assert outputs["kept"].token_ids == continued(PROMPTS[0], old)
    assert outputs["kept"].weight_versions == ((0, 0), (5, len(old)))
    # Both prompts begin with the same tokens. The old weights computed the cached KV blocks of
    # these tokens, so the new request must not reuse the blocks.
    assert outputs["new"].token_ids == greedy_tokens(TINY, NEW, PROMPTS[1])
    assert outputs["new"].weight_versions == ((5, 0),)
    assert engine.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == greedy_tokens(
        TINY, NEW, PROMPTS[0]
    )
    engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_recomputed_requests_use_only_new_weights(mode: str):
    swap = {"preemption_mode": "swap", "swap_space": 0.001}
    engine = make_engine(num_blocks=9, **(swap if mode == "swap" else {}))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, GREEDY, request_id=str(i))
    old = pause_after(engine, 12, recompute=True)
    stats = engine.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
    engine.update_weights(NEW)
    engine.resume()
    for name, output in run(engine).items():
        prompt, known = PROMPTS[int(name)], old.get(name, [])
        expected = greedy_tokens(TINY, NEW, [*prompt, *known])
        found = output.outputs[0]
        assert found.token_ids == [*known, *expected][:NUM_TOKENS]
        versions = ((0, 0), (1, len(known))) if known else ((1, 0),)
        assert found.weight_versions == versions
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.full
def test_swapped_out_request_resumes_with_its_old_kv_after_a_weight_update():
    swap = {"preemption_mode": "swap", "swap_space": 0.001, "scheduling_policy": "priority"}
    engine = make_engine(num_blocks=9, **swap)
    for i in range(3):
        engine.add_request(PROMPTS[0], GREEDY, request_id=str(i))
    old: dict[str, list[int]] = {}
    while not engine.stats().num_swapped:
        old |= {it.request_id: list(it.outputs[0].token_ids) for it in engine.step()}
    old |= pause_after(engine, 0)
    engine.update_weights(NEW)
    # The request "new" has the same prompt as the swapped-out requests. When "new" ends, the prefix
    # cache keeps the KV blocks of "new". The swapped-out requests must not use these blocks.
    engine.add_request(PROMPTS[0], GREEDY, request_id="new", priority=-1)
    engine.resume()
    outputs = {name: it.outputs[0].token_ids for name, it in run(engine).items()}
    assert outputs.pop("new") == greedy_tokens(TINY, NEW, PROMPTS[0])
    for name, output in outputs.items():
        assert output == continued(PROMPTS[0], old[name])
    assert engine.stats().num_swapped_in_blocks
    engine.check_integrity()


def test_generate_stream_and_pin_prefix_raise_an_error_while_the_engine_is_paused():
    engine = make_engine()
    engine.pause("wait")
    assert engine.is_paused
    for call in (
        lambda: engine.generate(PROMPTS, GREEDY),
        lambda: engine.stream(PROMPTS[0], GREEDY),
        lambda: engine.score_completions([PROMPTS[0]], [[1, 2]]),
        lambda: engine.pin_prefix(PREFIX),
    ):
        with pytest.raises(RuntimeError, match=r"the engine is paused: call resume\(\)"):
            call()
    engine.add_request(PROMPTS[0], SHORT)
    with pytest.raises(RuntimeError, match="paused"):
        engine.pause("wait")
    engine.resume()
    assert len(run(engine)) == 1
    with pytest.raises(ValueError, match="mode='drain' is unknown: pass 'keep', 'wait' or 'abort'"):
        engine.pause("drain")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="recompute=True needs mode='keep', not 'abort'"):
        engine.pause("abort", recompute=True)
    engine.check_integrity()


def test_pause_finishes_or_aborts_requests():
    engine = make_engine()
    engine.add_request(PROMPTS[0], SHORT, request_id="finished")
    engine.pause("wait")
    [output] = engine.step()
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 8)
    engine.resume()
    engine.add_request(PROMPTS[0], GREEDY, request_id="aborted")
    take_steps(engine, 4)
    engine.pause("abort")
    [output] = engine.step()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert 0 < len(output.outputs[0].token_ids) < NUM_TOKENS
    assert not engine.has_unfinished_requests
    engine.update_weights(NEW)
    engine.resume()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    engine.check_integrity()


def test_blocks_pinned_before_a_weight_update_are_not_used_after_it():
    engine = make_engine()
    pin = engine.pin_prefix(PREFIX)
    engine.update_weights(NEW)
    num_cached = engine.stats().num_cached_tokens
    output = engine.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert output.token_ids == greedy_tokens(TINY, NEW, PROMPTS[0])
    assert engine.stats().num_cached_tokens == num_cached
    engine.add_request(PROMPTS[0], GREEDY)
    engine.pause()
    with pytest.raises(ValueError, match="1 pinned prefix and unfinished requests: unpin"):
        engine.update_weights(tiny_params())
    engine.unpin_prefix(pin)
    engine.update_weights(tiny_params())
    engine.resume()
    run(engine)
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.full
def test_every_output_names_the_weight_versions_of_its_tokens():
    engine = make_engine(num_scheduler_steps=3)
    beams = SamplingParams(beam_width=2, n=2, max_tokens=20, ignore_eos=True)
    samples = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1)
    engine.add_request(PROMPTS[0], beams, request_id="beams")
    engine.add_request(PROMPTS[1], samples, request_id="samples")
    num_tokens = len(pause_after(engine, 3)["samples"])
    engine.update_weights(NEW)
    # Update the weights again before any token is computed with version 1.
    engine.update_weights(tiny_params(), version=9)
    engine.resume()
    outputs = run(engine)
    assert {it.weight_versions for it in outputs["samples"].outputs} == {((0, 0), (9, num_tokens))}
    first, second = (it.weight_versions for it in outputs["beams"].outputs)
    assert first == second
    assert [version for version, _ in first] == [0, 9]
    assert engine.score_completions([PROMPTS[0]], [[1, 2]])[0].weights_version == 9


@pytest.mark.full
def test_deltas_name_the_weight_versions_of_their_tokens():
    engine = make_engine()
    engine.add_request(PROMPTS[0], SHORT)
    versions, count = [], 0
    while engine.has_unfinished_requests:
        engine.advance()
        if count == 0 and engine.has_work:
            engine.pause()
            engine.update_weights(NEW)
            engine.resume()
            engine.advance()
            engine.advance()
        for delta in engine.take_deltas():
            for it in delta.deltas:
                ends = [first for _, first in it.weight_versions[1:]] + [len(it.token_ids)]
                for (version, first), end in zip(it.weight_versions, ends, strict=True):
                    versions += [version] * (end - first)
                count += len(it.token_ids)
    assert (count, sorted(versions), len(set(versions))) == (8, versions, 2)


@pytest.mark.full
def test_interrupt_during_a_weight_update_is_delayed(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    update = ModelRunner.update_parameters

    def interrupted(runner: ModelRunner, write: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        update(runner, write)

    monkeypatch.setattr(ModelRunner, "update_parameters", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(NEW)
    assert engine.weights_version == 1
    output = engine.generate(PROMPTS[1], GREEDY)[0].outputs[0]
    assert output.token_ids == greedy_tokens(TINY, NEW, PROMPTS[1])


def test_error_while_weights_are_written_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()

    def failing(runner: ModelRunner, write: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(ModelRunner, "update_parameters", failing)
    with pytest.raises(MemoryError):
        engine.update_weights(NEW)
    with pytest.raises(RuntimeError, match="create a new engine"):
        engine.generate(PROMPTS[1], GREEDY)


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_requests_resume_after_new_weights_replace_donated_weights(loop: str):
    params = jax.tree.map(jnp.copy, tiny_params())
    engine = make_engine(params=params, **LOOPS[loop])
    engine.add_request(PROMPTS[0], GREEDY, request_id="kept")
    outputs = [output for _ in range(4) for output in engine.step()]
    params["out"].delete()  # donating an array to a jitted function also deletes the array
    with pytest.raises(
        RuntimeError, match=r"params\['out'\] was deleted or donated .* call update"
    ):
        engine.step()
    old = list([*outputs, *engine.step()][-1].outputs[0].token_ids)
    assert engine.is_paused
    with pytest.raises(RuntimeError, match=r"params\['out'\] was deleted"):
        engine.resume()
    engine.update_weights(NEW)
    engine.resume()
    assert run(engine)["kept"].outputs[0].token_ids == continued(PROMPTS[0], old)
    engine.check_integrity()


def live_bytes() -> int:
    gc.collect()
    return sum(it.nbytes for it in jax.live_arrays())


def test_sleep_frees_the_pool():
    engine = make_engine()
    expected = engine.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
    pool_bytes = 65 * engine.runtime_config.block_size * 2 * 2 * (2 * 16) * 4
    before = live_bytes()
    engine.sleep()
    assert engine.is_sleeping
    assert before - live_bytes() == pool_bytes
    with pytest.raises(RuntimeError, match=r"the engine is sleeping: call wake_up\(\)"):
        engine.generate(PROMPTS[0], GREEDY)
    engine.add_request(PROMPTS[0], GREEDY)
    assert engine.step() == []
    engine.wake_up()
    assert (engine.is_sleeping, live_bytes()) == (False, before)
    [output] = run(engine).values()
    assert output.outputs[0].token_ids == expected
    engine.check_integrity()


@pytest.mark.full
def test_requests_are_recomputed_after_a_sleep():
    swap = {"preemption_mode": "swap", "swap_space": 0.001}
    engine = make_engine(num_blocks=9, **swap)
    for i in range(3):
        engine.add_request(PROMPTS[0], GREEDY, request_id=str(i))
    with pytest.raises(RuntimeError, match=r"sleep: 3 requests unfinished: call pause\(\) first"):
        engine.sleep()
    while not engine.stats().num_swapped:
        engine.step()
    engine.pause()
    engine.sleep()
    engine.wake_up()
    with pytest.raises(RuntimeError, match="the engine is paused"):
        engine.generate(PROMPTS[0], GREEDY)
    engine.resume()
    expected = greedy_tokens(TINY, tiny_params(), PROMPTS[0])
    assert [it.outputs[0].token_ids for it in run(engine).values()] == [expected] * 3
    engine.check_integrity()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.full
@pytest.mark.parametrize("wakes_first", [True, False])
def test_sleep_level_2_releases_the_weights_of_the_caller(wakes_first: bool):
    params = jax.tree.map(jnp.copy, tiny_params())
    engine, embed = make_engine(params=params), ref(params["embed"])
    engine.sleep()
    engine.sleep(level=2)
    assert not params["embed"].is_deleted()
    del params
    gc.collect()
    assert embed() is None
    if wakes_first:
        engine.wake_up()
        with pytest.raises(RuntimeError, match="has freed the weights: call update_weights"):
            engine.generate(PROMPTS[0], GREEDY)
    engine.update_weights(NEW)
    engine.wake_up()
    output = engine.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert output.token_ids == greedy_tokens(TINY, NEW, PROMPTS[0])


def test_sleep_is_refused_with_a_pinned_prefix_or_an_invalid_level():
    engine = make_engine()
    with pytest.raises(ValueError, match="level=3 is out of range: it must be 1 or 2"):
        engine.sleep(3)  # pyright: ignore[reportArgumentType]
    engine.pin_prefix(PREFIX)
    with pytest.raises(ValueError, match="pinned"):
        engine.sleep()
    assert not engine.is_sleeping
