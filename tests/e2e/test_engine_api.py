"""Test the public methods of `Engine` with the model that ships with jpaged."""

import gc
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import jax
import pytest
from e2e_options import (
    ANSWER,
    GREEDY,
    LOOPS,
    QUESTION,
    SMALL,
    Engines,
    generate_text,
    in_full_tier,
    run,
    take_steps,
    text,
)
from lazy_programs import lazy_programs

from jpaged import Engine, SamplingParams
from jpaged.config import EngineConfig
from jpaged.core.block_pool import KVBlock
from jpaged.core.scheduler import Scheduler
from jpaged.engine.request_state import RequestState
from jpaged.engine.startup import build_parts
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.results import StepHandle
from jpaged.text.detokenizer import ByteDecoder
from tests.covering import covering


def tokenizer(engine: Engine) -> Any:
    return engine.tokenizer


def test_generate_answers_a_text_prompt_with_text(engine: Engine):
    (output,) = engine.generate(QUESTION, GREEDY)
    assert text(output) == ANSWER
    assert output.prompt == QUESTION
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_prompts_of_every_type_are_answered_in_the_order_of_the_prompts(engine: Engine):
    ids = tokenizer(engine).encode(QUESTION)
    prompts = [QUESTION, ids, {"prompt": QUESTION}, {"prompt_token_ids": ids}, "Reverse stone"]
    outputs = engine.generate(prompts, GREEDY)
    assert [text(o) for o in outputs] == [ANSWER] * 4 + ["\nenots"]
    assert generate_text(engine, prompt=ids) == ANSWER


def test_generate_takes_one_params_per_prompt(engine: Engine):
    short, long = engine.generate([QUESTION] * 2, [replace(GREEDY, max_tokens=1), GREEDY])
    assert short.outputs[0].finish_reason == "length"
    assert text(long) == ANSWER


def test_chat_applies_the_chat_template(engine: Engine):
    (output,) = engine.chat([{"role": "user", "content": "Spell fox"}], GREEDY)
    assert text(output).strip() == "f-o-x"
    both = engine.chat([[{"role": "user", "content": QUESTION}]] * 2, GREEDY)
    assert [text(o).strip() for o in both] == [ANSWER.strip()] * 2


def test_streamed_deltas_join_to_the_answer(engine: Engine):
    deltas = list(engine.stream(QUESTION, GREEDY))
    assert "".join(d.text for d in deltas) == ANSWER
    (output,) = engine.generate(QUESTION, GREEDY)
    assert [t for d in deltas for t in d.token_ids] == list(output.outputs[0].token_ids)
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_stop_string_is_never_streamed_and_is_cut_from_the_answer(engine: Engine):
    params = replace(GREEDY, stop=["5, 6", "zzz"])
    deltas = list(engine.stream(QUESTION, params))
    assert "".join(d.text for d in deltas) == "\n3, 4, "
    assert deltas[-1].stop_reason == "5, 6"
    (kept,) = engine.generate(QUESTION, replace(params, include_stop_str_in_output=True))
    assert text(kept) == "\n3, 4, 5, 6"
    assert (kept.outputs[0].finish_reason, kept.outputs[0].stop_reason) == ("stop", "5, 6")


def test_detokenize_false_returns_only_token_ids(engine: Engine):
    (output,) = engine.generate(QUESTION, replace(GREEDY, detokenize=False))
    assert text(output) == ""
    assert tokenizer(engine).decode(output.outputs[0].token_ids, skip_special_tokens=True) == ANSWER


LONG_PROMPT = "Count from 1 to 9. " * 6
DOOMED = [
    pytest.param(QUESTION, GREEDY, id="short"),
    pytest.param(LONG_PROMPT, GREEDY, id="chunked"),
    pytest.param(LONG_PROMPT, SamplingParams(n=4, max_tokens=24, ignore_eos=True), id="samples"),
    pytest.param(LONG_PROMPT, SamplingParams(beam_width=4, max_tokens=20), id="beams"),
]


@pytest.mark.parametrize(
    ("engine", "prompt", "params", "num_steps"),
    covering(LOOPS, DOOMED, [0, 1, 2, 3, 5]),
    indirect=["engine"],
)
def test_abort_at_any_step_changes_no_other_request(
    engine: Engine, prompt: str, params: SamplingParams, num_steps: int
):
    doomed = engine.add_request(prompt, params)
    kept = engine.add_request(QUESTION, GREEDY)
    take_steps(engine, num_steps)
    for name in (doomed, doomed, "unknown"):
        engine.abort(name)
    engine.check_integrity()
    outputs = run(engine)
    assert list(outputs) == [kept]
    assert text(outputs[kept]) == ANSWER
    assert engine.stats().num_used_blocks == 0


def test_each_stream_advances_while_another_stream_or_generate_runs(engine: Engine):
    pairs = list(zip(engine.stream(QUESTION, GREEDY), engine.stream(QUESTION, GREEDY), strict=True))
    assert ["".join(d.text for d in side) for side in zip(*pairs, strict=True)] == [ANSWER] * 2
    first, second = engine.stream(QUESTION, GREEDY), engine.stream("Reverse stone", GREEDY)
    begun = next(first).text
    engine.generate([QUESTION] * 2, GREEDY)
    assert begun + "".join(d.text for d in first) == ANSWER
    assert "".join(d.text for d in second) == "\nenots"
    assert not engine.has_unfinished_requests


def test_aborted_stream_ends_with_a_final_delta(engine: Engine):
    stream = engine.stream(QUESTION, GREEDY)
    request_id = next(stream).request_id
    engine.abort(request_id)
    assert [d.finish_reason for d in stream] == ["abort"]


def test_generate_does_not_return_requests_that_were_added_before_the_call(engine: Engine):
    first = engine.add_request(QUESTION, GREEDY)
    engine.step()
    assert engine.add_request(QUESTION, GREEDY, request_id="second") == "second"
    assert generate_text(engine, prompt="Reverse stone") == "\nenots"
    outputs = run(engine)
    assert [text(outputs[name]) for name in (first, "second")] == [ANSWER] * 2


def test_request_that_finishes_inside_generate_is_returned_once_by_step(engine: Engine):
    engine.add_request("Reverse stone", GREEDY, request_id="a")
    engine.generate("Count from 1 to 20", GREEDY)  # request "a" finishes during this call
    engine.add_request(QUESTION, GREEDY, request_id="a")
    ended = []
    while engine.has_unfinished_requests:
        ended += [text(output) for output in engine.step() if output.finished]
    assert ended == ["\nenots", ANSWER]


def test_closing_a_stream_does_not_abort_a_later_request_with_its_id(engine: Engine):
    stream = engine.stream(QUESTION, GREEDY)
    deltas = list(stream)
    request_id = deltas[0].request_id
    engine.add_request(QUESTION, GREEDY, request_id=request_id)
    del stream
    assert text(run(engine)[request_id]) == ANSWER


def test_stop_string_takes_precedence_over_length(engine: Engine):
    (output,) = engine.generate(QUESTION, replace(GREEDY, max_tokens=3, stop=["3,"]))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "3,")


def test_output_metrics_contain_times_and_the_number_of_preemptions(engine: Engine):
    (output,) = engine.generate(QUESTION, GREEDY)
    times: Any = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time <= times.finished_time
    assert times.num_preemptions == 0


def counts(engine: Engine) -> tuple[int, int, int]:
    """Return the numbers of running requests, running sequences and waiting requests."""
    stats = engine.stats()
    return stats.num_running, stats.num_running_seqs, stats.num_waiting


def test_closed_or_deleted_stream_aborts_all_its_samples(engine: Engine):
    params = SamplingParams(n=4, seed=1, max_tokens=24, ignore_eos=True)
    stream = engine.stream(QUESTION, params)
    next(stream)
    assert counts(engine) == (1, 4, 0)
    stream.close()
    assert counts(engine) == (0, 0, 0)
    never_started = engine.stream(QUESTION, params)
    del never_started
    run(engine)
    assert counts(engine) == (0, 0, 0)


BAD_REQUESTS = [
    ("", GREEDY, r"prompt(s\[29\])? is empty"),
    ([], GREEDY, r"prompt(s\[29\])? is empty"),
    (["a", 1], GREEDY, "must be an integer"),
    ([5, 100_000], GREEDY, "token id 100000 at position 1 is unknown"),
    ([-1], GREEDY, "token id -1"),
    ("\ud800", GREEDY, "surrogate"),
    ({"prmpt": "x"}, GREEDY, "unknown key 'prmpt'"),
    ([5] * 256, GREEDY, "max_model_len=256 leaves no room"),
    ("x", SamplingParams(stop_token_ids=[100_000]), "stop_token_ids has token ids"),
    ("x", SamplingParams(logit_bias={100_000: 1.0}), "logit_bias has token ids"),
    ("x", SamplingParams(logprobs=21), "logprobs=21 is more than"),
    ("x", SamplingParams(max_tokens=None, min_tokens=999), "min_tokens=999 is more than"),
    ("x", SamplingParams(n=9), "n=9 .*max_num_seqs=8: lower n"),
    ("x", SamplingParams(best_of=9), "best_of=9 .*lower best_of"),
    ("x", SamplingParams(beam_width=9), "beam_width=9 .*max_num_seqs=8: lower beam_width"),
    (3.5, GREEDY, r"prompt(s\[29\])? must be"),
]


@pytest.mark.parametrize(
    ("engine", "prompt", "params", "message"),
    covering(LOOPS, [pytest.param(*each) for each in BAD_REQUESTS], strength=1),
    indirect=["engine"],
)
def test_invalid_request_is_refused_and_changes_no_other_request(
    engine: Engine, prompt: Any, params: SamplingParams, message: str
):
    good = engine.add_request(QUESTION, GREEDY)
    engine.step()
    before = counts(engine), engine.stats().num_steps
    with pytest.raises((TypeError, ValueError), match=message):
        engine.add_request(prompt, params)
    with pytest.raises((TypeError, ValueError), match=message):
        engine.generate([*[QUESTION] * 29, prompt], [*[GREEDY] * 29, params])
    assert (counts(engine), engine.stats().num_steps) == before
    assert text(run(engine)[good]) == ANSWER


@pytest.mark.parametrize("request_id", ["", 5])
def test_request_id_must_be_a_nonempty_string(engine: Engine, request_id: Any):
    with pytest.raises(TypeError, match=r"request_id=.* must be a non-empty string"):
        engine.add_request(QUESTION, GREEDY, request_id=request_id)


def test_generated_request_id_is_unique(engine: Engine):
    taken = [engine.add_request(QUESTION, GREEDY, request_id=f"request-{n}") for n in range(200)]
    assert engine.add_request(QUESTION, GREEDY) not in taken
    engine.abort_all()


def test_request_id_in_use_is_refused(engine: Engine):
    engine.add_request(QUESTION, GREEDY, request_id="a")
    with pytest.raises(ValueError, match="request_id 'a' is in use"):
        engine.add_request(QUESTION, GREEDY, request_id="a")
    assert text(run(engine)["a"]) == ANSWER
    engine.add_request(QUESTION, GREEDY, request_id="a")
    assert text(run(engine)["a"]) == ANSWER


def test_invalid_engine_arguments_are_refused_with_a_hint():
    with pytest.raises(ValueError, match="'max_seqs'; did you mean 'max_num_seqs'"):
        Engine(max_seqs=3)
    with pytest.raises(TypeError, match="model=3 must be a folder, a hub id"):
        Engine(3)  # pyright: ignore[reportArgumentType]


def test_malformed_messages_are_refused(engine: Engine):
    with pytest.raises(TypeError, match="messages must be a list"):
        engine.chat({"role": "user"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="second argument"):
        engine.chat([{"role": "user", "content": "Hi"}], sampling_params=GREEDY)


def test_text_without_a_tokenizer_is_refused(engines: Engines):
    engine = engines(skip_tokenizer_init=True)
    for prompt, params in ((QUESTION, None), ([5], SamplingParams(stop="x"))):
        with pytest.raises(ValueError, match="skip_tokenizer_init=True loaded none"):
            engine.generate(prompt, params)


@pytest.mark.parametrize("loop", ["bursts", *in_full_tier("overlapped", "synchronous")])
def test_nothing_compiles_after_the_start(compilation_cache: Path, loop: str):
    options = {"num_blocks": 129, **SMALL, **LOOPS[loop]}
    engine = Engine(compilation_cache_dir=compilation_cache, **options)
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(1)
        assert len(compiled) == 1  # JAX calls the listener that counts compilations
        every_kind = [
            GREEDY,
            SamplingParams(max_tokens=9),
            SamplingParams(max_tokens=9, top_p=0.9, top_k=5, min_p=0.01),
            SamplingParams(max_tokens=9, presence_penalty=1.0, min_tokens=3, logit_bias={5: 1.0}),
            SamplingParams(max_tokens=9, logprobs=2, prompt_logprobs=2),
            SamplingParams(max_tokens=9, n=4, temperature=3.0, presence_penalty=1.0),
            SamplingParams(max_tokens=9, n=2, best_of=3),
            SamplingParams(max_tokens=9, n=2, beam_width=3),
        ]
        for count in (1, 3, 8):
            engine.generate([QUESTION] * count, every_kind[:count])
        engine.generate(["Count from 1 to 9. " * 6] * 9, GREEDY)
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_total_of_the_memory_account_is_the_sum_of_its_entries(engine: Engine):
    account = engine.memory_account
    parts = (account.weights, account.sampling, account.workspace, account.kv_cache)
    assert account.total == sum(parts)
    model, runtime = engine.model_config, engine.runtime_config
    slots = runtime.num_blocks * runtime.block_size
    row_bytes = model.num_kv_heads * model.head_size * 4  # float32
    assert account.kv_cache == 2 * model.num_layers * slots * row_bytes
    assert "KV cache" in "\n".join(account.lines())


def interrupting(
    target: Callable[..., Any], error: type[BaseException], after: int
) -> Callable[..., Any]:
    calls = iter(range(after))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return target(*args, **kwargs)

    return wrapper


def test_requests_from_add_request_survive_ctrl_c_during_generate(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    other = engine.add_request(QUESTION, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(StepHandle, "read", interrupting(StepHandle.read, KeyboardInterrupt, 2))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["Reverse stone"] * 3, GREEDY)
    assert text(run(engine)[other]) == ANSWER


def generate_until_interrupted(engine: Engine, seconds: float) -> bool:
    """Call `generate`, and simulate a Ctrl-C after `seconds`. Return whether `generate` raised
    KeyboardInterrupt."""
    main = threading.main_thread().ident
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        while timer.is_alive():
            engine.generate(["Count from 1 to 20"] * 4, GREEDY)
        time.sleep(0.1)
    except KeyboardInterrupt:
        return True
    finally:
        timer.join()
    return False


def test_ctrl_c_at_any_moment_leaves_a_healthy_engine(engine: Engine):
    other = engine.add_request(QUESTION, GREEDY)
    interrupted = 0
    for moment in range(12):
        interrupted += generate_until_interrupted(engine, 0.004 * moment)
        engine.check_integrity()
    assert interrupted >= 10  # Python drops a KeyboardInterrupt in a destructor
    finished = {it.request_id: it for it in engine.step() if it.finished}
    assert text((finished | run(engine))[other]) == ANSWER


def call_after(target: Callable[..., Any], action: Callable[[], object]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        action()
        return result

    return wrapper


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("names", [("add",), ("update",), ("update", "abort")], ids="-".join)
def test_ctrl_c_in_a_critical_section_is_deferred(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
):
    other = engine.add_request(QUESTION, replace(GREEDY, max_tokens=1))
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(Scheduler, name, call_after(getattr(Scheduler, name), press_ctrl_c))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["Reverse stone"] * 3, GREEDY)
    assert run(engine)[other].finished
    assert counts(engine) == (0, 0, 0)


def test_ctrl_c_while_step_creates_outputs_loses_no_output(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    ids = [engine.add_request(QUESTION, replace(GREEDY, max_tokens=1)) for _ in range(2)]
    interrupted = interrupting(RequestState.output, KeyboardInterrupt, 1)
    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    assert list(run(engine)) == ids


def test_ctrl_c_while_text_is_decoded_repeats_no_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    engine.add_request(QUESTION, GREEDY, request_id="a")
    with monkeypatch.context() as patch:
        patch.setattr(ByteDecoder, "push", call_after(ByteDecoder.push, press_ctrl_c))
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    assert text(run(engine)["a"]) == ANSWER


def test_stream_garbage_collected_during_a_step_is_aborted_after_the_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    other = engine.add_request(QUESTION, GREEDY)
    gc.disable()
    try:
        cycle: list[Any] = [engine.stream("Reverse stone", GREEDY)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        monkeypatch.setattr(Scheduler, "update", call_after(Scheduler.update, gc.collect))
        assert text(run(engine)[other]) == ANSWER
    finally:
        gc.enable()
    assert counts(engine) == (0, 0, 0)


UNIQUE_NUM_BLOCKS = 130
"""Number of blocks that no other engine in this file has in its pool."""


def count_pools() -> int:
    """Return the number of live KV arrays that have `UNIQUE_NUM_BLOCKS` blocks."""
    return sum(it.ndim > 2 and it.shape[0] == UNIQUE_NUM_BLOCKS for it in jax.live_arrays())


def count_tracked_blocks() -> int:
    """Return the number of `KVBlock` objects that the garbage collector visits."""
    return sum(type(it) is KVBlock for it in gc.get_objects())


FAILING = [(ModelRunner, "launch"), (StepHandle, "read"), (Scheduler, "update")]


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=[name for _, name in FAILING])
def test_failed_step_fails_the_engine_and_frees_its_pool(
    new_engine: Engines,
    shallow_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
):
    num_pools = count_pools()
    engine = new_engine(shallow_folder, num_blocks=UNIQUE_NUM_BLOCKS)
    assert count_pools() > num_pools
    monkeypatch.setattr(owner, name, interrupting(getattr(owner, name), RuntimeError, 2))
    with pytest.raises(RuntimeError):
        engine.generate(QUESTION, GREEDY)
    for call in (lambda: engine.generate(QUESTION, GREEDY), lambda: engine.step()):
        with pytest.raises(RuntimeError, match="failed in an earlier step"):
            call()
    engine.abort_all()
    del engine, call
    gc.collect()  # free the tracebacks, which hold references to the engine
    assert count_pools() == num_pools


def test_engine_is_freed_with_its_last_reference(compilation_cache: Path, shallow_folder: Path):
    """An engine must be freed without the garbage collector, which ignores the objects of an engine
    to save time."""
    num_pools, num_tracked = count_pools(), count_tracked_blocks()
    options = {"num_blocks": UNIQUE_NUM_BLOCKS, "compilation_cache_dir": compilation_cache, **SMALL}
    config = EngineConfig.from_options(shallow_folder, options)
    with lazy_programs():
        parts = build_parts(config)
    engine, scheduler = Engine.from_parts(config, parts), ref(parts.scheduler)
    program = ref(parts.runner.programs["decode", 8])
    del parts
    watch = engine.watch_pool()
    engine.generate(QUESTION, GREEDY)
    assert watch.look()
    assert count_pools() > num_pools
    assert count_tracked_blocks() <= num_tracked
    gc.disable()
    try:
        dropped = ref(engine.watch_pool())
        assert dropped() is None
        del engine, watch
        assert scheduler() is None
        assert program() is None
        assert count_pools() == num_pools
    finally:
        gc.enable()
