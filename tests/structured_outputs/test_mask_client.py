"""Test the mask worker process through its client: start, steps, failures and end."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_walks import ENDING, EOS, TOKENIZER, VOCAB_SIZE, matcher_of

from jpaged import StructuredOutputs
from jpaged.config import EMBEDDED_MODEL
from jpaged.structured_outputs import mask_client
from jpaged.structured_outputs.mask_client import Answer, MaskWorkerClient
from jpaged.structured_outputs.matcher import GrammarError

FOLDER = Path(EMBEDDED_MODEL)
WORDS = StructuredOutputs(regex="a(b[c-e]*|a(a[b-d]*|b)|f)|b(a[d-f]*|b|c)")
"""A structured-output spec whose set of allowed tokens changes with every token."""
A, B, X = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "abx")


@pytest.fixture(scope="module")
def process() -> MaskWorkerClient:
    """Return one client for all tests, because a worker takes a second to start.

    `max_wait_s` is long, so that tests pass on a busy machine.
    """
    return MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=20.0)


def begin_answers(
    process: MaskWorkerClient, spec: StructuredOutputs = WORDS, count: int = 1
) -> list[Answer]:
    constraint = process.submit(spec, ENDING, count)
    constraint.check()
    return constraint.answers


def mask_of(spec: StructuredOutputs, *tokens: int) -> list[int]:
    matcher, masks = matcher_of(spec), np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    for token in tokens:
        matcher.accept(token)
    assert matcher.fill_mask(masks, 0) is None
    return masks[0].tolist()


def step(
    process: MaskWorkerClient,
    answers: dict[int, Answer],
    tokens: Sequence[int],
    *,
    send_now: bool = True,
) -> np.ndarray:
    """Run one step with answers in the given rows, and return a copy of its masks."""
    items = [(answer, row) for row, answer in answers.items()]
    masks, failed, late = process.gather_masks(items, len(tokens))
    assert (failed, late) == ([], [])
    masks = masks.copy()
    process.request_masks((), lambda: np.array(tokens, np.int32), send_now=send_now)
    assert process.await_tokens_received() == set()
    return masks


@pytest.mark.parametrize("send_now", [True, False])
def test_each_row_gets_the_mask_of_its_answer(process: MaskWorkerClient, send_now: bool):
    """Each step has other answers than the previous step, and answers move to other rows."""
    spec = StructuredOutputs(regex="(a[ab]|b[x])+")
    first, second, third = begin_answers(process, spec, 3)
    start, everything = mask_of(spec), [-1] * -(-VOCAB_SIZE // 32)
    masks = step(process, {0: first, 1: second, 2: third}, [A, B, A], send_now=send_now)
    assert masks.tolist() == [start] * 3
    masks = step(process, {3: first, 0: second}, [X, 5, 5, B], send_now=send_now)
    assert masks.tolist() == [mask_of(spec, B), everything, everything, mask_of(spec, A)]
    (fourth,) = begin_answers(process)
    masks = step(process, {1: second, 0: third, 2: fourth}, [B, A, A], send_now=send_now)
    assert masks.tolist() == [mask_of(spec, A), mask_of(spec, B, X), mask_of(WORDS)]
    masks = step(process, {0: first, 1: fourth, 2: third}, [A, A, A], send_now=send_now)
    assert masks.tolist() == [mask_of(spec, A, B), mask_of(WORDS, A), mask_of(spec, A, B)]


def test_answer_is_reported_as_complete_or_failed_after_its_last_token(process: MaskWorkerClient):
    stopped, failed, other = (
        *begin_answers(process, StructuredOutputs(choice=["a"]), 2),
        *begin_answers(process),
    )
    process.gather_masks([(stopped, 2), (failed, 0), (other, 1)], 3)
    process.request_masks((), lambda: np.array([B, A, A], np.int32), send_now=True)
    assert process.await_tokens_received() == {stopped, failed}
    assert (stopped.is_stopped, stopped.error) == (True, None)
    assert isinstance(failed.error, GrammarError)
    assert "structured_outputs.choice cannot be enforced" in str(failed.error)
    assert not other.is_over
    masks, ((i, error),), _ = process.gather_masks([(other, 0), (failed, 1)], 2)
    assert (i, str(error)) == (1, str(failed.error))
    assert masks[0].tolist() == mask_of(WORDS, A)


def test_tokens_of_skipped_answers_are_not_sent_to_the_mask_worker(process: MaskWorkerClient):
    one, other = begin_answers(process, WORDS, 2)
    process.gather_masks([(one, 0), (other, 1)], 2)
    process.request_masks({0}, lambda: np.array([A, B], np.int32), send_now=True)
    process.await_tokens_received()
    masks, _, _ = process.gather_masks([(one, 0), (other, 1)], 2)
    assert masks.tolist() == [mask_of(WORDS), mask_of(WORDS, B)]


def test_step_skips_answers_whose_masks_are_late(process: MaskWorkerClient):
    (quick,) = begin_answers(process)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    (late,) = process.submit(WORDS, ENDING).answers
    items = [(quick, 1), (late, 0)]
    asked: list[list[int]] = []

    def should_stop_waiting(places: Sequence[int], heavy: Collection[int]) -> bool:
        asked.append([*places, *heavy])
        return len(asked) == 3

    masks, failed, left = process.gather_masks(items, 2, should_stop_waiting)
    assert (failed, left, asked) == ([], [1], [[1]] * 3)
    assert masks[1].tolist() == mask_of(WORDS)
    threading.Timer(0.1, os.kill, (pid, signal.SIGCONT)).start()
    masks, failed, left = process.gather_masks(items, 2)
    assert (failed, left) == ([], [])
    assert masks.tolist() == [mask_of(WORDS)] * 2


@pytest.mark.parametrize("left", [set(), {0}])
def test_failed_step_sends_no_tokens(process: MaskWorkerClient, left: set[int]):
    (answer,) = begin_answers(process)

    def fail() -> np.ndarray:
        raise RuntimeError("the device is lost")

    process.gather_masks([(answer, 0)], 1)
    process.request_masks(left, fail, send_now=True)
    assert process.await_tokens_received() == set()
    step(process, {0: answer}, [-1])
    assert process.gather_masks([(answer, 0)], 1)[0][0].tolist() == mask_of(WORDS)


def test_client_releases_the_arrays_of_a_step(process: MaskWorkerClient):
    (answer,) = begin_answers(process)
    process.gather_masks([(answer, 0)], 1)
    tokens = partial(np.array, [A], np.int32)
    kept = weakref.ref(tokens), weakref.ref(answer)
    process.request_masks((), tokens, send_now=True)
    process.await_tokens_received()
    del tokens, answer
    wait_until(lambda: [it() for it in kept] == [None, None])


def test_entries_of_the_shared_mask_memory_are_reused(process: MaskWorkerClient):
    kept = begin_answers(process, WORDS, 2)
    for _ in range(20):
        answers = begin_answers(process, WORDS, 5)
        step(process, dict(enumerate(answers)), [A] * 5)
        places = {it.memory_index for it in answers}
    del answers
    # `MaskMemory` may still hold entries of answers that have ended.
    assert max(places) <= 2 + 2 * 5
    step(process, dict(enumerate(kept)), [A, B])
    masks, _, _ = process.gather_masks([(it, i) for i, it in enumerate(kept)], 2)
    assert masks.tolist() == [mask_of(WORDS, A), mask_of(WORDS, B)]


def test_answers_above_the_capacity_of_the_mask_process_are_rejected():
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), capacity=4)
    kept = begin_answers(process, WORDS, 2)
    with pytest.raises(RuntimeError, match="structured_outputs: at most 3 answers"):
        process.submit(WORDS, ENDING, 2)
    kept += begin_answers(process)
    del kept
    deadline = time.monotonic() + 20
    while True:
        try:
            process.submit(WORDS, ENDING).check()
            return
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_every_kind_of_structured_output_reaches_the_mask_worker_unchanged(
    process: MaskWorkerClient,
):
    specs = [
        StructuredOutputs(choice=["ä", 'b"\n']),
        StructuredOutputs(json={"type": "integer"}),
        StructuredOutputs(json_object=True),
        StructuredOutputs(grammar='start: "a"+').with_reasoning("</think>", "<think>"),
    ]
    for spec in specs:
        (answer,) = begin_answers(process, spec)
        assert process.gather_masks([(answer, 0)], 1)[0][0].tolist() == mask_of(spec)


# Lifetime of the worker process


def is_gone(pid: int) -> bool:
    """Return whether a process has ended. A zombie process counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_worker_starts_with_the_first_grammar_and_ends_with_its_client():
    made = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}))
    assert made.pid is None
    assert made.await_tokens_received() == set()
    begin_answers(made)
    pid = made.pid
    assert pid is not None
    assert not is_gone(pid)
    del made
    assert is_gone(pid)


PARENT = """
import os, time
from pathlib import Path
from typing import Any
from jpaged import StructuredOutputs
from jpaged.config import EMBEDDED_MODEL
from jpaged.structured_outputs.mask_client import MaskWorkerClient
made = MaskWorkerClient(Path(EMBEDDED_MODEL), {size}, frozenset({{{eos}}}))
made.submit(StructuredOutputs(regex="a"), frozenset()).check()
print(made.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "raise SystemExit(3)", "os._exit(1)"])
def test_worker_ends_when_its_parent_is_killed_or_exits(end: str):
    code = PARENT.format(size=VOCAB_SIZE, eos=EOS, end=end)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None
        pid = int(own.stdout.readline())
        if "sleep" in end:
            assert not is_gone(pid)
            own.kill()
        own.wait(20)
        wait_until(lambda: is_gone(pid))


@pytest.mark.parametrize("when", ["waiting", "between", "compiling"])
def test_killed_worker_fails_its_answers_and_restarts_on_the_next_grammar(
    process: MaskWorkerClient, when: str
):
    answers = begin_answers(process, WORDS, 2)
    items = [(it, i) for i, it in enumerate(answers)]
    step(process, dict(enumerate(answers)), [A, B])
    pid = process.pid
    assert pid is not None
    if when == "waiting":
        process.gather_masks(items, 2)
        os.kill(pid, signal.SIGSTOP)
        process.request_masks((), lambda: np.array([A, B], np.int32), send_now=True)
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        assert process.await_tokens_received() == {*answers}
        assert all("retry" in str(it.error) for it in answers)
    elif when == "compiling":
        os.kill(pid, signal.SIGSTOP)
        asked = process.submit(WORDS, ENDING)
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(GrammarError, match=r"structured_outputs: the process .* retry"):
            asked.check()
    else:
        time.sleep(0.1)  # the client has not read the worker's last report yet
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    after = begin_answers(process)
    assert process.pid != pid
    _, failed, late = process.gather_masks([*items, (after[0], 2)], 3)
    assert ([i for i, _ in failed], late) == ([0, 1], [])
    assert all("structured_outputs" in str(error) for _, error in failed)
    process.request_masks({0, 1}, lambda: np.array([A, A, B], np.int32), send_now=True)
    assert process.await_tokens_received() == set()
    del answers, items, failed
    places = {it.memory_index for it in begin_answers(process, WORDS, 2)}
    assert len(places) == 2
    assert process.gather_masks([(after[0], 0)], 1)[0][0].tolist() == mask_of(WORDS, B)


def test_memory_of_ended_answers_is_reused_after_the_mask_worker_is_killed():
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), capacity=4)
    answers = begin_answers(process, WORDS, 3)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    del answers
    with pytest.raises(RuntimeError, match="at most"):
        process.submit(WORDS, ENDING)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert len({it.memory_index for it in begin_answers(process, WORDS, 3)}) == 3


def test_stopped_worker_delays_one_step_and_resumes_with_correct_masks():
    """One step waits at most `max_wait_s` for the masks of all its rows."""
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=0.1)
    first, second = begin_answers(process, WORDS, 2)
    items = [(first, 0), (second, 1)]
    pid = process.pid
    assert pid is not None

    def no_time(late: Sequence[int], heavy: Collection[int]) -> bool:
        return process.seconds_left == 0

    process.gather_masks(items, 2)
    os.kill(pid, signal.SIGSTOP)
    process.request_masks({1}, lambda: np.array([A, A], np.int32), send_now=True)
    assert process.await_tokens_received() == set()
    assert process.seconds_waited >= 0.1
    for _ in range(3):  # no step gets a mask that was computed before the worker was stopped
        masks, over, late = process.gather_masks(items, 2, no_time)
        assert (over, late) == ([], [0])
        assert masks[1].tolist() == mask_of(WORDS)
        process.request_masks({0, 1}, lambda: np.zeros(2, np.int32), send_now=True)
        assert not process.await_end(first)
        assert process.seconds_waited == 0.0
    os.kill(pid, signal.SIGCONT)
    masks, over, late = process.gather_masks(items, 2)
    assert (over, late) == ([], [])
    assert masks.tolist() == [mask_of(WORDS, A), mask_of(WORDS)]
    assert process.seconds_left > 0


def test_gather_masks_reports_answers_that_ended_late(process: MaskWorkerClient):
    """`await_tokens_received` returns before the worker has matched the tokens."""
    complete, failed = begin_answers(process, StructuredOutputs(choice=["a"]), 2)
    items = [(complete, 0), (failed, 1)]
    process.gather_masks(items, 2)
    process.request_masks((), lambda: np.array([A, B], np.int32), send_now=True)
    process.await_tokens_received()
    _, ((i, none), (k, error)), late = process.gather_masks(items, 2)
    assert (i, none, k, late) == (0, None, 1, [])
    assert complete.is_stopped
    assert isinstance(error, GrammarError)


def test_hanging_worker_is_killed():
    process = MaskWorkerClient(
        FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=0.05, silence_timeout_s=20.0
    )
    (answer,) = begin_answers(process)
    pid = process.pid
    assert pid is not None
    process.silence_timeout_s = 1.2  # the worker has started, so use a short timeout
    process.gather_masks([(answer, 0)], 1)
    os.kill(pid, signal.SIGSTOP)
    process.request_masks((), lambda: np.array([A], np.int32), send_now=True)
    process.await_tokens_received()
    _, ((_, error),), _ = process.gather_masks([(answer, 0)], 1)
    assert re.match("structured_outputs: the process .* has ended.*: retry", str(error))
    assert is_gone(pid)


def test_worker_that_hangs_while_compiling_is_killed():
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), silence_timeout_s=1.5)
    constraint = process.submit(WORDS, ENDING)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    constraint.wait(0.5)
    assert process.pid == pid
    with pytest.raises(GrammarError, match="retry"):
        constraint.check()
    assert is_gone(pid)


def test_worker_is_not_killed_if_the_engine_reads_its_report_late(
    monkeypatch: pytest.MonkeyPatch,
):
    """`wait_and_be_stopped` simulates an engine process that is stopped for longer than
    `silence_timeout_s`. The worker reports in time, but the engine reads the report late."""
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=20.0)
    (answer,) = begin_answers(process)
    process.gather_masks([(answer, 0)], 1)
    process.silence_timeout_s = 1.1
    pid, wait = process.pid, select.select

    def wait_and_be_stopped(socks: Any, *others: Any) -> Any:
        found = wait(socks, [], [], 20)
        time.sleep(1.2)
        return found

    monkeypatch.setattr(select, "select", wait_and_be_stopped)
    process.request_masks((), lambda: np.array([A], np.int32), send_now=False)
    assert process.await_tokens_received() == set()
    assert process.pid == pid


def test_exit_of_a_forked_child_keeps_the_worker_running():
    """When a forked child exits, the finalizers of the client run, but must not end the worker."""
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}))
    begin_answers(process)
    pid = process.pid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about a fork with threads
        fork = os.fork()
    if fork == 0:
        del process
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    begin_answers(process)
    assert process.pid == pid


def test_request_fails_when_the_worker_cannot_start(monkeypatch: pytest.MonkeyPatch):
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(
            RuntimeError, match="structured_outputs: the mask worker could not be started"
        ):
            process.submit(WORDS, ENDING)
        patch.setattr(sys, "executable", "")
        with pytest.raises(RuntimeError, match="structured_outputs needs a Python"):
            process.submit(WORDS, ENDING)
    with monkeypatch.context() as patch:
        patch.setattr(mask_client, "MAX_OPEN_FILES", 3)
        with pytest.raises(RuntimeError, match=r"started: .*has 3 open files"):
            process.submit(WORDS, ENDING)
    begin_answers(process)


def test_request_fails_when_the_worker_finds_no_tokenizer(tmp_path: Path):
    made = MaskWorkerClient(tmp_path / "none", VOCAB_SIZE, frozenset({EOS}))
    with pytest.raises(GrammarError, match="no tokenizer could be loaded from"):
        made.submit(WORDS, ENDING).check()
