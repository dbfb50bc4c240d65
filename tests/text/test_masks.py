"""Masks that are made ahead, in threads, are those that are made when they are asked for."""

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grammar_walks import ENDING, GRAMMARS, MASKS, TOKENIZER, matcher_of

from jpaged import StructuredOutputs
from jpaged.structured_outputs import bounds
from jpaged.text.grammar import GrammarError, Matcher
from jpaged.text.masks import MaskMaker, Patience

WORDS = StructuredOutputs(regex="[a-f]{3,12}")
FORMS = [
    WORDS,
    StructuredOutputs(choice=["b"]).behind("x"),
    StructuredOutputs(choice=["b"]).behind("x", "a"),
]
A, B, X = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "abx")


def wait(late: Sequence[int]) -> bool:
    return False


def begun(form: StructuredOutputs, *tokens: int) -> Matcher:
    matcher = matcher_of(form)
    for token in tokens:
        matcher.accept(token)
    return matcher


def mask_of(form: StructuredOutputs, *tokens: int) -> list[int]:
    masks, failed, _ = MASKS.gather([(begun(form, *tokens), 0)], 1, None)
    assert failed == []
    return masks[0].tolist()


def start(maker: MaskMaker, matchers: Sequence[Matcher], tokens: Sequence[int]) -> None:
    """Each in the row of its place; then the engine reads the tokens."""
    items = [(it, row) for row, it in enumerate(matchers)]
    maker.start(items, len(tokens), lambda: np.array(tokens, np.int32))
    maker.await_taken()
    for matcher, token in zip(matchers, tokens, strict=True):
        matcher.accept(token)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_wide", [False, True])
def test_they_are_made_ahead(form: StructuredOutputs, is_wide: bool):
    maker, matcher, other = MaskMaker(), begun(form), begun(WORDS)
    matcher.is_wide = is_wide
    seen: list[int] = []
    for token in (A, X, B):
        if form is WORDS and token == X:
            continue
        seen.append(token)
        start(maker, [matcher], [token])
        masks, failed, late = maker.gather([(matcher, 0), (other, 2)], 3, wait)
        assert (failed, late) == ([], [])
        assert masks[0].tolist() == mask_of(form, *seen)
        assert (masks[1] == -1).all()
        assert masks[2].tolist() == mask_of(WORDS)


def test_the_end_is_taken_in_too():
    maker, matcher = MaskMaker(), begun(WORDS, A, A, A)
    start(maker, [matcher], [min(ENDING)])
    assert maker.gather([(matcher, 0)], 1, wait)[0][0].tolist() == mask_of(WORDS, A, A, A)


def test_rows_may_move_and_go():
    form = StructuredOutputs(regex="(a[ab]|b[x])+")
    maker, matchers = MaskMaker(), [begun(form) for _ in range(3)]
    first, second, _ = matchers
    behind = {A: mask_of(form, A), B: mask_of(form, B)}
    start(maker, matchers, [A, B, A])
    masks, _, _ = maker.gather([(second, 0), (first, 3)], 4, wait)  # another number of rows
    assert (masks[0].tolist(), masks[3].tolist()) == (behind[B], behind[A])
    assert (masks[1:3] == -1).all()
    start(maker, matchers[:2], [B, X])
    maker.gather([(first, 0), (second, 1)], 2, wait)
    start(maker, matchers[:2], [A, B])
    masks, _, _ = maker.gather([(second, 0), (first, 1)], 2, wait)  # each in another row
    assert masks.tolist() == [behind[B], behind[A]]
    start(maker, matchers[:2], [B, X])
    masks, _, _ = maker.gather([(second, 1)], 2, wait)  # one is gone
    assert masks[1].tolist() == mask_of(form, B, X)
    assert (masks[0] == -1).all()


def test_one_that_is_late_is_left_and_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    maker, slow, quick = MaskMaker(), begun(WORDS), begun(WORDS)
    slow.is_wide = True
    widen, goes_on = Matcher.widen, threading.Event()

    def widen_late(self: Matcher, mask: Any) -> Any:
        if self is slow:
            assert goes_on.wait(10)
        return widen(self, mask)

    monkeypatch.setattr(Matcher, "widen", widen_late)
    start(maker, [slow, quick], [A, B])
    masks, failed, late = maker.gather([(slow, 0), (quick, 1)], 2, lambda late: late == [0])
    assert (failed, late) == ([], [0])
    assert masks[1].tolist() == mask_of(WORDS, B)
    start(maker, [quick], [A])  # in another row than before
    goes_on.set()
    masks, failed, late = maker.gather([(slow, 0), (quick, 1)], 2, wait)
    assert (failed, late) == ([], [])
    assert masks[0].tolist() == mask_of(WORDS, A)
    assert masks[1].tolist() == mask_of(WORDS, B, A)


def test_what_goes_wrong_ahead_is_told_when_the_token_is_read():
    maker, matcher, other = MaskMaker(), begun(WORDS), begun(WORDS)
    maker.start([(matcher, 0), (other, 1)], 2, lambda: np.array([X, A]))
    maker.await_taken()
    with pytest.raises(GrammarError, match="regex"):
        matcher.accept(X)
    with pytest.raises(RuntimeError, match="was read, and a mask made behind"):
        other.accept(B)


class Panic(BaseException):
    """As what Rust raises."""


@pytest.mark.parametrize("kind", [OSError, Panic])
@pytest.mark.parametrize("where", ["tokens", "masks"])
def test_nothing_waits_for_masks_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
):
    maker, matchers = MaskMaker(), [begun(WORDS), begun(WORDS)]
    matchers[0].is_wide = True

    def fail(*args: Any) -> Any:
        raise kind("no device")

    if where == "masks":
        monkeypatch.setattr(Matcher, "widen", fail)
    maker.start(
        [(it, i) for i, it in enumerate(matchers)],
        2,
        fail if where == "tokens" else lambda: np.array([A, A]),
    )
    maker.await_taken()
    _, failed, _ = maker.gather([(it, i) for i, it in enumerate(matchers)], 2, wait)
    assert [i for i, _ in failed] == [0, 1]
    assert all("no mask could be made: no device" in str(error) for _, error in failed)


def test_one_answer_s_fault_is_its_own(monkeypatch: pytest.MonkeyPatch):
    maker, ill, well = MaskMaker(), begun(FORMS[1]), begun(WORDS)

    def fail(token: int) -> bytes:
        raise OverflowError("odd")

    monkeypatch.setattr(TOKENIZER, "bytes_of", fail)
    maker.start([(ill, 0), (well, 1)], 2, lambda: np.array([A, A]))
    maker.await_taken()
    with pytest.raises(OverflowError, match="odd"):
        ill.accept(A)
    well.accept(A)
    masks, failed, _ = maker.gather([(well, 1)], 2, None)
    assert failed == []
    assert masks[1].tolist() == mask_of(WORDS, A)


def test_a_mask_that_takes_too_long_ends_its_answer_also_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is made by itself in the step after the one that was slow, whatever the engine did in
    between."""
    maker, slow, quick = MaskMaker(), begun(WORDS), begun(WORDS)
    monkeypatch.setattr(bounds, "MASK_SECONDS", 0.0)
    start(maker, [slow, quick], [A, A])
    while not (slow.mask_ahead.is_made and quick.mask_ahead.is_made):
        time.sleep(0.001)
    assert maker.gather([(slow, 0), (quick, 1)], 2, wait)[1] == []
    start(maker, [slow, quick], [B, B])
    _, failed, _ = maker.gather([(slow, 0), (quick, 1)], 2, wait)
    assert [i for i, _ in failed] == [0, 1]
    assert all("a token took more than 0 ms" in str(error) for _, error in failed)


def test_masks_are_made_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch):
    """A thread may generate when the main thread has ended: pools take no work then."""
    maker, matcher = MaskMaker(), begun(WORDS)

    def refuse(*args: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", refuse)
    for token, is_wide in ((A, False), (B, True)):
        matcher.is_wide = is_wide
        start(maker, [matcher], [token])
        masks, failed, _ = maker.gather([(matcher, 0)], 1, wait)
        assert failed == []
    assert masks[0].tolist() == mask_of(WORDS, A, B)


def test_where_no_token_could_be_sampled_none_is_taken_in():
    maker, matcher = MaskMaker(), begun(WORDS)
    maker.start([(matcher, 0)], 1, lambda: np.array([-1]))
    maker.await_taken()
    assert maker.gather([(matcher, 0)], 1, wait)[0][0].tolist() == mask_of(WORDS)


def test_an_answer_leaves_its_lexer_when_it_is_over():
    maker, grammar = MaskMaker(), GRAMMARS.compile(WORDS)
    matcher = grammar.matcher(ENDING)
    start(maker, [matcher], [A])
    job, num_spare = matcher.mask_ahead, grammar.lexers.num_spare
    while not job.is_made:
        time.sleep(0.001)
    gc.disable()
    del matcher
    gc.enable()
    assert grammar.lexers.num_spare == num_spare + 1


def test_a_step_waits_as_long_as_that_costs_no_more_than_leaving(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    patience = Patience()
    now += 0.004
    patience.note_step()  # the step before took 4 ms
    patience.begin(0.0)
    assert not patience.is_over(0.125)
    now += 0.0006  # one row in eight: half a millisecond
    assert patience.is_over(0.125)
    assert not patience.is_over(0.25)
    now += 0.0005
    assert patience.is_over(0.25)
    patience.begin(0.002)  # the host has waited for the device
    now += 0.0021
    assert not patience.is_over(0.125)
    now += 0.0005
    assert patience.is_over(0.125)
    now += 60
    assert not patience.is_over(0.3)  # more than a quarter
    patience.note_step()
    patience.begin(0.0)
    now += 0.26 * 0.05  # a pause between steps is none
    assert patience.is_over(0.25)
