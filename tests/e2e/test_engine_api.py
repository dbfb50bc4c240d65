"""The engine as its users meet it, with the embedded model."""

import gc
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import jax
import pytest
from e2e_options import ANSWER, GREEDY, LOOPS, QUESTION, SMALL, Engines, run
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


def text(output: Any) -> str:
    return output.outputs[0].text


def test_text_in_text_out(engine: Engine):
    (output,) = engine.generate(QUESTION, GREEDY)
    assert text(output) == ANSWER
    assert output.prompt == QUESTION
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_every_form_of_prompt_gives_the_same_answer_in_order(engine: Engine):
    ids = tokenizer(engine).encode(QUESTION)
    prompts = [QUESTION, ids, {"prompt": QUESTION}, {"prompt_token_ids": ids}, "Reverse stone"]
    outputs = engine.generate(prompts, GREEDY)
    assert [text(o) for o in outputs] == [ANSWER] * 4 + ["\nenots"]
    assert text(engine.generate(ids, GREEDY)[0]) == ANSWER


def test_one_params_for_each_prompt(engine: Engine):
    short, long = engine.generate(
        [QUESTION] * 2, [SamplingParams(max_tokens=1, temperature=0.0), GREEDY]
    )
    assert short.outputs[0].finish_reason == "length"
    assert text(long) == ANSWER


def test_chat_answers_through_the_template(engine: Engine):
    (output,) = engine.chat([{"role": "user", "content": "Spell fox"}], GREEDY)
    assert text(output).strip() == "f-o-x"
    both = engine.chat([[{"role": "user", "content": QUESTION}]] * 2, GREEDY)
    assert [text(o).strip() for o in both] == [ANSWER.strip()] * 2


def test_a_stream_joins_to_the_answer(engine: Engine):
    deltas = list(engine.stream(QUESTION, GREEDY))
    assert "".join(d.text for d in deltas) == ANSWER
    (output,) = engine.generate(QUESTION, GREEDY)
    assert [t for d in deltas for t in d.token_ids] == list(output.outputs[0].token_ids)
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]


def test_a_stop_string_is_held_back_and_cut(engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=64, stop=["5, 6", "zzz"])
    deltas = list(engine.stream(QUESTION, params))
    assert "".join(d.text for d in deltas) == "\n3, 4, "
    assert deltas[-1].stop_reason == "5, 6"
    (kept,) = engine.generate(
        QUESTION,
        SamplingParams(
            temperature=0.0, max_tokens=64, stop="5, 6", include_stop_str_in_output=True
        ),
    )
    assert text(kept) == "\n3, 4, 5, 6"
    assert (kept.outputs[0].finish_reason, kept.outputs[0].stop_reason) == ("stop", "5, 6")


def test_detokenize_false_returns_only_token_ids(engine: Engine):
    (output,) = engine.generate(
        QUESTION, SamplingParams(temperature=0.0, max_tokens=64, detokenize=False)
    )
    assert text(output) == ""
    assert tokenizer(engine).decode(output.outputs[0].token_ids, skip_special_tokens=True) == ANSWER


def test_requests_can_join_while_others_run(engine: Engine):
    first = engine.add_request(QUESTION, GREEDY)
    engine.step()
    second = engine.add_request("Reverse stone", GREEDY, request_id="mine")
    outputs = run(engine)
    assert second == "mine"
    assert text(outputs[first]) == ANSWER
    assert text(outputs["mine"]) == "\nenots"


def test_generate_keeps_outputs_of_other_requests(engine: Engine):
    waiting = engine.add_request(QUESTION, GREEDY)
    engine.generate("Reverse stone", GREEDY)
    assert text(run(engine)[waiting]) == ANSWER


@pytest.mark.parametrize(
    ("engine", "prompt", "num_steps"),
    covering(LOOPS, [QUESTION, "Count from 1 to 9. " * 6], [0, 1, 2, 3, 5]),
    indirect=["engine"],
)
def test_abort_in_any_state_leaves_the_others_alone(engine: Engine, prompt: str, num_steps: int):
    doomed = engine.add_request(prompt, GREEDY)
    kept = engine.add_request(QUESTION, GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort(doomed)
    engine.abort(doomed)
    engine.abort("nobody")
    outputs = run(engine)
    assert doomed not in outputs
    assert text(outputs[kept]) == ANSWER


def test_streams_and_steps_advance_each_other(engine: Engine):
    pairs = list(zip(engine.stream(QUESTION, GREEDY), engine.stream(QUESTION, GREEDY), strict=True))
    assert ["".join(d.text for d in side) for side in zip(*pairs, strict=True)] == [ANSWER] * 2
    first, second = engine.stream(QUESTION, GREEDY), engine.stream("Reverse stone", GREEDY)
    begun = next(first).text
    engine.generate([QUESTION] * 2, GREEDY)
    assert begun + "".join(d.text for d in first) == ANSWER
    assert "".join(d.text for d in second) == "\nenots"
    assert not engine.has_unfinished_requests


def test_an_aborted_stream_ends_with_a_last_delta(engine: Engine):
    stream = engine.stream(QUESTION, GREEDY)
    request_id = next(stream).request_id
    engine.abort(request_id)
    assert [d.finish_reason for d in stream] == ["abort"]


def test_step_returns_each_request_finished_elsewhere_once(engine: Engine):
    engine.add_request("Reverse stone", GREEDY, request_id="a")
    engine.generate("Count from 1 to 20", GREEDY)  # finishes "a" meanwhile
    engine.add_request(QUESTION, GREEDY, request_id="a")
    ended = []
    while engine.has_unfinished_requests:
        ended += [text(output) for output in engine.step() if output.finished]
    assert ended == ["\nenots", ANSWER]


def test_an_aborted_request_is_not_delivered(engine: Engine):
    engine.add_request(QUESTION, GREEDY, request_id="b")
    engine.generate("Reverse stone", GREEDY)
    engine.abort("b")
    assert engine.step() == []


def test_closing_a_stream_does_not_abort_a_later_request_with_its_id(engine: Engine):
    stream = engine.stream(QUESTION, GREEDY)
    deltas = list(stream)
    request_id = deltas[0].request_id
    engine.add_request(QUESTION, GREEDY, request_id=request_id)
    del stream
    assert text(run(engine)[request_id]) == ANSWER


def test_stop_string_takes_precedence_over_length(engine: Engine):
    params = SamplingParams(temperature=0.0, max_tokens=3, stop=["3,"])
    (output,) = engine.generate(QUESTION, params)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "3,")


def test_a_finished_generation_holds_no_block(engine: Engine):
    engine.generate(QUESTION, GREEDY)
    assert not engine.has_unfinished_requests
    assert engine.stats().num_used_blocks == 0


def test_output_metrics_have_times_and_preemptions(engine: Engine):
    (output,) = engine.generate(QUESTION, GREEDY)
    times: Any = output.metrics
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time <= times.finished_time
    assert times.num_preemptions == 0


def test_a_dropped_stream_aborts_its_request(engine: Engine):
    stream = engine.stream(QUESTION, GREEDY)
    next(stream)
    stream.close()
    never_started = engine.stream(QUESTION, GREEDY)
    del never_started
    run(engine)
    assert engine.stats().num_running == engine.stats().num_waiting == 0


BAD_REQUESTS = [
    ("", GREEDY, "prompt is empty"),
    ([], GREEDY, "prompt is empty"),
    (["a", 1], GREEDY, "must be an integer"),
    ([5, 100_000], GREEDY, "token id 100000 at position 1 is unknown"),
    ([-1], GREEDY, "token id -1"),
    ("\ud800", GREEDY, "surrogate"),
    ({"prmpt": "x"}, GREEDY, "unknown key 'prmpt'"),
    ([5] * 256, GREEDY, "max_model_len=256 leaves no room"),
    ("x", SamplingParams(stop_token_ids=[100_000]), "stop_token_ids has token ids"),
    ("x", SamplingParams(logit_bias={100_000: 1.0}), "logit_bias has token ids"),
    ("x", SamplingParams(logprobs=21), "logprobs=21 is more than"),
    (3.5, GREEDY, "prompt must be"),
]


@pytest.mark.parametrize(
    ("engine", "prompt", "params", "message"),
    covering(LOOPS, [pytest.param(*each) for each in BAD_REQUESTS], strength=1),
    indirect=["engine"],
)
def test_bad_request_is_refused_without_effect_on_others(
    engine: Engine, prompt: Any, params: SamplingParams, message: str
):
    good = engine.add_request(QUESTION, GREEDY)
    engine.step()
    with pytest.raises((TypeError, ValueError), match=message):
        engine.add_request(prompt, params)
    assert text(run(engine)[good]) == ANSWER


def test_one_bad_prompt_of_many_starts_none(engine: Engine):
    before = engine.stats().num_steps
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        engine.generate([QUESTION, ""], GREEDY)
    with pytest.raises(ValueError, match="max_model_len=256 leaves no room"):
        engine.generate([QUESTION, [5] * 256], GREEDY)
    assert engine.stats().num_steps == before
    assert not engine.has_unfinished_requests


BAD_OF_THIRTY = [
    ("", GREEDY, r"prompts\[29\] is empty"),
    ([], GREEDY, r"prompts\[29\] is empty"),
    *BAD_REQUESTS[2:-1],
    (3.5, GREEDY, r"prompts\[29\] must be"),
    ("x", SamplingParams(max_tokens=None, min_tokens=999), "min_tokens=999 is more than"),
    ("x", SamplingParams(n=9), "n=9 .*max_num_seqs=8"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_OF_THIRTY)
def test_bad_request_beyond_the_first_step_starts_none(
    engine: Engine, prompt: Any, params: SamplingParams, message: str
):
    before = engine.stats().num_steps
    with pytest.raises((TypeError, ValueError), match=message):
        engine.generate([*[QUESTION] * 29, prompt], [*[GREEDY] * 29, params])
    assert engine.stats().num_steps == before
    assert not engine.has_unfinished_requests


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


def test_an_unknown_option_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="'max_seqs'; did you mean 'max_num_seqs'"):
        Engine(max_seqs=3)


def test_a_model_is_a_name_or_a_folder():
    with pytest.raises(TypeError, match="model=3 must be a folder, a hub id"):
        Engine(3)  # pyright: ignore[reportArgumentType]


def test_malformed_messages_are_refused(engine: Engine):
    with pytest.raises(TypeError, match="messages must be a list"):
        engine.chat({"role": "user"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="second argument"):
        engine.chat([{"role": "user", "content": "Hi"}], sampling_params=GREEDY)


def test_text_needs_a_tokenizer(engines: Engines):
    engine = engines(skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="skip_tokenizer_init=True loaded none"):
        engine.generate(QUESTION)
    with pytest.raises(ValueError, match="skip_tokenizer_init=True loaded none"):
        engine.generate([5], SamplingParams(stop="x"))


@pytest.mark.parametrize(
    "loop",
    ["bursts", *(pytest.param(it, marks=pytest.mark.full) for it in ("overlapped", "synchronous"))],
)
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
        assert len(compiled) == 1  # the listener hears
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


def test_memory_account_adds_up(engine: Engine):
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


def test_ctrl_c_while_waiting_loses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    other = engine.add_request(QUESTION, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(StepHandle, "read", interrupting(StepHandle.read, KeyboardInterrupt, 2))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["Reverse stone"] * 3, GREEDY)
    assert text(run(engine)[other]) == ANSWER


def generate_until_interrupted(engine: Engine, seconds: float) -> bool:
    """Generate until a Ctrl-C comes after some seconds; whether it came out of `generate`."""
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
    assert interrupted >= 10  # Python drops one that comes inside a destructor
    last = engine.step()
    done = {o.request_id: text(o) for o in last if o.finished} | {
        request_id: text(output) for request_id, output in run(engine).items()
    }
    assert done[other] == ANSWER


def then(target: Callable[..., Any], action: Callable[[], object]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = target(*args, **kwargs)
        action()
        return result

    return wrapper


@pytest.mark.parametrize("names", [("add",), ("update",), ("update", "abort")], ids="-".join)
def test_ctrl_c_in_a_critical_section_is_deferred(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
):
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    other = engine.add_request(QUESTION, one_token, request_id="a")
    with monkeypatch.context() as patch:
        for name in names:
            pressed = then(getattr(Scheduler, name), lambda: signal.raise_signal(signal.SIGINT))
            patch.setattr(Scheduler, name, pressed)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["Reverse stone"] * 3, GREEDY)
    assert run(engine)[other].finished
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_ctrl_c_while_outputs_are_made_loses_no_output(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    params = SamplingParams(temperature=0.0, max_tokens=1)
    ids = [engine.add_request(QUESTION, params) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(
            RequestState, "output", interrupting(RequestState.output, KeyboardInterrupt, 1)
        )
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    assert list(run(engine)) == ids


def test_ctrl_c_while_text_is_decoded_repeats_no_text(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    engine.add_request(QUESTION, GREEDY, request_id="a")
    with monkeypatch.context() as patch:
        pressed = then(ByteDecoder.push, lambda: signal.raise_signal(signal.SIGINT))
        patch.setattr(ByteDecoder, "push", pressed)
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    assert text(run(engine)["a"]) == ANSWER


def test_stream_collected_during_a_step_is_aborted_after_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    other = engine.add_request(QUESTION, GREEDY)
    gc.disable()
    try:
        cycle: list[Any] = [engine.stream("Reverse stone", GREEDY)]
        next(cycle[0])
        cycle.append(cycle)
        del cycle
        monkeypatch.setattr(Scheduler, "update", then(Scheduler.update, gc.collect))
        assert text(run(engine)[other]) == ANSWER
    finally:
        gc.enable()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


OWN_BLOCKS = 130
"""A pool as large as no other engine's here."""


def count_pools() -> int:
    """Arrays of such a pool on the device."""
    return sum(array.ndim > 2 and array.shape[0] == OWN_BLOCKS for array in jax.live_arrays())


def count_collected(kind: type) -> int:
    """Objects of a kind that the garbage collector looks at."""
    return sum(type(it) is kind for it in gc.get_objects())


FAILING = [(ModelRunner, "launch"), (StepHandle, "read"), (Scheduler, "update")]


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=[name for _, name in FAILING])
def test_a_failed_step_fails_the_engine_and_says_so(
    new_engine: Engines,
    shallow_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
):
    num_pools = count_pools()
    engine = new_engine(shallow_folder, num_blocks=OWN_BLOCKS)
    assert count_pools() > num_pools
    monkeypatch.setattr(owner, name, interrupting(getattr(owner, name), RuntimeError, 2))
    with pytest.raises(RuntimeError):
        engine.generate(QUESTION, GREEDY)
    with pytest.raises(RuntimeError, match="failed in an earlier step"):
        engine.generate(QUESTION, GREEDY)
    with pytest.raises(RuntimeError, match="failed in an earlier step"):
        engine.step()
    engine.abort_all()
    del engine
    gc.collect()  # what frames of the errors above are left
    assert count_pools() == num_pools


def test_an_engine_is_freed_with_the_last_reference_to_it(
    compilation_cache: Path, shallow_folder: Path
):
    """Without the garbage collector, which does not look at it, since that takes long."""
    num_pools, num_collected = count_pools(), count_collected(KVBlock)
    options = {"num_blocks": OWN_BLOCKS, "compilation_cache_dir": compilation_cache, **SMALL}
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
    assert count_collected(KVBlock) <= num_collected
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
