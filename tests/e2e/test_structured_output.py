"""Test constrained answers: alone, next to other requests, in both loops, and under pressure."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jsonschema
import pytest
from e2e_options import ANSWER, GREEDY, LOOPS, MOSTLY_OVERLAPPED, QUESTION, SMALL, Engines, run

from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.core.request import Sequence
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
FORMS: dict[str, StructuredOutputs] = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex=NUMBERS),
    "choice": StructuredOutputs(choice=["yes", "no", "yes, but"]),
    "grammar": StructuredOutputs(grammar='start: "<" word ("," word)~0..3 ">"\nword: /[a-z]{1,3}/'),
}
DATE = StructuredOutputs(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "structured_outputs": FORMS["json"]},
    {"temperature": 0.0},
    {"temperature": 1.0, "n": 3, "structured_outputs": FORMS["regex"]},
    {"temperature": 0.7, "top_p": 0.9, "structured_outputs": FORMS["grammar"], "logprobs": 2},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.0, "structured_outputs": FORMS["json"], "repetition_penalty": 1.2},
    {"temperature": 1.0, "structured_outputs": FORMS["regex"], "stop": ", 4", "min_tokens": 3},
    {"temperature": 1.0, "n": 2, "best_of": 3, "structured_outputs": FORMS["choice"]},
]
SHAPE: dict[str, Any] = {"max_model_len": 160, "block_size": 8}
FEW = 45
"""Blocks, too few for all requests at once."""


def obeys(form: str, text: str) -> bool:
    if form == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if form == "choice":
        return text in ("yes", "no", "yes, but")
    pattern = NUMBERS if form == "regex" else r"<[a-z]{1,3}(,[a-z]{1,3}){0,3}>"
    return re.fullmatch(pattern, text) is not None


def workload(count: int = 16) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike, of all kinds of requests."""
    rng = random.Random(0)
    text = [rng.randrange(5, 200) for _ in range(60)]
    prompts = [[*text[: 20 + 2 * index], 5 + index] for index in range(count)]
    asked = (dict(KINDS[index % len(KINDS)]) for index in range(count))
    return prompts, [SamplingParams(max_tokens=90, seed=i, **kind) for i, kind in enumerate(asked)]


def answers(outputs: Any) -> list[list[tuple]]:
    return [
        [(tuple(own.token_ids), own.text, own.finish_reason, own.stop_reason) for own in it.outputs]
        for it in outputs
    ]


@pytest.mark.parametrize("form", [*FORMS])
def test_constrained_answers_match_their_specification(engine: Engine, form: str):
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=120, structured_outputs=FORMS[form])
        for i, t in enumerate((0.0, 1.0, 1.0, 1.5, 1.5))
    ]
    for output in engine.generate([QUESTION] * len(params), params):
        (answer,) = output.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert obeys(form, answer.text), answer.text


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_other_rows_change_no_constrained_answer(engines: Engines, shallow_folder: Path, loop: str):
    engine = engines(shallow_folder, **LOOPS[loop])
    plain = answers(engine.generate(QUESTION, GREEDY))
    prompts, params = workload()
    alone = [
        answers(engine.generate([it], own))[0] for it, own in zip(prompts, params, strict=True)
    ]
    assert answers(engine.generate(prompts, params)) == alone
    assert answers(engine.generate(QUESTION, GREEDY)) == plain


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
def test_pressure_and_sharing_change_no_token(
    engines: Engines, shallow_folder: Path, mode: str, options: dict[str, Any]
):
    prompts, params = workload()
    options = {**SHAPE, **options}
    roomy = engines(shallow_folder, num_blocks=400, enable_prefix_caching=False, **options)
    expected = answers(roomy.generate(prompts, params))
    pressed = {"num_blocks": FEW, "max_num_seqs": 24, "preemption_mode": mode, "swap_space": 0.05}
    tight = engines(shallow_folder, **pressed, **options)
    before = tight.stats()
    for _ in range(2):  # the second time prefixes are cached
        assert answers(tight.generate(prompts, params)) == expected
    stats = tight.stats()
    assert stats.num_preemptions > before.num_preemptions
    assert stats.num_cached_tokens > before.num_cached_tokens


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_tensor_parallel_devices_apply_the_same_masks(engines: Engines, shallow_folder: Path):
    prompts, params = workload(8)
    alone, both = (engines(shallow_folder, dtype="float32", tensor_parallel_size=n) for n in (1, 2))
    assert answers(both.generate(prompts, params)) == answers(alone.generate(prompts, params))


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_steps_without_a_grammar_have_no_mask(engine: Engine):
    with engine.record_steps() as steps:
        engine.generate(QUESTION, GREEDY)
        assert not any(name == "mask" for launch in steps.launches for name, _ in launch.programs)
        engine.generate(QUESTION, SamplingParams(structured_outputs=DATE, seed=1))
    masked = [it for it in steps.launches if any(name == "mask" for name, _ in it.programs)]
    assert len(masked) >= len("2000-01-01")  # a byte a token


def test_complete_answer_ends_even_if_end_tokens_are_ignored(engine: Engine):
    params = SamplingParams(structured_outputs=DATE, seed=3, max_tokens=60, ignore_eos=True)
    (answer,) = engine.generate(QUESTION, params)[0].outputs
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", answer.text)
    assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (10, "stop", None)


def test_end_token_ends_an_answer_that_could_continue(engine: Engine):
    form = StructuredOutputs(regex="[0-9]{1,60}")
    biased = {"structured_outputs": form, "logit_bias": dict.fromkeys(engine_eos(engine), 100)}
    (answer,) = engine.generate(QUESTION, SamplingParams(max_tokens=50, **biased))[0].outputs
    assert answer.finish_reason == "stop"
    assert len(answer.text) == 1  # none before the first digit
    assert answer.token_ids[-1] in engine_eos(engine)
    ignoring = SamplingParams(max_tokens=50, ignore_eos=True, **biased)
    (answer,) = engine.generate(QUESTION, ignoring)[0].outputs
    assert (len(answer.text), answer.finish_reason) == (50, "length")


def engine_eos(engine: Engine) -> frozenset[int]:
    assert engine.tokenizer is not None
    return frozenset({engine.tokenizer.eos_token_id or 0})


def test_logprobs_are_among_allowed_tokens(engine: Engine):
    form = StructuredOutputs(choice=["yes", "no"])
    params = SamplingParams(structured_outputs=form, logprobs=5, temperature=0.0, max_tokens=9)
    (answer,) = engine.generate(QUESTION, params)[0].outputs
    assert answer.logprobs is not None
    first = answer.logprobs[0]
    assert {found.decoded_token for found in first.values()} == {"y", "n"}
    assert all(found.logprob == pytest.approx(0.0) for found in answer.logprobs[1].values())
    assert len(answer.logprobs[1]) == 1


def test_sampling_parameters_choose_among_allowed_tokens(engine: Engine):
    assert engine.tokenizer is not None
    (no,) = engine.tokenizer.encode("n")
    form = StructuredOutputs(choice=["yes", "no"])
    for bias, expected in ((-100, "yes"), (100, "no")):
        params = SamplingParams(structured_outputs=form, logit_bias={no: bias}, max_tokens=9)
        assert engine.generate(QUESTION, params)[0].outputs[0].text == expected


def test_parameters_that_forbid_all_allowed_tokens_end_the_request_only(engine: Engine):
    form = StructuredOutputs(choice=["yes", "no"])
    params = SamplingParams(structured_outputs=form, allowed_token_ids=[5])
    victim = engine.add_request(QUESTION, params)
    other = engine.add_request(QUESTION, GREEDY)
    last = run(engine)
    assert last[victim].outputs[0].finish_reason == "error"
    assert last[other].outputs[0].text == ANSWER


def test_a_stream_joins_to_the_answer(engine: Engine):
    params = SamplingParams(structured_outputs=FORMS["json"], seed=4, max_tokens=120)
    whole = engine.generate(QUESTION, params)[0].outputs[0].text
    assert "".join(delta.text for delta in engine.stream(QUESTION, params)) == whole


# Grammars that are not ready, or fail


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Grammars that are asked for are not compiled until this is called."""
    is_ready, wait, is_held = Constraint.is_ready, Constraint.wait, True

    def wait_unless_held(self: Constraint, seconds: float | None = None) -> None:
        if not is_held:
            wait(self, seconds)

    def release() -> None:
        nonlocal is_held
        is_held = False

    own = property(lambda self: not is_held and is_ready.__get__(self))
    monkeypatch.setattr(Constraint, "is_ready", own)
    monkeypatch.setattr(Constraint, "wait", wait_unless_held)
    return release


def test_other_requests_run_while_a_grammar_is_compiled(engine: Engine, held: Callable[[], None]):
    params = SamplingParams(structured_outputs=DATE, seed=1, max_tokens=60)
    late = engine.add_request(QUESTION, params)
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(QUESTION, GREEDY, request_id=late)
    other = engine.add_request(QUESTION, GREEDY)
    assert engine.stats().num_waiting == 2
    last: dict[str, Any] = {}
    while other not in last or not last[other].finished:
        last.update((output.request_id, output) for output in engine.step())
    assert last[other].outputs[0].text == ANSWER
    assert late not in last
    assert engine.has_unfinished_requests
    assert engine.step() == []
    held()
    text = run(engine)[late].outputs[0].text
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text)


def test_request_can_be_aborted_while_its_grammar_is_compiled(
    engine: Engine, held: Callable[[], None]
):
    name = engine.add_request(QUESTION, SamplingParams(structured_outputs=DATE))
    engine.step()
    engine.abort(name)
    assert not engine.has_unfinished_requests
    assert engine.stats().num_waiting == 0
    held()
    assert engine.step() == []


def test_invalid_grammar_ends_its_request_only(engine: Engine, held: Callable[[], None]):
    bad = StructuredOutputs(regex="(a")
    victim = engine.add_request(QUESTION, SamplingParams(structured_outputs=bad, n=2))
    other = engine.add_request(QUESTION, GREEDY)
    engine.step()
    held()
    while engine.has_work:
        engine.advance()
    told = {delta.request_id: delta for delta in engine.take_deltas()}
    assert told[victim].finished
    assert (told[victim].error or "").startswith("structured_outputs.regex cannot be enforced")
    assert {own.finish_reason for own in told[victim].deltas} == {"error"}
    assert told[other].finished
    assert told[other].error is None


def test_generate_refuses_an_invalid_grammar_before_any_request_starts(engine: Engine):
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"))
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        engine.generate([QUESTION, QUESTION], [GREEDY, bad])
    assert not engine.has_unfinished_requests
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        engine.stream(QUESTION, bad)
    assert not engine.has_unfinished_requests


def test_a_request_that_never_fits_is_refused_before_its_grammar_is_compiled(
    engine: Engine, held: Callable[[], None]
):
    too_long = [5] * engine.runtime_config.max_model_len
    with pytest.raises(ValueError, match="max_model_len"):
        engine.add_request(too_long, SamplingParams(structured_outputs=DATE))
    assert not engine.has_unfinished_requests


AMBIGUOUS = StructuredOutputs(
    grammar='start: a\na: "x" a "x" | "x" | a a | "x" a a | a a a a',
)
"""What a token costs grows with those before it."""


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_grammar_that_fails_during_an_answer_ends_its_request_only(engine: Engine):
    params = SamplingParams(structured_outputs=FORMS["json"], seed=1, max_tokens=120)
    expected = engine.generate(QUESTION, params)[0].outputs[0].text
    bad = SamplingParams(structured_outputs=AMBIGUOUS, max_tokens=220, ignore_eos=True)
    victim, own, free = (engine.add_request(QUESTION, it) for it in (bad, params, GREEDY))
    told: dict[str, Any] = {}
    while engine.has_work:
        engine.advance()
        told |= {it.request_id: it for it in engine.take_deltas() if it.finished}
    error = told[victim].error or ""
    assert error.startswith("structured_outputs.grammar cannot be enforced"), error
    assert (told[own].error, told[free].error) == (None, None)
    assert expected == engine.generate(QUESTION, params)[0].outputs[0].text


@pytest.mark.parametrize("where", ["gather", "await_taken"])
def test_fault_at_any_point_of_constrained_sampling_ends_one_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
):
    """The process says so when a token is taken in, or with the mask behind it."""
    params = SamplingParams(structured_outputs=FORMS["json"], seed=1, max_tokens=120)
    expected = engine.generate(QUESTION, params)[0].outputs[0].text
    names = [engine.add_request(QUESTION, params) for _ in range(2)]
    free = engine.add_request(QUESTION, GREEDY)
    for _ in range(5):
        engine.step()
    gather_masks, await_tokens_received, victim = (
        MaskWorkerClient.gather_masks,
        MaskWorkerClient.await_tokens_received,
        list[Any](),
    )
    error = ValueError("too complex")

    def gather_but_one(self: MaskWorkerClient, items: Any, *args: Any) -> Any:
        victim.append(items[0][0])  # of one of the first two requests
        masks, failed, late = gather_masks(self, items, *args)
        own = [i for i, (it, _) in enumerate(items) if it is victim[0] and where == "gather"]
        return masks, [*failed, *((i, error) for i in own)], late

    def take_but_one(self: MaskWorkerClient) -> Any:
        over = await_tokens_received(self)
        if not victim or where == "gather":
            return over
        victim[0].error = error
        return over | {victim[0]}

    monkeypatch.setattr(MaskWorkerClient, "gather_masks", gather_but_one)
    monkeypatch.setattr(MaskWorkerClient, "await_tokens_received", take_but_one)
    last = run(engine)
    ended = {last[it].outputs[0].finish_reason: last[it].outputs[0].text for it in names}
    assert ended.keys() == {"error", "stop"}
    assert ended["stop"] == expected
    assert last[free].outputs[0].text == ANSWER


def mask_processes() -> list[int]:
    """Return the mask workers among the children of this process."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_own = parent == os.getpid() and "mask_worker" in (folder / "cmdline").read_text()
            found += [int(folder.name)] if is_own else []
    return found


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
def test_killed_mask_worker_ends_constrained_requests_only(engine: Engine):
    params = SamplingParams(structured_outputs=FORMS["json"], seed=1, max_tokens=120)
    expected = engine.generate(QUESTION, params)[0].outputs[0].text
    for num_steps in (0, 1, 5, 6):
        names = [engine.add_request(QUESTION, it) for it in (params, GREEDY, params)]
        for _ in range(num_steps):
            engine.step()
        for pid in mask_processes():  # of engines that are kept, too
            os.kill(pid, signal.SIGKILL)
        told: dict[str, Any] = {}
        while engine.has_work:
            engine.advance()
            told |= {it.request_id: it for it in engine.take_deltas() if it.finished}
        errors = [told[it].error for it in names]
        assert errors[1] is None
        for error in errors[::2]:
            assert re.match("structured_outputs: the process .* has ended.* retry", error or "")
        engine.check_integrity()
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
        assert engine.generate(QUESTION, params)[0].outputs[0].text == expected


def test_mask_worker_starts_with_the_first_grammar_and_ends_with_the_engine(
    compilation_cache: Path,
):
    others = mask_processes()
    options = {**SMALL, "num_blocks": 33, "max_num_seqs": 2, "max_model_len": 96}
    engine = Engine(compilation_cache_dir=compilation_cache, **options)
    engine.generate(QUESTION, GREEDY)
    assert mask_processes() == others
    engine.generate(QUESTION, SamplingParams(structured_outputs=DATE, seed=1))
    (pid,) = {*mask_processes()} - {*others}
    del engine
    assert pid not in mask_processes()


@pytest.mark.parametrize(
    "mode",
    ["overlapped", *(pytest.param(it, marks=pytest.mark.full) for it in ("synchronous", "bursts"))],
)
def test_rows_with_late_masks_skip_steps(
    engines: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    engine = engines(shallow_folder, **LOOPS[mode])
    prompts, params = workload()
    expected = answers(engine.generate(prompts, params))
    left = make_late(monkeypatch, chance=0.1)
    assert answers(engine.generate(prompts, params)) == expected
    assert (len(left) > 0) == (mode != "synchronous")


def test_most_rows_of_a_step_can_skip_it(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    engine = engines(**LOOPS["overlapped"])
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)]
    params += [SamplingParams(max_tokens=30, seed=i, structured_outputs=DATE) for i in range(4)]
    expected = answers(engine.generate([QUESTION] * 5, params))
    left = make_late(monkeypatch, chance=0.6, heavy=True)
    counts, postpone_rows = list[int](), Scheduler.postpone_rows

    def counted(self: Scheduler, plan: Any, rows: Any) -> Any:
        counts.append(len(rows))
        return postpone_rows(self, plan, rows)

    monkeypatch.setattr(Scheduler, "postpone_rows", counted)
    assert answers(engine.generate([QUESTION] * 5, params)) == expected
    assert left
    assert max(counts) > 1  # more than a quarter


@pytest.mark.parametrize("mode", ["overlapped", "synchronous"])
def test_late_matching_of_the_last_tokens_ends_answers_correctly(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, mode: str
):
    """It is seen with the masks of the next step, or after the last token that was asked for."""
    engine = engines(**LOOPS[mode])
    form = {"structured_outputs": DATE, "seed": 1}
    params = [
        SamplingParams(max_tokens=30, n=2, **form),
        SamplingParams(max_tokens=10, **form),  # complete with the last token that it may have
        SamplingParams(max_tokens=30, stop="no such", logprobs=1, **form),
        SamplingParams(max_tokens=30, seed=2, structured_outputs=FORMS["choice"]),
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


def test_generation_waits_for_a_busy_mask_worker(
    engines: Engines, shallow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A row that cannot skip a step fails after 100 ms only if streams wait for it."""
    engine = engines(shallow_folder)
    held = SamplingParams(max_tokens=12, seed=1, structured_outputs=DATE, repetition_penalty=1.2)
    params = [held, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)]
    expected = answers(engine.generate([QUESTION] * 2, params))
    gather_masks, stopped = MaskWorkerClient.gather_masks, list[int]()

    def stop_first(self: MaskWorkerClient, *args: Any) -> Any:
        if not stopped and self.pid is not None:
            stopped.append(self.pid)
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self.pid, signal.SIGCONT)).start()
        return gather_masks(self, *args)

    monkeypatch.setattr(MaskWorkerClient, "is_running", True)  # as if it had no processor
    monkeypatch.setattr(MaskWorkerClient, "gather_masks", stop_first)
    assert answers(engine.generate([QUESTION] * 2, params)) == expected
    assert stopped


@pytest.mark.parametrize("mode", MOSTLY_OVERLAPPED)
def test_stopped_mask_worker_delays_no_unconstrained_row(engines: Engines, mode: str):
    """Rows that cannot leave a step fail; the others get their tokens when it has gone on."""
    engine = engines(**LOOPS[mode])
    params = SamplingParams(structured_outputs=FORMS["json"], seed=1, max_tokens=120)
    expected = engine.generate(QUESTION, params)[0].outputs[0].text
    penalty = SamplingParams(structured_outputs=DATE, max_tokens=60, repetition_penalty=1.2)
    kept = engine.add_request(QUESTION, params)
    failing = engine.add_request(QUESTION, penalty)
    free = engine.add_request(QUESTION, SamplingParams(max_tokens=60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    pids, told, start = mask_processes(), dict[str, Any](), time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        while free not in told:
            engine.advance()
            told |= {it.request_id: it for it in engine.take_deltas() if it.finished}
        late = engine.add_request(QUESTION, GREEDY)  # one that comes meanwhile is served
        while late not in told:
            engine.advance()
            told |= {it.request_id: it for it in engine.take_deltas() if it.finished}
        assert time.monotonic() - start < 15  # 30 before the process was taken to hang
        assert kept not in told
        assert told[failing].error_info.kind is ErrorKind.UNAVAILABLE
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    texts = list[str]()
    while engine.has_work:
        engine.advance()
        for delta in engine.take_deltas():
            told |= {delta.request_id: delta} if delta.finished else {}
            texts += [it.text for it in delta.deltas]
    assert told[kept].error is None
    assert expected.endswith("".join(texts))
    assert engine.generate(QUESTION, params)[0].outputs[0].text == expected


def test_unconstrained_rows_wait_at_most_100_ms_for_a_row_that_cannot_skip(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    """Also where the process seems to run, as one does that a busy machine gives no processor."""
    engine, waits, gather_masks = (
        engines(**LOOPS["overlapped"]),
        list[float](),
        MaskWorkerClient.gather_masks,
    )

    def timed(self: MaskWorkerClient, *args: Any) -> Any:
        found = gather_masks(self, *args)
        waits.append(self.seconds_waited)  # a look counts as 10 ms at most, however late it is
        return found

    monkeypatch.setattr(MaskWorkerClient, "gather_masks", timed)
    monkeypatch.setattr(MaskWorkerClient, "is_running", True)
    penalty = SamplingParams(structured_outputs=DATE, max_tokens=60, repetition_penalty=1.2)
    failing = engine.add_request(QUESTION, penalty)
    engine.add_request(QUESTION, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    pids = mask_processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        told = run(engine)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert 0.1 <= max(waits) < 0.15
    assert told[failing].outputs[0].finish_reason == "error"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(2, marks=pytest.mark.full), 5],
    ids=["of several", "with penalties"],
)
def test_step_waits_for_rows_that_cannot_skip(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, kind: int
):
    engine = engines(**LOOPS["overlapped"])
    params = [SamplingParams(max_tokens=60, seed=1, **KINDS[kind])]
    params += [SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)] * 12
    expected = answers(engine.generate([QUESTION] * 13, params))
    left = make_late(monkeypatch, chance=0.2)
    assert answers(engine.generate([QUESTION] * 13, params)) == expected
    assert not left or kind == 2  # the last of several may be left


def make_late(
    monkeypatch: pytest.MonkeyPatch, chance: float, *, heavy: bool = False
) -> list[Sequence]:
    """Let masks take long; gives the sequences whose rows sit a step out, as they do."""
    gather_masks, postpone_rows = MaskWorkerClient.gather_masks, Scheduler.postpone_rows
    rng, left = random.Random(1), list[Sequence]()

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
        left.extend(plan.scheduled[i].sequence for i in rows)
        assert all(len(it.request.live_sequences) == 1 for it in left[-len(rows) :])
        plan = postpone_rows(self, plan, rows)
        self.check_integrity()
        return plan

    monkeypatch.setattr(MaskWorkerClient, "gather_masks", gather_late)
    monkeypatch.setattr(Scheduler, "postpone_rows", noted)
    return left


@pytest.mark.parametrize("engine", MOSTLY_OVERLAPPED, indirect=True)
@pytest.mark.parametrize("after", range(1, 9, 2))
def test_ctrl_c_between_layers_and_sampling_loses_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int
):
    params = SamplingParams(structured_outputs=FORMS["json"], seed=1, max_tokens=120)
    expected = engine.generate(QUESTION, params)[0].outputs[0].text
    read, calls = StepHandle.read, 0

    def interrupted(self: StepHandle) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return read(self)

    monkeypatch.setattr(StepHandle, "read", interrupted)
    name, free = engine.add_request(QUESTION, params), engine.add_request(QUESTION, GREEDY)
    last: dict[str, Any] = {}
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    last.update(run(engine))
    assert calls > after
    assert last[name].outputs[0].text == expected
    assert last[free].outputs[0].text == ANSWER


def test_aborts_between_steps_lose_no_block(engines: Engines):
    """At any step: the fixture counts the blocks."""
    engine = engines(**LOOPS["overlapped"])
    params = SamplingParams(structured_outputs=FORMS["json"], seed=1, n=2, max_tokens=120)
    for num_steps in range(8):
        names = [engine.add_request(QUESTION, params) for _ in range(2)]
        for _ in range(num_steps):
            engine.step()
        engine.abort(names[0])
        run(engine)


# Invalid combinations


def test_beam_search_with_a_grammar_is_refused():
    with pytest.raises(
        ValueError, match=r"structured_outputs=.* cannot be combined with beam_width=2"
    ):
        SamplingParams(beam_width=2, n=2, structured_outputs=DATE)


def test_structured_outputs_must_be_a_specification():
    with pytest.raises(TypeError, match=r"structured_outputs='\\\\d' must be a StructuredOutputs"):
        SamplingParams(structured_outputs=r"\d")  # pyright: ignore


def test_a_grammar_needs_a_tokenizer(engines: Engines):
    engine = engines(skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        engine.generate([[5]], SamplingParams(structured_outputs=DATE, detokenize=False))


def test_constrained_answer_works_without_detokenizing(engine: Engine):
    params = SamplingParams(structured_outputs=DATE, seed=3, detokenize=False)
    (answer,) = engine.generate([5, 6], params)[0].outputs
    assert engine.tokenizer is not None
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", engine.tokenizer.decode(answer.token_ids))
