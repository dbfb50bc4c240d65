"""The process of matchers and masks, as the engine meets it: started by the first grammar, ended
with the engine, and no loss where it ends by itself."""

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
"""What may follow differs after each token."""
A, B, X = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "abx")


@pytest.fixture(scope="module")
def process() -> MaskWorkerClient:
    """One for all tests, which takes a second to start. Steps wait for it on a busy machine too."""
    return MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=20.0)


def begun(
    process: MaskWorkerClient, form: StructuredOutputs = WORDS, count: int = 1
) -> list[Answer]:
    constraint = process.submit(form, ENDING, count)
    constraint.check()
    return constraint.answers


def mask_of(form: StructuredOutputs, *tokens: int) -> list[int]:
    matcher, masks = matcher_of(form), np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
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
    """Masks of a step with answers in some rows; then its tokens are read. They are copied."""
    items = [(answer, row) for row, answer in answers.items()]
    masks, failed, late = process.gather_masks(items, len(tokens))
    assert (failed, late) == ([], [])
    masks = masks.copy()
    process.request_masks((), lambda: np.array(tokens, np.int32), send_now=send_now)
    assert process.await_tokens_received() == set()
    return masks


@pytest.mark.parametrize("send_now", [True, False])
def test_rows_have_the_masks_of_their_answers(process: MaskWorkerClient, send_now: bool):
    """They may move, and others come in between."""
    form = StructuredOutputs(regex="(a[ab]|b[x])+")
    first, second, third = begun(process, form, 3)
    start, everything = mask_of(form), [-1] * -(-VOCAB_SIZE // 32)
    masks = step(process, {0: first, 1: second, 2: third}, [A, B, A], send_now=send_now)
    assert masks.tolist() == [start] * 3
    masks = step(process, {3: first, 0: second}, [X, 5, 5, B], send_now=send_now)
    assert masks.tolist() == [mask_of(form, B), everything, everything, mask_of(form, A)]
    (fourth,) = begun(process)
    masks = step(process, {1: second, 0: third, 2: fourth}, [B, A, A], send_now=send_now)
    assert masks.tolist() == [mask_of(form, A), mask_of(form, B, X), mask_of(WORDS)]
    masks = step(process, {0: first, 1: fourth, 2: third}, [A, A, A], send_now=send_now)
    assert masks.tolist() == [mask_of(form, A, B), mask_of(WORDS, A), mask_of(form, A, B)]


def test_what_a_token_ends_is_told_when_it_is_read(process: MaskWorkerClient):
    stopped, failed, other = (*begun(process, StructuredOutputs(choice=["a"]), 2), *begun(process))
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


def test_those_that_were_left_take_no_token(process: MaskWorkerClient):
    one, other = begun(process, WORDS, 2)
    process.gather_masks([(one, 0), (other, 1)], 2)
    process.request_masks({0}, lambda: np.array([A, B], np.int32), send_now=True)
    process.await_tokens_received()
    masks, _, _ = process.gather_masks([(one, 0), (other, 1)], 2)
    assert masks.tolist() == [mask_of(WORDS), mask_of(WORDS, B)]


def test_late_ones_are_left_when_the_step_would(process: MaskWorkerClient):
    (quick,) = begun(process)
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
def test_a_step_that_fails_gives_no_tokens(process: MaskWorkerClient, left: set[int]):
    (answer,) = begun(process)

    def fail() -> np.ndarray:
        raise RuntimeError("the device is lost")

    process.gather_masks([(answer, 0)], 1)
    process.request_masks(left, fail, send_now=True)
    assert process.await_tokens_received() == set()
    step(process, {0: answer}, [-1])
    assert process.gather_masks([(answer, 0)], 1)[0][0].tolist() == mask_of(WORDS)


def test_a_step_s_arrays_are_not_kept(process: MaskWorkerClient):
    (answer,) = begun(process)
    process.gather_masks([(answer, 0)], 1)
    tokens = partial(np.array, [A], np.int32)
    kept = weakref.ref(tokens), weakref.ref(answer)
    process.request_masks((), tokens, send_now=True)
    process.await_tokens_received()
    del tokens, answer
    wait_until(lambda: [it() for it in kept] == [None, None])


def test_places_are_used_again(process: MaskWorkerClient):
    kept = begun(process, WORDS, 2)
    for _ in range(20):
        answers = begun(process, WORDS, 5)
        step(process, dict(enumerate(answers)), [A] * 5)
        places = {it.memory_index for it in answers}
    del answers
    assert max(places) <= 2 + 2 * 5  # the process may not have said yet that some are free
    step(process, dict(enumerate(kept)), [A, B])
    masks, _, _ = process.gather_masks([(it, i) for i, it in enumerate(kept)], 2)
    assert masks.tolist() == [mask_of(WORDS, A), mask_of(WORDS, B)]


def test_more_answers_than_there_are_places_are_refused():
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), capacity=4)
    kept = begun(process, WORDS, 2)
    with pytest.raises(RuntimeError, match="structured_outputs: there are 3 answers at most"):
        process.submit(WORDS, ENDING, 2)
    kept += begun(process)
    del kept
    deadline = time.monotonic() + 20
    while True:
        try:
            process.submit(WORDS, ENDING).check()
            return
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_forms_come_through_as_they_are(process: MaskWorkerClient):
    forms = [
        StructuredOutputs(choice=["ä", 'b"\n']),
        StructuredOutputs(json={"type": "integer"}),
        StructuredOutputs(json_object=True),
        StructuredOutputs(grammar='start: "a"+').behind("</think>", "<think>"),
    ]
    for form in forms:
        (answer,) = begun(process, form)
        assert process.gather_masks([(answer, 0)], 1)[0][0].tolist() == mask_of(form)


# Its life


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_none_is_started_before_the_first_grammar_and_it_ends_with_its_owner():
    made = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}))
    assert made.pid is None
    assert made.await_tokens_received() == set()
    begun(made)
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
def test_it_ends_with_a_parent_that_is_killed_or_exits(end: str):
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
def test_where_it_is_killed_answers_fail_and_the_next_starts_it_again(
    process: MaskWorkerClient, when: str
):
    answers = begun(process, WORDS, 2)
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
        time.sleep(0.1)  # what it said last is not read
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    after = begun(process)
    assert process.pid != pid
    _, failed, late = process.gather_masks([*items, (after[0], 2)], 3)
    assert ([i for i, _ in failed], late) == ([0, 1], [])
    assert all("structured_outputs" in str(error) for _, error in failed)
    process.request_masks({0, 1}, lambda: np.array([A, A, B], np.int32), send_now=True)
    assert process.await_tokens_received() == set()
    del answers, items, failed
    places = {it.memory_index for it in begun(process, WORDS, 2)}
    assert len(places) == 2
    assert process.gather_masks([(after[0], 0)], 1)[0][0].tolist() == mask_of(WORDS, B)


def test_places_of_answers_that_it_did_not_hear_of_are_used_again():
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), capacity=4)
    answers = begun(process, WORDS, 3)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    del answers
    with pytest.raises(RuntimeError, match="at most"):
        process.submit(WORDS, ENDING)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert len({it.memory_index for it in begun(process, WORDS, 3)}) == 3


def test_a_stopped_process_is_waited_for_once_and_goes_on_later():
    """Rows wait `max_wait_s` in all, and have their right masks when it has gone on."""
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=0.1)
    first, second = begun(process, WORDS, 2)
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
    for _ in range(3):  # not with the mask that it had
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


def test_an_answer_may_be_found_to_be_over_with_its_masks(process: MaskWorkerClient):
    """Where its token took longer than `await_tokens_received` waits."""
    complete, failed = begun(process, StructuredOutputs(choice=["a"]), 2)
    items = [(complete, 0), (failed, 1)]
    process.gather_masks(items, 2)
    process.request_masks((), lambda: np.array([A, B], np.int32), send_now=True)
    process.await_tokens_received()
    _, ((i, none), (k, error)), late = process.gather_masks(items, 2)
    assert (i, none, k, late) == (0, None, 1, [])
    assert complete.is_stopped
    assert isinstance(error, GrammarError)


def test_one_that_hangs_is_ended():
    process = MaskWorkerClient(
        FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=0.05, silence_timeout_s=20.0
    )
    (answer,) = begun(process)
    pid = process.pid
    assert pid is not None
    process.silence_timeout_s = 1.2  # it was started without hurry
    process.gather_masks([(answer, 0)], 1)
    os.kill(pid, signal.SIGSTOP)
    process.request_masks((), lambda: np.array([A], np.int32), send_now=True)
    process.await_tokens_received()
    _, ((_, error),), _ = process.gather_masks([(answer, 0)], 1)
    assert re.match("structured_outputs: the process .* has ended.*: retry", str(error))
    assert is_gone(pid)


def test_one_that_hangs_while_a_grammar_is_compiled_is_ended():
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


def test_one_that_has_done_its_work_is_not_ended_for_the_time_it_took(
    monkeypatch: pytest.MonkeyPatch,
):
    """As where this process was stopped meanwhile."""
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}), max_wait_s=20.0)
    (answer,) = begun(process)
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


def test_a_fork_that_ends_leaves_the_process_to_its_parent():
    """Its finalizers run there, too."""
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}))
    begun(process)
    pid = process.pid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the fork has no use for
        fork = os.fork()
    if fork == 0:
        del process
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    begun(process)
    assert process.pid == pid


def test_where_no_process_can_be_started_a_request_is_told(monkeypatch: pytest.MonkeyPatch):
    process = MaskWorkerClient(FOLDER, VOCAB_SIZE, frozenset({EOS}))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(RuntimeError, match="structured_outputs: no process could be started"):
            process.submit(WORDS, ENDING)
        patch.setattr(sys, "executable", "")
        with pytest.raises(RuntimeError, match="structured_outputs needs a Python"):
            process.submit(WORDS, ENDING)
    with monkeypatch.context() as patch:
        patch.setattr(mask_client, "MAX_OPEN_FILES", 3)
        with pytest.raises(RuntimeError, match=r"started: .*3 files are open"):
            process.submit(WORDS, ENDING)
    begun(process)


def test_where_the_tokenizer_is_gone_a_request_is_told(tmp_path: Path):
    made = MaskWorkerClient(tmp_path / "none", VOCAB_SIZE, frozenset({EOS}))
    with pytest.raises(GrammarError, match="no tokenizer could be loaded from"):
        made.submit(WORDS, ENDING).check()
