"""Masks made in the process, seen in its memory: they are those that are made when asked for."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import llguidance.numpy
import numpy as np
import pytest
from grammar_walks import ENDING, GRAMMARS, TOKENIZER, VOCAB_SIZE, matcher_of

from bench.synthetic_tokenizer import write_tokenizer
from jpaged import StructuredOutputs, Tokenizer
from jpaged.errors import ErrorKind
from jpaged.structured_outputs import bounds
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.mask_worker import AnswerState, MaskMaker, MaskMemory
from jpaged.structured_outputs.matcher import GrammarError, Matcher

WORDS = StructuredOutputs(regex="a(b[c-e]*|a(a[b-d]*|b)|f)|b(a[d-f]*|b|c)")
"""What may follow differs after each token."""
FORMS = [
    WORDS,
    StructuredOutputs(choice=["b"]).behind("x"),
    StructuredOutputs(choice=["b"]).behind("x", "a"),
]
A, B, X = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "abx")
WIDTH = -(-VOCAB_SIZE // 32)


class Made:
    """A maker and its memory; places are given in a row."""

    def __init__(self, grammars: GrammarCompiler = GRAMMARS, width: int = WIDTH):
        self.memory = MaskMemory(20, width)
        self._grammars = grammars
        self.maker = MaskMaker(self.memory, lambda: None, num_cpus=2)
        self._num_places = 0

    def begin(self, form: StructuredOutputs, *tokens: int, ending: frozenset[int] = ENDING) -> int:
        """A new answer's place."""
        self._num_places += 1
        self.memory.states[self._num_places] = AnswerState.PENDING
        self.maker.add_answers([self._num_places], self._grammars.submit(form, ending))
        assert self.settled(self._num_places) == AnswerState.READY
        for token in tokens:
            self.take({self._num_places: token})
            self.settled(self._num_places)
        return self._num_places

    def take(self, tokens: dict[int, int]) -> None:
        """Tokens of answers, by places."""
        self.maker.match_tokens(
            np.array([*tokens], np.int32), np.array([*tokens.values()], np.int32)
        )

    def end(self, place: int) -> None:
        self.maker.remove_answers(np.array([place], np.int32))

    def settled(self, place: int) -> AnswerState:
        """What an answer is, as soon as nothing of it is pending."""
        self.wait(lambda: not AnswerState(self.memory.states[place]).is_pending)
        return AnswerState(self.memory.states[place])

    def wait(self, is_done: Callable[[], bool]) -> None:
        until = time.monotonic() + 20
        while not is_done():
            assert time.monotonic() < until
            time.sleep(0.001)

    def mask(self, place: int) -> list[int]:
        assert self.settled(place) == AnswerState.READY
        return self.memory.masks[place].tolist()

    def error(self, place: int) -> str:
        assert self.settled(place) == AnswerState.FAILED
        return str(self.memory.read_error(place))


@pytest.fixture
def made() -> Made:
    return Made()


def mask_of(form: StructuredOutputs, *tokens: int, ending: frozenset[int] = ENDING) -> list[int]:
    matcher, masks = matcher_of(form, ending), np.zeros((1, WIDTH), np.int32)
    for token in tokens:
        matcher.accept(token)
    assert matcher.fill_mask(masks, 0) is None
    return masks[0].tolist()


@pytest.fixture(params=["together", "suspect", "heavy"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are served together, or after their first token by threads."""
    late = 60.0 if request.param == "together" else -1.0
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", late)
    if request.param == "heavy":
        monkeypatch.setattr("jpaged.structured_outputs.mask_worker._HEAVY_TOKEN_S", -1.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("lane")
def test_they_are_those_that_are_asked_for(made: Made, form: StructuredOutputs):
    place, other = made.begin(form), made.begin(WORDS)
    assert made.mask(place) == mask_of(form)
    seen: list[int] = []
    for token in (A, X, B) if form is not WORDS else (A, B):
        seen.append(token)
        made.take({place: token})
        if form is not WORDS and token == B:
            assert made.settled(place) == AnswerState.STOPPED
        else:
            assert made.mask(place) == mask_of(form, *seen)
        assert made.mask(other) == mask_of(WORDS)
    assert (made.memory.masks[0] == -1).all()


@pytest.mark.parametrize("ending", [frozenset(), frozenset({5})])
@pytest.mark.usefixtures("lane")
def test_an_answer_is_ended_by_its_own_tokens(made: Made, ending: frozenset[int]):
    place = made.begin(WORDS, A, B, ending=ending)
    assert made.mask(place) == mask_of(WORDS, A, B, ending=ending)


def test_all_answers_of_a_step_have_their_own(made: Made):
    form = StructuredOutputs(regex="(a[ab]|b[x])+")
    places = [made.begin(form) for _ in range(5)]
    steps = made.memory.counts[0]
    made.take(dict(zip(places, (A, B, A, B, B), strict=True)))
    assert made.memory.counts[0] == steps + 1
    behind = {A: mask_of(form, A), B: mask_of(form, B)}
    assert [made.mask(it) for it in places] == [behind[it] for it in (A, B, A, B, B)]
    made.take({places[3]: X, places[0]: B})  # in another order, and not all
    assert made.mask(places[3]) == mask_of(form, B, X)
    assert made.mask(places[0]) == mask_of(form, A, B)
    assert made.mask(places[1]) == behind[B]


def test_the_end_is_taken_in_too(made: Made):
    place = made.begin(WORDS, A, A, A)
    made.take({place: min(ENDING)})
    assert made.mask(place) == mask_of(WORDS, A, A, A)


def test_where_no_token_could_be_sampled_none_is_taken_in(made: Made):
    place = made.begin(WORDS)
    made.memory.states[place] = AnswerState.PENDING  # as the engine has it
    made.take({place: -1})
    assert made.mask(place) == mask_of(WORDS)


def test_answers_that_a_process_before_lost_are_not_known(made: Made):
    place = made.begin(WORDS)
    made.take({place + 1: A, place: A})
    assert made.mask(place) == mask_of(WORDS, A)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Matcher], threading.Event]:
    """Matchers whose tokens and masks wait for the event, wherever they are made."""
    fill, note_consumed, goes_on, slow = (
        Matcher.try_fill_mask,
        Matcher.note_consumed,
        threading.Event(),
        list[Matcher](),
    )

    def fill_late(self: Matcher, rows: np.ndarray, row: int) -> Any:
        if self in slow:
            assert goes_on.wait(20)
        return fill(self, rows, row)

    def match_late(self: Matcher, token_id: int, is_allowed: bool) -> Any:
        if self in slow:
            assert goes_on.wait(20)
        return note_consumed(self, token_id, is_allowed)

    monkeypatch.setattr(Matcher, "try_fill_mask", fill_late)
    monkeypatch.setattr(Matcher, "note_consumed", match_late)
    return slow, goes_on


def begin_slow(made: Made, slow: list[Matcher], why: str = "is_suspect") -> int:
    """The place of an answer that a thread serves next, and that waits there."""
    place = made.begin(WORDS)
    answer = made.maker.answers[place]
    setattr(answer, why, True)
    slow.append(answer.matcher)
    return place


@pytest.mark.parametrize("why", ["is_suspect", "is_heavy"])
def test_one_that_is_slow_holds_no_other_up(
    made: Made, held: tuple[list[Matcher], threading.Event], why: str
):
    """Neither while its token is matched nor while its mask is made."""
    slow, goes_on = held
    late, quick = begin_slow(made, slow, why), made.begin(WORDS)
    made.take({late: A, quick: B})
    assert made.mask(quick) == mask_of(WORDS, B)
    made.take({quick: A})
    assert made.mask(quick) == mask_of(WORDS, B, A)
    expected = AnswerState.HEAVY if why == "is_heavy" else AnswerState.PENDING
    assert made.memory.states[late] == expected
    goes_on.set()
    assert made.mask(late) == mask_of(WORDS, A)


TEXT = StructuredOutputs(json={"type": "string"})


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[GrammarCompiler, int, int]:
    """Grammars for 4,096 tokens, nearly all of which may follow in a string; two of these tokens,
    a quote and a letter."""
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder, 4096)
    tokenizer = Tokenizer.from_folder(folder)
    quote, letter = (tokenizer.encode(it, add_special_tokens=False)[0] for it in '"a')
    return GrammarCompiler(tokenizer, 4096, frozenset({1000})), quote, letter


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[Matcher]:
    """Matchers whose masks were made one by one, each as often as that happened."""
    fill, found = Matcher.try_fill_mask, list[Matcher]()

    def noted(self: Matcher, rows: np.ndarray, row: int) -> Any:
        found.append(self)
        return fill(self, rows, row)

    monkeypatch.setattr(Matcher, "try_fill_mask", noted)
    return found


def test_masks_with_many_tokens_are_made_together(
    words: tuple[GrammarCompiler, int, int], alone: list[Matcher], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", 60.0, raising=False)
    grammars, quote, letter = words
    made = Made(grammars, 4096 // 32)
    places = [made.begin(TEXT, quote) for _ in range(3)]
    alone.clear()
    for _ in range(5):
        made.take(dict.fromkeys(places, letter))
        assert [made.settled(it) for it in places] == [AnswerState.READY] * 3
    assert alone == []


def test_slow_masks_are_found_and_made_alone_until_they_are_quick_again(
    words: tuple[GrammarCompiler, int, int], alone: list[Matcher], monkeypatch: pytest.MonkeyPatch
):
    """Made together they are seen to take long, made alone it is seen whose they are."""
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", 0.3)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._SLOW_MASK_S", 0.005)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._HEAVY_MASK_S", 60.0)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._NUM_TIMED_MASKS", 16)
    grammars, quote, letter = words
    made = Made(grammars, 4096 // 32)
    place, is_slow = made.begin(TEXT, quote), True
    together, fill = llguidance.numpy.fill_next_token_bitmask_par, Matcher.try_fill_mask

    def fill_together(*args: Any) -> None:
        time.sleep(0.35 * is_slow)
        together(*args)

    def fill_alone(self: Matcher, rows: np.ndarray, row: int) -> Any:
        until = time.thread_time() + 0.01 * is_slow
        while time.thread_time() < until:
            pass
        return fill(self, rows, row)

    monkeypatch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", fill_together)
    monkeypatch.setattr(Matcher, "try_fill_mask", fill_alone)

    def is_made_alone() -> bool:
        alone.clear()
        made.take({place: letter})
        assert made.settled(place) == AnswerState.READY
        return alone != []

    assert [is_made_alone() for _ in range(3)] == [False, True, True]
    is_slow = False
    assert [is_made_alone() for _ in range(10)] == [True] * 10
    assert not all(is_made_alone() for _ in range(64))


def test_an_ambiguous_grammar_makes_its_answers_heavy(made: Made):
    """And no others that were served with them."""
    ambiguous = made.begin(StructuredOutputs(grammar='start: s\ns: s s s | s s | "a"'))
    plain = StructuredOutputs(regex="a*")
    others = [made.begin(plain) for _ in range(3)]
    for _ in range(110):
        made.take(dict.fromkeys([ambiguous, *others], A))
        for place in (ambiguous, *others):
            assert made.settled(place) == AnswerState.READY
    answers = made.maker.answers
    assert answers[ambiguous].is_heavy
    assert not any(answers[it].is_heavy for it in others)


def test_a_place_is_free_when_no_thread_writes_to_it(
    made: Made, held: tuple[list[Matcher], threading.Event]
):
    slow, goes_on = held
    place, other = begin_slow(made, slow), made.begin(WORDS)
    made.take({place: A})
    made.end(place)
    made.end(other)
    assert made.memory.states[other] == AnswerState.FREE
    assert made.memory.states[place] == AnswerState.PENDING
    goes_on.set()
    assert made.settled(place) == AnswerState.FREE


def test_an_answer_may_be_over_before_its_grammar_is_compiled(made: Made):
    compiled: Future[list[Matcher]] = Future()
    made.memory.states[7] = AnswerState.PENDING
    made.maker.add_answers([7], compiled)
    made.end(7)
    assert made.memory.states[7] == AnswerState.PENDING
    compiled.set_result([matcher_of(WORDS)])
    assert made.settled(7) == AnswerState.FREE


def test_an_answer_leaves_its_lexer_when_it_is_over(made: Made):
    place = made.begin(WORDS)
    grammar = GRAMMARS.compile(WORDS)
    num_spare = grammar.lexers.num_spare
    made.end(place)
    made.wait(lambda: grammar.lexers.num_spare == num_spare + 1)


@pytest.mark.parametrize("form", [WORDS, FORMS[2]])
def test_a_token_that_may_not_follow_ends_its_answer(made: Made, form: StructuredOutputs):
    place, other = made.begin(form), made.begin(WORDS)
    made.take({place: X, other: A})
    assert f"structured_outputs.{form.kind} cannot be enforced" in made.error(place)
    assert made.mask(other) == mask_of(WORDS, A)


class Panic(BaseException):
    """As what Rust raises."""


@pytest.mark.parametrize("kind", [OSError, Panic])
@pytest.mark.parametrize("where", ["tokens", "heavy", "together", "alone"])
def test_what_goes_wrong_ends_the_answers_that_it_concerns(
    made: Made, monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
):
    def fail(*args: Any) -> Any:
        raise kind("odd")

    places = [made.begin(WORDS) for _ in range(2)]
    with monkeypatch.context() as patch:
        if where in ("tokens", "heavy"):
            patch.setattr(Matcher, "note_consumed", fail)
            for place in places:
                made.maker.answers[place].is_heavy = where == "heavy"
        elif where == "together":
            patch.setattr(llguidance.numpy, "fill_next_token_bitmask_par", fail)
        else:
            patch.setattr(Matcher, "try_fill_mask", fail)
            for place in places:
                made.maker.answers[place].is_suspect = True
        made.take(dict.fromkeys(places, A))
        for place in places:
            assert f"structured_outputs.regex cannot be enforced: {kind.__name__}: odd" in (
                made.error(place)
            )
    other = made.begin(WORDS)  # those to come are no worse for it
    made.take({other: A})
    assert made.mask(other) == mask_of(WORDS, A)


def test_one_answer_s_fault_is_its_own(made: Made, monkeypatch: pytest.MonkeyPatch):
    ill, well = made.begin(FORMS[1]), made.begin(WORDS)

    def fail(token: int) -> bytes:
        raise OverflowError("odd")

    monkeypatch.setattr(TOKENIZER, "token_bytes", fail)
    made.take({ill: A, well: A})
    assert "OverflowError: odd" in made.error(ill)
    assert made.mask(well) == mask_of(WORDS, A)


def test_a_grammar_that_cannot_be_compiled_ends_its_answers(made: Made):
    made.memory.states[[3, 4]] = AnswerState.PENDING
    made.maker.add_answers([3, 4], GRAMMARS.submit(StructuredOutputs(regex="(a"), ENDING, 2))
    assert all("structured_outputs.regex cannot be enforced" in made.error(it) for it in (3, 4))


def test_answer_ends_whose_masks_are_slow_one_after_another(
    made: Made, monkeypatch: pytest.MonkeyPatch
):
    """The first mask of an answer counts for nothing, and one slow mask is forgiven."""
    monkeypatch.setattr(bounds, "MAX_MEAN_MASK_S", -1.0)  # each mask is a second too slow, and more
    monkeypatch.setattr(bounds, "MAX_MASK_EXCESS_S", 1.9)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", -1.0)
    place = made.begin(WORDS)
    num_masks = 0
    for token in (A, A, A, B, B, B, B, B):
        made.take({place: token})
        if made.settled(place) == AnswerState.FAILED:
            break
        num_masks += 1
    assert num_masks >= 2
    assert "regex cannot be enforced: its masks took more than" in made.error(place)


def test_an_error_of_any_length_is_told(made: Made):
    for text in ("é" * 5000, "", "two\nlines", "\0" * 3000):
        made.memory.write_error(9, GrammarError("structured_outputs.json", text))
        whole, told = f"structured_outputs.json {text}", str(made.memory.read_error(9))
        assert told == whole[: len(told)]
        assert len(told) >= min(len(text), 250)


def test_an_unforeseen_error_is_no_clients_fault(made: Made):
    made.memory.write_error(9, MemoryError("no more"))
    read_error = made.memory.read_error(9)
    assert read_error.info.kind is ErrorKind.INTERNAL
    assert str(read_error) == "structured_outputs: MemoryError: no more"


def test_answers_that_wait_for_a_new_lexer_hold_no_other_up(
    made: Made, monkeypatch: pytest.MonkeyPatch
):
    renewed, goes_on = GrammarCompiler.rebuild_lexer_inline, threading.Event()

    def renewed_late(self: GrammarCompiler, *args: Any) -> Any:
        assert goes_on.wait(5)
        return renewed(self, *args)

    monkeypatch.setattr(GrammarCompiler, "rebuild_lexer_inline", renewed_late)
    late, other = [made.begin(WORDS) for _ in range(3)], made.begin(WORDS)
    for place in late:
        made.maker.answers[place].matcher.needs_lexer = True
    made.maker.answers[other].is_suspect = True
    made.take({**dict.fromkeys(late, A), other: B})
    until = time.monotonic() + 2
    while made.memory.states[other] == AnswerState.PENDING and time.monotonic() < until:
        time.sleep(0.001)
    state = made.memory.states[other]
    goes_on.set()
    assert state == AnswerState.READY
    assert all(made.mask(it) == mask_of(WORDS, A) for it in late)
