"""Test answers that a grammar constrains: as single requests, in a batch, in each engine loop, and
with too few blocks for all requests."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jsonschema
import pytest
from e2e_options import (
    ANSWER,
    GREEDY,
    LOOPS,
    MOSTLY_OVERLAPPED,
    QUESTION,
    Engines,
    answers,
    check_small_pool_changes_no_answer,
    final_updates,
    generate_text,
    in_full_tier,
    make_workload,
    run,
    take_steps,
    text,
    updates,
)

from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.core.scheduler import Scheduler
from jpaged.errors import ErrorKind
from jpaged.runtime.results import StepHandle
from jpaged.structured_outputs.mask_client import Constraint, MaskWorkerClient

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NUMBERS = r"[0-9]{2}(, [0-9]{2}){0,6}"
SPECS: dict[str, StructuredOutputs] = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex=NUMBERS),
    "choice": StructuredOutputs(choice=["yes", "no", "yes, but"]),
    "grammar": StructuredOutputs(grammar='start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,3}/'),
}
DATE_PATTERN = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
DATE = StructuredOutputs(regex=DATE_PATTERN)
YES_OR_NO = StructuredOutputs(choice=["yes", "no"])
JSON_PARAMS = SamplingParams(structured_outputs=SPECS["json"], seed=1, max_tokens=120)
PENALIZED = SamplingParams(structured_outputs=DATE, max_tokens=60, repetition_penalty=1.2)
"""Sampling parameters with a grammar and a penalty. A request with these parameters needs its
grammar mask in every step."""

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "structured_outputs": SPECS["json"]},
    {"temperature": 0.0},
    {"temperature": 1.0, "n": 3, "structured_outputs": SPECS["regex"]},
    {"temperature": 0.7, "top_p": 0.9, "structured_outputs": SPECS["grammar"], "logprobs": 2},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.0, "structured_outputs": SPECS["json"], "repetition_penalty": 1.2},
    {"temperature": 1.0, "structured_outputs": SPECS["regex"], "stop": ", 4", "min_tokens": 3},
    {"temperature": 1.0, "n": 2, "best_of": 3, "structured_outputs": SPECS["choice"]},
]


def matches(spec: str, answer: str) -> bool:
    if spec == "json":
        jsonschema.validate(json.loads(answer), SCHEMA)
        return True
    if spec == "choice":
        return answer in ("yes", "no", "yes, but")
    pattern = NUMBERS if spec == "regex" else r"<[a-z]{1,3}(,[a-z]{1,3}){0,3}>"
    return re.fullmatch(pattern, answer) is not None


def workload(count: int = len(KINDS)) -> tuple[list[list[int]], list[SamplingParams]]:
    return make_workload(KINDS, count, 200, max_tokens=90)


@pytest.mark.parametrize("spec", [*SPECS])
def test_answers_match_their_structured_output_spec(engine: Engine, spec: str):
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=120, structured_outputs=SPECS[spec])
        for i, t in enumerate((0.0, 1.0, 1.0, 1.5, 1.5))
    ]
    for output in engine.generate([QUESTION] * len(params), params):
        (answer,) = output.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert matches(spec, answer.text), answer.text


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_structured_outputs_do_not_depend_on_other_requests_in_the_batch(
    engines: Engines, shallow_folder: Path, loop: str
):
    engine = engines(shallow_folder, **LOOPS[loop])
    unconstrained = generate_text(engine)
    prompts, params = workload()
    alone = [
        answers(engine.generate([it], own))[0] for it, own in zip(prompts, params, strict=True)
    ]
    assert answers(engine.generate(prompts, params)) == alone
    assert generate_text(engine) == unconstrained


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("recompute", {}),
        pytest.param("swap", {"kv_cache_dtype": "fp8"}, marks=pytest.mark.full),
        pytest.param("swap", {}, marks=pytest.mark.soak),
        pytest.param("auto", {}, marks=pytest.mark.soak),
        pytest.param("recompute", {"kv_cache_dtype": "fp8"}, marks=pytest.mark.soak),
    ],
)
def test_preemption_and_prefix_caching_change_no_token_of_answers_with_a_grammar(
    engines: Engines, shallow_folder: Path, mode: str, options: dict[str, Any]
):
    options = {"max_model_len": 160, "block_size": 8, **options}
    roomy = engines(shallow_folder, num_blocks=400, enable_prefix_caching=False, **options)
    few_blocks = {"num_blocks": 45, "max_num_seqs": 24, "swap_space": 0.05}
    tight = engines(shallow_folder, preemption_mode=mode, **few_blocks, **options)
    check_small_pool_changes_no_answer(roomy, tight, *workload())


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_tensor_parallel_devices_apply_the_same_grammar_masks(
    engines: Engines, shallow_folder: Path
):
    prompts, params = workload()
    alone, both = (engines(shallow_folder, dtype="float32", tensor_parallel_size=n) for n in (1, 2))
    assert answers(both.generate(prompts, params)) == answers(alone.generate(prompts, params))


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_steps_without_a_grammar_have_no_token_mask(engine: Engine):
    with engine.record_steps() as steps:
        engine.generate(QUESTION, GREEDY)
        assert not any(name == "mask" for launch in steps.launches for name, _ in launch.programs)
        engine.generate(QUESTION, SamplingParams(structured_outputs=DATE, seed=1))
    masked = [it for it in steps.launches if any(name == "mask" for name, _ in it.programs)]
    assert len(masked) >= len("2000-01-01")  # a token of this tokenizer is one byte


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"detokenize": False}], ids=str)
def test_complete_answer_ends_its_request(engine: Engine, options: dict[str, Any]):
    params = SamplingParams(structured_outputs=DATE, seed=3, max_tokens=60, **options)
    (answer,) = engine.generate(QUESTION, params)[0].outputs
    assert engine.tokenizer is not None
    assert re.fullmatch(DATE_PATTERN, engine.tokenizer.decode(answer.token_ids))
    assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (10, "stop", None)


def test_end_token_ends_an_answer_that_could_continue(engine: Engine):
    digits = StructuredOutputs(regex="[0-9]{1,60}")
    biased = {"structured_outputs": digits, "logit_bias": dict.fromkeys(engine_eos(engine), 100)}
    (answer,) = engine.generate(QUESTION, SamplingParams(max_tokens=50, **biased))[0].outputs
    assert answer.finish_reason == "stop"
    assert len(answer.text) == 1  # the grammar forbids the end token before the first digit
    assert answer.token_ids[-1] in engine_eos(engine)
    ignoring = SamplingParams(max_tokens=50, ignore_eos=True, **biased)
    (answer,) = engine.generate(QUESTION, ignoring)[0].outputs
    assert (len(answer.text), answer.finish_reason) == (50, "length")


def engine_eos(engine: Engine) -> frozenset[int]:
    assert engine.tokenizer is not None
    return frozenset({engine.tokenizer.eos_token_id or 0})


def test_top_logprobs_contain_only_tokens_that_the_grammar_allows(engine: Engine):
    params = SamplingParams(structured_outputs=YES_OR_NO, logprobs=5, temperature=0.0, max_tokens=9)
    (answer,) = engine.generate(QUESTION, params)[0].outputs
    assert answer.logprobs is not None
    first = answer.logprobs[0]
    assert {found.decoded_token for found in first.values()} == {"y", "n"}
    assert all(found.logprob == pytest.approx(0.0) for found in answer.logprobs[1].values())
    assert len(answer.logprobs[1]) == 1


def test_sampling_parameters_choose_among_allowed_tokens(engine: Engine):
    assert engine.tokenizer is not None
    (no,) = engine.tokenizer.encode("n")
    for bias, expected in ((-100, "yes"), (100, "no")):
        params = SamplingParams(structured_outputs=YES_OR_NO, logit_bias={no: bias}, max_tokens=9)
        assert generate_text(engine, params) == expected


def test_conflict_of_allowed_token_ids_with_the_grammar_fails_only_one_request(engine: Engine):
    params = SamplingParams(structured_outputs=YES_OR_NO, allowed_token_ids=[5])
    victim = engine.add_request(QUESTION, params)
    other = engine.add_request(QUESTION, GREEDY)
    last = run(engine)
    assert last[victim].outputs[0].finish_reason == "error"
    assert text(last[other]) == ANSWER


def test_streamed_deltas_of_a_constrained_answer_join_to_the_answer(engine: Engine):
    whole = generate_text(engine, JSON_PARAMS)
    assert "".join(delta.text for delta in engine.stream(QUESTION, JSON_PARAMS)) == whole


# Tests of requests whose grammar is still being compiled, or fails to compile


@pytest.fixture
def release_grammars(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Delay the compilation of all grammars, and return a function that lets the compilation
    continue."""
    is_ready, wait, is_held = Constraint.is_ready, Constraint.wait, True

    def wait_unless_held(self: Constraint, seconds: float | None = None) -> None:
        if not is_held:
            wait(self, seconds)

    def release() -> None:
        nonlocal is_held
        is_held = False

    is_ready_now = property(lambda self: not is_held and is_ready.__get__(self))
    monkeypatch.setattr(Constraint, "is_ready", is_ready_now)
    monkeypatch.setattr(Constraint, "wait", wait_unless_held)
    return release


def test_other_requests_run_while_a_grammar_is_compiled(
    engine: Engine, release_grammars: Callable[[], None]
):
    params = SamplingParams(structured_outputs=DATE, seed=1, max_tokens=60)
    late = engine.add_request(QUESTION, params)
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(QUESTION, GREEDY, request_id=late)
    other = engine.add_request(QUESTION, GREEDY)
    assert engine.stats().num_waiting == 2
    last: dict[str, Any] = {}
    while other not in last or not last[other].finished:
        last.update((output.request_id, output) for output in engine.step())
    assert text(last[other]) == ANSWER
    assert late not in last
    assert engine.has_unfinished_requests
    assert engine.step() == []
    release_grammars()
    assert re.fullmatch(DATE_PATTERN, text(run(engine)[late]))


def test_request_can_be_aborted_while_its_grammar_is_compiled(
    engine: Engine, release_grammars: Callable[[], None]
):
    name = engine.add_request(QUESTION, SamplingParams(structured_outputs=DATE))
    engine.step()
    engine.abort(name)
    assert not engine.has_unfinished_requests
    assert engine.stats().num_waiting == 0
    release_grammars()
    assert engine.step() == []


def test_invalid_grammar_ends_its_request_only(
    engine: Engine, release_grammars: Callable[[], None]
):
    bad = StructuredOutputs(regex="(a")
    victim = engine.add_request(QUESTION, SamplingParams(structured_outputs=bad, n=2))
    other = engine.add_request(QUESTION, GREEDY)
    engine.step()
    release_grammars()
    final = final_updates(engine)
    assert final[victim].error.startswith("structured_outputs.regex cannot be enforced")
    assert {delta.finish_reason for delta in final[victim].deltas} == {"error"}
    assert final[other].error is None


def test_generate_refuses_an_invalid_grammar_before_any_request_starts(engine: Engine):
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        engine.generate([QUESTION, QUESTION], [GREEDY, bad])
    assert not engine.has_unfinished_requests
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        engine.stream(QUESTION, bad)
    assert not engine.has_unfinished_requests


@pytest.mark.usefixtures("release_grammars")
def test_too_long_request_is_refused_before_its_grammar_is_compiled(engine: Engine):
    too_long = [5] * engine.runtime_config.max_model_len
    with pytest.raises(ValueError, match="max_model_len"):
        engine.add_request(too_long, SamplingParams(structured_outputs=DATE))
    assert not engine.has_unfinished_requests


AMBIGUOUS = StructuredOutputs(grammar='start: a\na: "x" a "x" | "x" | a a | "x" a a | a a a a')
"""Specification with an ambiguous grammar: the time for each token grows with the number of tokens
before it."""


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_grammar_that_fails_during_an_answer_ends_its_request_only(engine: Engine):
    expected = generate_text(engine, JSON_PARAMS)
    bad = SamplingParams(structured_outputs=AMBIGUOUS, max_tokens=220, ignore_eos=True)
    victim, valid, free = (engine.add_request(QUESTION, it) for it in (bad, JSON_PARAMS, GREEDY))
    final = final_updates(engine)
    error = final[victim].error or ""
    assert error.startswith("structured_outputs.grammar cannot be enforced"), error
    assert (final[valid].error, final[free].error) == (None, None)
    assert generate_text(engine, JSON_PARAMS) == expected


@pytest.mark.parametrize("where", ["with the mask", "with a received token"])
def test_error_in_the_mask_worker_ends_only_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
):
    expected = generate_text(engine, JSON_PARAMS)
    names = [engine.add_request(QUESTION, JSON_PARAMS) for _ in range(2)]
    free = engine.add_request(QUESTION, GREEDY)
    take_steps(engine, 5)
    gather_masks = MaskWorkerClient.gather_masks
    await_tokens_received = MaskWorkerClient.await_tokens_received
    victim, error = list[Any](), ValueError("too complex")

    def gather_but_one(self: MaskWorkerClient, items: Any, *args: Any) -> Any:
        # `items` lists the answers that have grammars: the answers of the first two requests.
        victim.append(items[0][0])
        masks, failed, late = gather_masks(self, items, *args)
        if where == "with the mask":
            failed = [*failed, *((i, error) for i, it in enumerate(items) if it[0] is victim[0])]
        return masks, failed, late

    def take_but_one(self: MaskWorkerClient) -> Any:
        ended = await_tokens_received(self)
        if not victim or where == "with the mask":
            return ended
        victim[0].error = error
        return ended | {victim[0]}

    monkeypatch.setattr(MaskWorkerClient, "gather_masks", gather_but_one)
    monkeypatch.setattr(MaskWorkerClient, "await_tokens_received", take_but_one)
    last = run(engine)
    ended = {last[it].outputs[0].finish_reason: text(last[it]) for it in names}
    assert ended.keys() == {"error", "stop"}
    assert ended["stop"] == expected
    assert text(last[free]) == ANSWER


def mask_processes() -> list[int]:
    """Return the process ids of the mask workers that are children of this process."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_own = parent == os.getpid() and "mask_worker" in (folder / "cmdline").read_text()
            found += [int(folder.name)] if is_own else []
    return found


@contextmanager
def stopped_mask_workers() -> Iterator[None]:
    """Stop the mask workers by SIGSTOP; let them continue when the context ends."""
    pids = mask_processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_killing_the_mask_worker_ends_only_requests_with_a_grammar(engine: Engine):
    expected = generate_text(engine, JSON_PARAMS)
    for num_steps in (0, 1, 6):
        names = [engine.add_request(QUESTION, it) for it in (JSON_PARAMS, GREEDY, JSON_PARAMS)]
        take_steps(engine, num_steps)
        # Kill the mask workers of all engines in this process.
        for pid in mask_processes():
            os.kill(pid, signal.SIGKILL)
        final = final_updates(engine)
        errors = [final[it].error for it in names]
        assert errors[1] is None
        for error in errors[::2]:
            assert re.match("structured_outputs: the process .* has ended.* retry", error or "")
        engine.check_integrity()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert generate_text(engine, JSON_PARAMS) == expected


def test_mask_worker_starts_with_the_first_grammar_and_ends_with_the_engine(
    new_engine: Engines, shallow_folder: Path
):
    others = mask_processes()
    engine = new_engine(shallow_folder)
    engine.generate(QUESTION, GREEDY)
    assert mask_processes() == others
    engine.generate(QUESTION, SamplingParams(structured_outputs=DATE, seed=1))
    (pid,) = {*mask_processes()} - {*others}
    del engine
    assert pid not in mask_processes()


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_sequences_with_late_grammar_masks_skip_steps(
    engines: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch, loop: str
):
    engine = engines(shallow_folder, **LOOPS[loop])
    prompts, params = workload()
    expected = answers(engine.generate(prompts, params))
    counts = delay_masks(monkeypatch, chance=0.1)
    assert answers(engine.generate(prompts, params)) == expected
    assert (len(counts) > 0) == (loop != "synchronous")


def test_several_sequences_with_slow_grammars_can_skip_the_same_step(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    engine = engines(**LOOPS["overlapped"])
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)]
    params += [SamplingParams(max_tokens=30, seed=i, structured_outputs=DATE) for i in range(4)]
    expected = answers(engine.generate([QUESTION] * 5, params))
    counts = delay_masks(monkeypatch, chance=0.6, heavy=True)
    assert answers(engine.generate([QUESTION] * 5, params)) == expected
    # If the mask of a row is not ready, a later step samples the row's token. A step hardly waits
    # for the masks of slow grammars, so several rows can lack their masks in the same step.
    assert max(counts) > 1


@pytest.mark.parametrize("loop", ["overlapped", "synchronous"])
def test_answers_do_not_change_if_the_mask_worker_reports_the_end_of_an_answer_late(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, loop: str
):
    engine = engines(**LOOPS[loop])
    date = {"structured_outputs": DATE, "seed": 1}
    params = [
        SamplingParams(max_tokens=30, n=2, **date),
        SamplingParams(max_tokens=10, **date),  # the number of tokens of a date
        SamplingParams(max_tokens=30, stop="no such", logprobs=1, **date),
        SamplingParams(max_tokens=30, seed=2, structured_outputs=SPECS["choice"]),
        SamplingParams(max_tokens=15, ignore_eos=True, temperature=0.0),
    ]
    prompts = [QUESTION] * len(params)
    expected = answers(engine.generate(prompts, params))
    await_tokens_received, num_hidden = MaskWorkerClient.await_tokens_received, 0

    def take_unseen(self: MaskWorkerClient) -> Any:
        nonlocal num_hidden
        for answer in await_tokens_received(self):
            answer.is_stopped, answer.error = False, None
            num_hidden += 1
        return set()

    monkeypatch.setattr(MaskWorkerClient, "await_tokens_received", take_unseen)
    assert answers(engine.generate(prompts, params)) == expected
    assert num_hidden > 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_generate_waits_for_a_busy_mask_worker(
    engines: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A request with penalties needs its grammar mask in every step. `Engine.generate` may wait
    longer than 100 ms for the mask, because no client receives a stream of tokens."""
    engine = engines(shallow_folder)
    cannot_skip = replace(PENALIZED, max_tokens=12, seed=1)
    params = [cannot_skip, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)]
    expected = answers(engine.generate([QUESTION] * 2, params))
    gather_masks, stopped = MaskWorkerClient.gather_masks, list[int]()

    def stop_first(self: MaskWorkerClient, *args: Any) -> Any:
        if not stopped and self.pid is not None:
            stopped.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self.pid, signal.SIGCONT)).start()
        return gather_masks(self, *args)

    # Simulate a busy machine. The test stops the mask worker for 0.3 s. Because `is_running` is
    # true, the engine assumes that the mask worker only waits for CPU time.
    monkeypatch.setattr(MaskWorkerClient, "is_running", True)
    monkeypatch.setattr(MaskWorkerClient, "gather_masks", stop_first)
    assert answers(engine.generate([QUESTION] * 2, params)) == expected
    assert stopped


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_requests_without_a_grammar_finish_while_the_mask_worker_is_stopped(engine: Engine):
    """A request with a grammar waits until the mask worker is resumed. If the request also has
    penalties, the request fails instead of waiting."""
    expected = generate_text(engine, JSON_PARAMS)
    kept = engine.add_request(QUESTION, JSON_PARAMS)
    failing = engine.add_request(QUESTION, PENALIZED)
    free = engine.add_request(QUESTION, SamplingParams(max_tokens=60, ignore_eos=True))
    take_steps(engine, 4)
    final, start = dict[str, Any](), time.monotonic()

    def advance_until_finished(name: str) -> None:
        while name not in final:
            engine.advance()
            final.update({it.request_id: it for it in engine.take_deltas() if it.finished})

    with stopped_mask_workers():
        advance_until_finished(free)
        advance_until_finished(engine.add_request(QUESTION, GREEDY))
        advance_until_finished(failing)
        assert time.monotonic() - start < 15  # half of the time limit for the mask worker
        assert kept not in final
        assert final[failing].error_info.kind is ErrorKind.UNAVAILABLE
    rest = [*updates(engine)]
    assert rest[-1].finished
    assert {it.error for it in rest} == {None}
    assert expected.endswith("".join(delta.text for it in rest for delta in it.deltas))
    assert generate_text(engine, JSON_PARAMS) == expected


def test_requests_without_a_grammar_wait_at_most_100_ms_for_a_grammar_mask(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    """The limit also holds on a busy machine, while the mask worker waits for CPU time."""
    engine, waits = engines(**LOOPS["overlapped"]), list[float]()
    gather_masks = MaskWorkerClient.gather_masks

    def timed(self: MaskWorkerClient, *args: Any) -> Any:
        found = gather_masks(self, *args)
        # Each poll adds at most 10 ms to `seconds_waited`, so the limit is exceeded only a little.
        waits.append(self.seconds_waited)
        return found

    monkeypatch.setattr(MaskWorkerClient, "gather_masks", timed)
    monkeypatch.setattr(MaskWorkerClient, "is_running", True)
    failing = engine.add_request(QUESTION, PENALIZED)
    engine.add_request(QUESTION, SamplingParams(max_tokens=20, ignore_eos=True))
    take_steps(engine, 4)
    with stopped_mask_workers():
        last = run(engine)
    assert 0.1 <= max(waits) < 0.15
    assert last[failing].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("kind", [*in_full_tier(2), 5], ids=["several samples", "penalties"])
def test_step_waits_for_late_masks_of_requests_with_penalties_or_several_samples(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: int
):
    engine = engines(**LOOPS["overlapped"])
    params = [SamplingParams(max_tokens=60, seed=1, **KINDS[kind])]
    params += [SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)] * 12
    expected = answers(engine.generate([QUESTION] * 13, params))
    counts = delay_masks(monkeypatch, chance=0.2)
    assert answers(engine.generate([QUESTION] * 13, params)) == expected
    # A request of `KINDS[2]` has several samples. When only one sample is unfinished, steps may
    # leave out this sample until its mask is ready.
    assert not counts or kind == 2


def delay_masks(
    monkeypatch: pytest.MonkeyPatch, chance: float, *, heavy: bool = False
) -> list[int]:
    """Delay random grammar masks. If a row lacks its mask, a later step samples the row's token.

    Returns:
        Numbers of postponed rows, one number for each step that postpones rows. The list grows
        while the engine runs.
    """
    gather_masks, postpone_rows = MaskWorkerClient.gather_masks, Scheduler.postpone_rows
    rng, counts = random.Random(1), list[int]()

    def gather_late(
        self: MaskWorkerClient, items: Any, num_rows: int, should_stop_waiting: Any
    ) -> Any:
        masks, over, late = gather_masks(self, items, num_rows)
        ended = {i for i, _ in over}
        late = [i for i in range(len(items)) if rng.random() < chance and i not in ended]
        until = time.perf_counter() + 0.03
        while late and time.perf_counter() < until:
            if should_stop_waiting(late, late if heavy else ()):
                masks[[items[i][1] for i in late]] = 0
                return masks, over, late
        return masks, over, []

    def noted(self: Scheduler, plan: Any, rows: Any) -> Any:
        counts.append(len(rows))
        for i in rows:
            assert len(plan.scheduled[i].sequence.request.live_sequences) == 1
        plan = postpone_rows(self, plan, rows)
        self.check_integrity()
        return plan

    monkeypatch.setattr(MaskWorkerClient, "gather_masks", gather_late)
    monkeypatch.setattr(Scheduler, "postpone_rows", noted)
    return counts


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
@pytest.mark.parametrize("after", range(1, 9, 2))
def test_ctrl_c_between_layers_and_sampling_loses_no_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int
):
    expected = generate_text(engine, JSON_PARAMS)
    read, calls = StepHandle.read, 0

    def interrupted(self: StepHandle) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return read(self)

    monkeypatch.setattr(StepHandle, "read", interrupted)
    name, free = engine.add_request(QUESTION, JSON_PARAMS), engine.add_request(QUESTION, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    last = run(engine)
    assert calls > after
    assert text(last[name]) == expected
    assert text(last[free]) == ANSWER


def test_constrained_requests_aborted_at_any_step_free_their_blocks(
    engines: Engines, shallow_folder: Path
):
    engine = engines(shallow_folder)
    for num_steps in range(8):
        names = [engine.add_request(QUESTION, replace(JSON_PARAMS, n=2)) for _ in range(2)]
        take_steps(engine, num_steps)
        engine.abort(names[0])
        run(engine)  # after the test, the fixture checks that all blocks are free


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"beam_width": 2, "n": 2, "structured_outputs": DATE},
            ValueError,
            ".* cannot be combined with beam_width=2",
        ),
        ({"structured_outputs": r"\d"}, TypeError, r"'\\\\d' must be a StructuredOutputs"),
    ],
)
def test_invalid_structured_outputs_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=f"structured_outputs={message}"):
        SamplingParams(**options)


def test_grammar_without_a_tokenizer_is_refused(engines: Engines):
    engine = engines(skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        engine.generate([[5]], SamplingParams(structured_outputs=DATE, detokenize=False))
