"""Test the masks that the mask worker writes to its memory, without a second process."""

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
from jpaged.structured_outputs.mask_memory import AnswerState, MaskMemory
from jpaged.structured_outputs.mask_worker import MaskMaker
from jpaged.structured_outputs.matcher import GrammarError, Matcher

WORDS = StructuredOutputs(regex="a(b[c-e]*|a(a[b-d]*|b)|f)|b(a[d-f]*|b|c)")
"""A structured-output spec whose set of allowed tokens changes with every token."""
SPECS = [
    WORDS,
    StructuredOutputs(choice=["b"]).with_reasoning("x"),
    StructuredOutputs(choice=["b"]).with_reasoning("x", "a"),
]
A, B, X = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "abx")
WIDTH = -(-VOCAB_SIZE // 32)


class Made:
    """A `MaskMaker` with its memory. Each new answer gets the next entry of the memory."""

    def __init__(self, grammars: GrammarCompiler = GRAMMARS, width: int = WIDTH):
        self.memory = MaskMemory(20, width)
        self._grammars = grammars
        self.maker = MaskMaker(self.memory, lambda: None, num_cpus=2)
        self._num_places = 0

    def begin(self, spec: StructuredOutputs, *tokens: int, ending: frozenset[int] = ENDING) -> int:
        """Start an answer, match `tokens`, and return the answer's index in `self.memory`."""
        self._num_places += 1
        self.memory.states[self._num_places] = AnswerState.PENDING
        self.maker.add_answers([self._num_places], self._grammars.submit(spec, ending))
        assert self.settled(self._num_places) == AnswerState.READY
        for token in tokens:
            self.take({self._num_places: token})
            self.settled(self._num_places)
        return self._num_places

    def take(self, tokens: dict[int, int]) -> None:
        """Pass token `tokens[i]` to the answer with index `i`, for each key `i` of `tokens`."""
        self.maker.match_tokens(
            np.array([*tokens], np.int32), np.array([*tokens.values()], np.int32)
        )

    def end(self, place: int) -> None:
        self.maker.remove_answers(np.array([place], np.int32))

    def settled(self, place: int) -> AnswerState:
        """Wait until the answer has no pending work, and return the answer's state."""
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


def mask_of(spec: StructuredOutputs, *tokens: int, ending: frozenset[int] = ENDING) -> list[int]:
    matcher, masks = matcher_of(spec, ending), np.zeros((1, WIDTH), np.int32)
    for token in tokens:
        matcher.accept(token)
    assert matcher.fill_mask(masks, 0) is None
    return masks[0].tolist()


@pytest.fixture(params=["together", "suspect", "heavy"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the mask worker compute the masks of all answers in one batch, or the mask of each
    answer in a thread."""
    late = 60.0 if request.param == "together" else -1.0
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", late)
    if request.param == "heavy":
        monkeypatch.setattr("jpaged.structured_outputs.mask_worker._HEAVY_TOKEN_S", -1.0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("lane")
def test_worker_masks_equal_masks_computed_directly(made: Made, spec: StructuredOutputs):
    place, other = made.begin(spec), made.begin(WORDS)
    assert made.mask(place) == mask_of(spec)
    seen: list[int] = []
    for token in (A, X, B) if spec is not WORDS else (A, B):
        seen.append(token)
        made.take({place: token})
        if spec is not WORDS and token == B:
            assert made.settled(place) == AnswerState.STOPPED
        else:
            assert made.mask(place) == mask_of(spec, *seen)
        assert made.mask(other) == mask_of(WORDS)
    assert (made.memory.masks[0] == -1).all()


@pytest.mark.parametrize("ending", [frozenset(), frozenset({5})])
@pytest.mark.usefixtures("lane")
def test_mask_allows_the_end_tokens_of_its_answer(made: Made, ending: frozenset[int]):
    place = made.begin(WORDS, A, B, ending=ending)
    assert made.mask(place) == mask_of(WORDS, A, B, ending=ending)


def test_each_answer_of_a_step_gets_its_mask(made: Made):
    spec = StructuredOutputs(regex="(a[ab]|b[x])+")
    places = [made.begin(spec) for _ in range(5)]
    steps = made.memory.counts[0]
    made.take(dict(zip(places, (A, B, A, B, B), strict=True)))
    assert made.memory.counts[0] == steps + 1
    expected = {A: mask_of(spec, A), B: mask_of(spec, B)}
    assert [made.mask(it) for it in places] == [expected[it] for it in (A, B, A, B, B)]
    made.take({places[3]: X, places[0]: B})  # a subset in another order
    assert made.mask(places[3]) == mask_of(spec, B, X)
    assert made.mask(places[0]) == mask_of(spec, A, B)
    assert made.mask(places[1]) == expected[B]


def test_end_token_leaves_the_mask_unchanged(made: Made):
    place = made.begin(WORDS, A, A, A)
    made.take({place: min(ENDING)})
    assert made.mask(place) == mask_of(WORDS, A, A, A)


def test_negative_token_id_leaves_the_mask_unchanged(made: Made):
    place = made.begin(WORDS)
    # Before each step, the engine sets the state of each answer to PENDING.
    made.memory.states[place] = AnswerState.PENDING
    made.take({place: -1})
    assert made.mask(place) == mask_of(WORDS)


def test_tokens_of_answers_that_do_not_exist_are_ignored(made: Made):
    place = made.begin(WORDS)
    made.take({place + 1: A, place: A})
    assert made.mask(place) == mask_of(WORDS, A)


@pytest.fixture
def held_matchers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Matcher], threading.Event]:
    """Return a list and an event: matchers in the list wait until the event is set."""
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
    """Start an answer that blocks at the next token until the test sets an event.

    Args:
        made: Mask maker to which the answer is added.
        slow: List of matchers from the fixture `held_matchers`. The answer's matcher is added.
        why: Reason to serve the answer in a separate thread: "is_suspect" or "is_heavy". The
            attribute of the answer with this name is set to True.

    Returns:
        The index of the answer in `made.memory`.
    """
    place = made.begin(WORDS)
    answer = made.maker.answers[place]
    setattr(answer, why, True)
    slow.append(answer.matcher)
    return place


@pytest.mark.parametrize("why", ["is_suspect", "is_heavy"])
def test_slow_answer_does_not_delay_other_answers(
    made: Made, held_matchers: tuple[list[Matcher], threading.Event], why: str
):
    """Matching the answer's token is slow, and making its mask is slow too."""
    slow, goes_on = held_matchers
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
def string_grammars(tmp_path_factory: pytest.TempPathFactory) -> tuple[GrammarCompiler, int, int]:
    """Return a grammar compiler for 4,096 tokens, and the ids of the tokens `"` and `a`.

    Nearly all of the 4,096 tokens are allowed inside a JSON string.
    """
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder, 4096)
    tokenizer = Tokenizer.from_folder(folder)
    quote, letter = (tokenizer.encode(it, add_special_tokens=False)[0] for it in '"a')
    return GrammarCompiler(tokenizer, 4096, frozenset({1000})), quote, letter


@pytest.fixture
def filled_alone(monkeypatch: pytest.MonkeyPatch) -> list[Matcher]:
    """Return a list to which a matcher is added each time its mask is made outside a batch."""
    fill, found = Matcher.try_fill_mask, list[Matcher]()

    def noted(self: Matcher, rows: np.ndarray, row: int) -> Any:
        found.append(self)
        return fill(self, rows, row)

    monkeypatch.setattr(Matcher, "try_fill_mask", noted)
    return found


def test_masks_with_many_allowed_tokens_are_computed_in_a_batch(
    string_grammars: tuple[GrammarCompiler, int, int],
    filled_alone: list[Matcher],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", 60.0, raising=False)
    grammars, quote, letter = string_grammars
    made = Made(grammars, 4096 // 32)
    places = [made.begin(TEXT, quote) for _ in range(3)]
    filled_alone.clear()
    for _ in range(5):
        made.take(dict.fromkeys(places, letter))
        assert [made.settled(it) for it in places] == [AnswerState.READY] * 3
    assert filled_alone == []


def test_slow_masks_are_computed_one_by_one_until_they_are_fast(
    string_grammars: tuple[GrammarCompiler, int, int],
    filled_alone: list[Matcher],
    monkeypatch: pytest.MonkeyPatch,
):
    """After a slow batch, the worker computes masks one by one, to find the slow mask. After enough
    fast masks, the worker computes batches again."""
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._LATE_CHUNK_S", 0.3)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._SLOW_MASK_S", 0.005)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._HEAVY_MASK_S", 60.0)
    monkeypatch.setattr("jpaged.structured_outputs.mask_worker._NUM_TIMED_MASKS", 16)
    grammars, quote, letter = string_grammars
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
        filled_alone.clear()
        made.take({place: letter})
        assert made.settled(place) == AnswerState.READY
        return filled_alone != []

    assert [is_made_alone() for _ in range(3)] == [False, True, True]
    is_slow = False
    assert [is_made_alone() for _ in range(10)] == [True] * 10
    assert not all(is_made_alone() for _ in range(64))


def test_only_answers_with_an_ambiguous_grammar_count_as_slow(made: Made):
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


def test_mask_memory_of_an_answer_is_freed_only_when_no_thread_writes_to_it(
    made: Made, held_matchers: tuple[list[Matcher], threading.Event]
):
    slow, goes_on = held_matchers
    place, other = begin_slow(made, slow), made.begin(WORDS)
    made.take({place: A})
    made.end(place)
    made.end(other)
    assert made.memory.states[other] == AnswerState.FREE
    assert made.memory.states[place] == AnswerState.PENDING
    goes_on.set()
    assert made.settled(place) == AnswerState.FREE


def test_answer_removed_during_grammar_compilation_frees_mask_memory_afterwards(made: Made):
    compiled: Future[list[Matcher]] = Future()
    made.memory.states[7] = AnswerState.PENDING
    made.maker.add_answers([7], compiled)
    made.end(7)
    assert made.memory.states[7] == AnswerState.PENDING
    compiled.set_result([matcher_of(WORDS)])
    assert made.settled(7) == AnswerState.FREE


def test_removed_answer_releases_its_lexer(made: Made):
    place = made.begin(WORDS)
    grammar = GRAMMARS.compile(WORDS)
    num_spare = grammar.lexers.num_spare
    made.end(place)
    made.wait(lambda: grammar.lexers.num_spare == num_spare + 1)


@pytest.mark.parametrize("spec", [WORDS, SPECS[2]])
def test_disallowed_token_fails_only_its_answer(made: Made, spec: StructuredOutputs):
    place, other = made.begin(spec), made.begin(WORDS)
    made.take({place: X, other: A})
    assert f"structured_outputs.{spec.kind} cannot be enforced" in made.error(place)
    assert made.mask(other) == mask_of(WORDS, A)


class Panic(BaseException):
    """An exception like the ones that Rust code raises."""


@pytest.mark.parametrize("kind", [OSError, Panic])
@pytest.mark.parametrize("where", ["tokens", "heavy", "together", "alone"])
def test_exception_fails_only_the_affected_answers(
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
    other = made.begin(WORDS)  # later answers work
    made.take({other: A})
    assert made.mask(other) == mask_of(WORDS, A)


def test_failure_in_one_answer_leaves_others_unaffected(
    made: Made, monkeypatch: pytest.MonkeyPatch
):
    ill, well = made.begin(SPECS[1]), made.begin(WORDS)

    def fail(token: int) -> bytes:
        raise OverflowError("odd")

    monkeypatch.setattr(TOKENIZER, "token_bytes", fail)
    made.take({ill: A, well: A})
    assert "OverflowError: odd" in made.error(ill)
    assert made.mask(well) == mask_of(WORDS, A)


def test_grammar_that_cannot_be_compiled_fails_its_answers(made: Made):
    made.memory.states[[3, 4]] = AnswerState.PENDING
    made.maker.add_answers([3, 4], GRAMMARS.submit(StructuredOutputs(regex="(a"), ENDING, 2))
    assert all("structured_outputs.regex cannot be enforced" in made.error(it) for it in (3, 4))


def test_answer_with_repeatedly_slow_masks_fails(made: Made, monkeypatch: pytest.MonkeyPatch):
    """The first mask of an answer is not counted, and one slow mask is tolerated."""
    monkeypatch.setattr(bounds, "MAX_MEAN_MASK_S", -1.0)  # every mask takes longer than this limit
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
    assert "regex cannot be enforced: its token masks took more than" in made.error(place)


def test_long_error_text_is_truncated_to_fit_into_the_shared_memory(made: Made):
    for text in ("é" * 5000, "", "two\nlines", "\0" * 3000):
        made.memory.write_error(9, GrammarError("structured_outputs.json", text))
        whole, told = f"structured_outputs.json {text}", str(made.memory.read_error(9))
        assert told == whole[: len(told)]
        assert len(told) >= min(len(text), 250)


def test_unexpected_error_is_reported_as_internal(made: Made):
    made.memory.write_error(9, MemoryError("no more"))
    read_error = made.memory.read_error(9)
    assert read_error.info.kind is ErrorKind.INTERNAL
    assert str(read_error) == "structured_outputs: MemoryError: no more"


def test_answers_waiting_for_a_new_lexer_do_not_delay_others(
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
