"""Test that a lexer is replaced at its state limit, and that the memory of lexers is bounded.

A lexer is llguidance's automaton for the terminals of a grammar. Every new text adds states.
"""

import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_walks import ENDING, EOS, TOKENIZER, VOCAB_SIZE

from jpaged import StructuredOutputs
from jpaged.structured_outputs import bounds
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.mask_memory import AnswerState, MaskMemory
from jpaged.structured_outputs.mask_worker import MaskMaker
from jpaged.structured_outputs.matcher import GrammarError, Matcher

WIDTH = -(-VOCAB_SIZE // 32)
MIB = 2**20


def new_grammars() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))


def limit_states(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setitem(bounds.LLGUIDANCE_LIMITS, "max_lexer_states", number)


def mixed_text(length: int, seed: int = 0, characters: str = "aé漢😀кß中𝄞x ") -> str:
    """Return random characters of one to four bytes in UTF-8, which create many lexer states."""
    return "".join(random.Random(seed).choices(characters, k=length))


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def write(matcher: Matcher, tokens: Iterable[int]) -> None:
    """Add tokens to an answer one by one. Before each token, check that the grammar mask allows
    it."""
    mask = np.zeros((1, WIDTH), np.int32)
    words = mask.view(np.uint32)[0]
    for token in tokens:
        if (error := matcher.fill_mask(mask, 0)) is not None:
            raise error
        assert words[token // 32] >> np.uint32(token % 32) & 1
        matcher.accept(token)


def mask_of(matcher: Matcher) -> list[int]:
    mask = np.zeros((1, WIDTH), np.int32)
    assert matcher.fill_mask(mask, 0) is None
    return mask[0].tolist()


def record(kind: str, most: int) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, "text": {"type": "string", "maxLength": most}}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def test_answers_to_an_any_of_schema_finish_despite_the_lexer_state_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    limit_states(monkeypatch, 2000)
    sizes = {"a": 130, "b": 120, "c": 110, "d": 100}
    spec = StructuredOutputs(json={"anyOf": [record(*item) for item in sizes.items()]})
    grammars = new_grammars()
    for kind, size in sizes.items():
        (matcher,) = grammars.submit(spec, ENDING).result(20)
        text = json.dumps({"kind": kind, "text": mixed_text(size)}, ensure_ascii=False)
        write(matcher, tokens_of(text))
        assert matcher.is_stopped


def test_twenty_answers_to_one_schema_finish_despite_the_lexer_state_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    limit_states(monkeypatch, 1500)
    sizes = {"title": 15, "body": 45, "steps": 50, "notes": 60}
    ticket: dict[str, Any] = {
        "type": "object",
        "properties": {it: {"type": "string", "maxLength": n} for it, n in sizes.items()},
        "required": [*sizes],
        "additionalProperties": False,
    }
    grammars = new_grammars()
    for seed in range(20):
        (matcher,) = grammars.submit(StructuredOutputs(json=ticket), ENDING).result(20)
        rng = random.Random(seed)
        texts = {it: mixed_text(rng.randint(n // 2, n), seed) for it, n in sizes.items()}
        write(matcher, tokens_of(json.dumps(texts, ensure_ascii=False)))
        assert matcher.is_stopped


def test_long_answer_does_not_fail_others_that_share_its_lexer(
    monkeypatch: pytest.MonkeyPatch,
):
    limit_states(monkeypatch, 2000)
    monkeypatch.setattr(bounds, "CHEAP_COMPILE_S", 0.0)  # treat every grammar as slow to compile
    grammars, spec = new_grammars(), StructuredOutputs(regex=r"[^x!]{1,400}!")
    short = [grammars.submit(spec, ENDING).result(20)[0] for _ in range(2)]
    (long,) = grammars.submit(spec, ENDING).result(20)
    for matcher in short:
        write(matcher, tokens_of("ab"))
    write(long, tokens_of(mixed_text(390).replace("x", "y") + "!"))
    assert long.is_stopped
    # The answers share one lexer. It has reached the state limit, so "é" needs a new lexer.
    write(short[0], tokens_of("é!"))
    assert short[0].is_stopped
    short[1].accept(tokens_of("!")[0])
    mask_of(short[1])
    assert short[1].is_stopped
    (later,) = grammars.submit(spec, ENDING).result(20)
    write(later, tokens_of("later!"))
    assert later.is_stopped


def test_answers_that_share_a_lexer_finish_despite_the_lexer_state_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    limit_states(monkeypatch, 2000)
    monkeypatch.setattr(bounds, "CHEAP_COMPILE_S", 0.0)
    grammars = new_grammars()
    spec = StructuredOutputs(regex=r"[^x!]{1,250}!|a[^y!]{1,250}!|b[^z!]{1,250}!")
    matchers = grammars.submit(spec, ENDING, 3).result(20)
    texts = [it + mixed_text(200).replace("x", "w") + "!" for it in ("c", "a", "b")]
    rows = [tokens_of(text) for text in texts]
    for i in range(max(map(len, rows))):
        for matcher, row in zip(matchers, rows, strict=True):
            write(matcher, row[i : i + 1])
    assert all(matcher.is_stopped for matcher in matchers)


def test_json_string_of_4000_characters_is_accepted():
    spec = StructuredOutputs(json={"type": "string", "maxLength": 4000})
    (matcher,) = new_grammars().submit(spec, ENDING).result(20)
    write(matcher, tokens_of(f'"{mixed_text(4000, characters="漢😀中𝄞")}"'))
    assert matcher.is_stopped


def test_masks_are_unchanged_after_a_lexer_is_replaced(monkeypatch: pytest.MonkeyPatch):
    spec = StructuredOutputs(regex=r"(ab|[^x!]{1,2000}c)!").with_reasoning("</think>")
    tokens = tokens_of("free</think>" + mixed_text(150).replace("x", "y") + "c!")
    (plain,) = new_grammars().submit(spec, ENDING).result(20)
    limit_states(monkeypatch, 700)
    # llguidance limits the work of a lexer in units of "fuel". 1500 units are enough to compile
    # the grammar, but too few to process all tokens of the answer again.
    monkeypatch.setitem(bounds.LLGUIDANCE_LIMITS, "initial_lexer_fuel", 1500)
    (replaced,) = new_grammars().submit(spec, ENDING).result(20)
    start = replaced.inner
    for token in tokens:
        assert mask_of(plain) == mask_of(replaced)
        plain.accept(token)
        replaced.accept(token)
    assert plain.is_stopped
    assert replaced.is_stopped
    assert replaced.inner is not start


def test_answer_that_needs_too_many_lexer_states_fails(monkeypatch: pytest.MonkeyPatch):
    limit_states(monkeypatch, 300)
    spec = StructuredOutputs(regex=r"[^x!]{1,400}!")
    (matcher,) = new_grammars().submit(spec, ENDING).result(20)
    with pytest.raises(GrammarError, match=r"structured_outputs\.regex .* too many states: 300"):
        write(matcher, tokens_of(mixed_text(390).replace("x", "y")))


class Maker:
    """A `MaskMaker` that makes the token masks of one request.

    Entry 1 of the `MaskMemory` holds the request's `AnswerState` and token mask.
    """

    def __init__(self, spec: StructuredOutputs, ending: frozenset[int]):
        self.memory = MaskMemory(2, WIDTH)
        self.maker = MaskMaker(self.memory, lambda: None, num_cpus=2)
        self.memory.states[1] = AnswerState.PENDING
        self.maker.add_answers([1], new_grammars().submit(spec, ending))

    def settled(self) -> AnswerState:
        until = time.monotonic() + 20
        while self.memory.states[1] == AnswerState.PENDING:
            assert time.monotonic() < until
            time.sleep(0.0002)
        return AnswerState(self.memory.states[1])

    def allows(self, token: int) -> bool:
        return bool(self.memory.masks[1].view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)

    def take(self, token: int) -> None:
        self.maker.match_tokens(np.array([1], np.int32), np.array([token], np.int32))


@pytest.mark.parametrize("num_chars", range(62, 68))
@pytest.mark.parametrize("ending", [ENDING, frozenset[int]()], ids=["ending", "no end"])
def test_mask_worker_replaces_a_lexer_that_reaches_the_state_limit(
    monkeypatch: pytest.MonkeyPatch, num_chars: int, ending: frozenset[int]
):
    limit_states(monkeypatch, 500)
    made = Maker(StructuredOutputs(regex=r"[^x!]{1,80}!"), ending)
    for token in tokens_of(mixed_text(num_chars).replace("x", "y") + "!"):
        assert made.settled() == AnswerState.READY
        assert made.allows(token)
        made.take(token)
    # The tokens now match the whole regex, so the answer's state is usually STOPPED. If "!" brought
    # the lexer to its maximum number of states, the state is READY, and the mask allows EOS.
    if made.settled() == AnswerState.READY:
        assert made.allows(EOS)
        made.take(EOS)
    assert made.settled() == (
        AnswerState.READY if ending and made.allows(EOS) else AnswerState.STOPPED
    )


def busy_answers(grammars: GrammarCompiler, count: int, length: int) -> Sequence[Matcher]:
    """Return `count` unfinished answers with different JSON schemas.

    An answer has an opening quotation mark and `length` characters, but no closing quotation mark.
    The function adds one token to each answer in turn.
    """
    found: list[Matcher] = []
    for i in range(count):
        spec = StructuredOutputs(json={"type": "string", "maxLength": length + 1 + i})
        found += grammars.submit(spec, ENDING).result(20)
    for token in tokens_of('"' + mixed_text(length)):
        for matcher in found:
            write(matcher, [token])
    return found


def in_a_new_process(test: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a function of this module in a new process, and return the function's result."""
    code = f"import json\nimport {__name__} as it\nprint(json.dumps(it.{test.__name__}()))"
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=around, capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE


def measured_growth() -> dict[str, int]:
    """Return by how many bytes the memory of the process has grown at four points.

    Returns:
        bounded: With eight unfinished answers, and a limit of 10 MiB for all lexers.
        unbounded: With eight unfinished answers, and a limit of 512 MiB for all lexers.
        kept: One second after the eight answers have finished. The matchers still exist.
        deleted: After the matchers are deleted.
    """
    bounds.LEXER_IDLE_S = 0.5
    grammars = new_grammars()
    grammars.try_random_answer(StructuredOutputs(choice=["a"]), ENDING)
    growth, before = dict[str, int](), resident_bytes()
    for name, most in (("bounded", 10 * MIB), ("unbounded", 512 * MIB)):
        bounds.MAX_LEXER_BYTES = most
        answers = busy_answers(grammars, 8, 500)
        growth[name] = resident_bytes() - before
        for matcher in answers:
            write(matcher, tokens_of('"'))
        if not all(matcher.is_stopped for matcher in answers):
            raise RuntimeError("an answer does not end")
    until = time.monotonic() + 10
    time.sleep(1)
    growth["kept"] = resident_bytes() - before
    del answers, matcher
    while resident_bytes() - before > growth["unbounded"] / 4 and time.monotonic() < until:
        time.sleep(0.05)
    return growth | {"deleted": resident_bytes() - before}


def test_lexer_memory_is_bounded_and_released():
    growth = in_a_new_process(measured_growth)
    assert growth["bounded"] < 14 * MIB
    assert growth["unbounded"] > 16 * MIB
    assert growth["kept"] > 16 * MIB  # a matcher keeps its lexer until the matcher is deleted
    assert growth["deleted"] < 6 * MIB


def test_answer_above_the_lexer_memory_limit_fails_and_the_error_says_retry(
    monkeypatch: pytest.MonkeyPatch,
):
    # This negative limit is always exceeded.
    monkeypatch.setattr(bounds, "MAX_LEXER_BYTES", -(2**40))
    grammars = new_grammars()
    with pytest.raises(GrammarError, match=r"^structured_outputs: .* MiB .*: retry$"):
        busy_answers(grammars, 1, 100)
    monkeypatch.setattr(bounds, "MAX_LEXER_BYTES", 2**40)
    short = StructuredOutputs(json={"type": "string", "maxLength": 1000})
    (matcher,) = grammars.submit(short, ENDING).result(20)
    write(matcher, tokens_of('"short"'))
    assert matcher.is_stopped


def test_replacing_a_lexer_does_not_block_other_threads():
    spec = StructuredOutputs(grammar='start: s\ns: s s s | s s | "a"')
    (matcher,) = new_grammars().submit(spec, ENDING).result(20)
    for token in tokens_of("a") * 110:
        matcher.accept(token)
    turns, is_over = [time.perf_counter()], threading.Event()

    def take_turns():
        while not is_over.wait(0.0005):
            turns.append(time.perf_counter())

    other = threading.Thread(target=take_turns, daemon=True)
    other.start()
    matcher.needs_lexer = True
    mask_of(matcher)
    is_over.set()
    other.join()
    turns.append(time.perf_counter())
    assert max(np.diff(turns)) < (turns[-1] - turns[0]) / 2


def count_compiled(
    monkeypatch: pytest.MonkeyPatch, grammars: GrammarCompiler, spec: Any
) -> list[None]:
    """Return a list that grows by one item for each lexer compiled from now on."""
    lexers, compiled = grammars.compile(spec).lexers, list[None]()
    compile_matcher = lexers.compile_matcher
    monkeypatch.setattr(
        lexers, "compile_matcher", lambda: (compiled.append(None), compile_matcher())[1]
    )
    return compiled


@pytest.mark.parametrize("is_short", [False, True])
def test_answers_share_one_new_lexer_if_the_grammar_compiles_slowly(
    monkeypatch: pytest.MonkeyPatch, is_short: bool
):
    monkeypatch.setattr(
        "jpaged.structured_outputs.lexers._RESIDENT_INTERVAL_S", 0.0
    )  # measure memory each time
    monkeypatch.setattr(bounds, "CHEAP_COMPILE_S", 0.0)
    grammars, spec = new_grammars(), StructuredOutputs(regex="a*")
    compiled = count_compiled(monkeypatch, grammars, spec)
    matchers = grammars.submit(spec, ENDING, 4).result(20)
    if is_short:
        monkeypatch.setattr(bounds, "MAX_LEXER_BYTES", -(2**40))
    for _ in range(3):
        for matcher in matchers:
            write(matcher, tokens_of("a") * 70)
            matcher.needs_lexer |= not is_short  # let the matcher replace its lexer
    for matcher in matchers:
        mask_of(matcher)
    assert len(compiled) == (0 if is_short else 3)


def test_slow_recompilation_does_not_delay_other_answers(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(bounds, "CHEAP_COMPILE_S", 0.0)
    grammars, goes_on = new_grammars(), threading.Event()
    slow, other = StructuredOutputs(regex="a*"), StructuredOutputs(regex="b*")
    lexers = grammars.compile(slow).lexers
    grammars.compile(other)
    lexer, use = lexers.acquire()
    lexers.release(lexer, use, [])
    lexers.note_broken(lexer, 0)
    compile_matcher = lexers.compile_matcher
    monkeypatch.setattr(lexers, "compile_matcher", lambda: (goes_on.wait(5), compile_matcher())[1])
    compiling = grammars.submit(slow, ENDING)
    try:
        assert len(grammars.submit(other, ENDING).result(2)) == 1
        leaving = threading.Thread(target=lexers.retire, args=(lexer,), daemon=True)
        leaving.start()
        leaving.join(2)
        assert not leaving.is_alive()
        assert not compiling.done()
    finally:
        goes_on.set()
    assert len(compiling.result(5)) == 1
