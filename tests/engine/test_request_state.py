"""Test the outputs and logprobs that the state of a request makes of emitted tokens."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from jpaged.core.beam import BeamSearch, Hypothesis
from jpaged.core.plan import EmittedToken, ScheduledSequence
from jpaged.core.request import FinishReason, Request, RequestStatus, StopCriteria
from jpaged.engine.request_state import RequestState, TokenLogprobs
from jpaged.outputs import Logprob
from jpaged.runtime.results import TargetLogprobs, TokenScores, scored_positions
from jpaged.sampling_params import SamplingParams

EOS = 1


class LetterTokenizer:
    """Tokens are ASCII codes; tokens below 32 are special."""

    special_token_ids = frozenset(range(32))
    token_bytes = None

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        ids = [i for i in token_ids if not (skip_special_tokens and i < 32)]
        return "".join(f"<{i}>" if i < 32 else chr(i) for i in ids)


def make(params: SamplingParams, tokenizer: Any = None) -> RequestState:
    beam = None if params.beam_width is None else BeamSearch(params.beam_width)
    tokenizer = LetterTokenizer() if tokenizer is None else tokenizer
    request = Request.from_prompt(
        "r",
        [97, 98],
        StopCriteria(max_tokens=8),
        seq_id_counter=itertools.count(),
        num_samples=params.num_samples if beam is None else 1,
        beam=beam,
    )
    return RequestState(request, params, "ab", [97, 98], tokenizer, frozenset({EOS}))


KEPT_MASS = 0.75


def pack(facts: tuple[int, float, int], *top: tuple[int, float]) -> TokenScores:
    """Pack a token, its logprob and its rank, and then the best tokens and their logprobs."""
    token_id, logprob, rank = facts
    row = np.array([token_id, 0, rank, 0, *(x for pair in top for x in pair)]).astype(np.int32)
    floats = np.array([logprob, KEPT_MASS, *(x for _, x in top)], "f4")
    row[[1, 3, *range(5, len(row), 2)]] = floats.view("i4")
    return TokenScores(row[None])


def emit(
    state: RequestState, index: int, token_id: int, logprob: float = -1.0, reason: Any = None
) -> bool:
    sequence = state.request.sequences[index]
    sequence.token_ids.append(token_id)
    sequence.finish_reason = reason
    scores = pack((token_id, logprob, 2), (90, -0.5), (token_id, logprob))
    return state.accept_token(EmittedToken(sequence, state.request, token_id, reason), scores, 0)


def test_scores_of_recomputed_chunks_are_recorded_once():
    """A request that is preempted between two chunks computes the first chunk again."""
    prompt, params = [*range(10)], SamplingParams(max_tokens=1)
    request = Request.from_prompt(
        "r", prompt, StopCriteria(1), seq_id_counter=itertools.count(), first_scored_position=3
    )
    state = RequestState(request, params, None, prompt, None, frozenset({EOS}))
    [sequence] = request.sequences
    for start, size in [(0, 3), (3, 2), (0, 4), (4, 6)]:
        item = ScheduledSequence(sequence, start, size, is_sampled=False)
        found = [[-position, 0] for position in scored_positions(item)]
        state.accept_prompt_logprobs(item, TargetLogprobs(np.array(found, np.float32)))
    score = state.completion_score()
    assert (score.token_ids, score.logprobs) == (prompt[3:], [-3, -4, -5, -6, -7, -8, -9])


def test_each_sample_has_separate_text_and_logprobs_and_finish_reason():
    state = make(SamplingParams(n=2, logprobs=1, stop="XY"))
    assert not emit(state, 0, ord("A"), -0.25)
    assert not emit(state, 1, ord("X"), -1.0)
    assert emit(state, 1, ord("Y"), -2.0)
    state.request.sequences[1].finish_reason = FinishReason.STOP  # as the engine does
    assert not emit(state, 0, ord("X"), -0.5)
    first, second = state.output().outputs
    assert (first.text, first.finish_reason, first.stop_reason) == ("A", None, None)
    assert (second.text, second.finish_reason, second.stop_reason) == ("", "stop", "XY")
    assert (first.cumulative_logprob, second.cumulative_logprob) == (-0.75, -3.0)
    assert [list(found) for found in first.logprobs or ()] == [[65, 90], [88, 90]]
    assert not emit(state, 0, EOS, -0.5, FinishReason.STOP)
    first, second = state.output().outputs
    # While the answer continued, "X" was held back, because it could begin the stop string "XY".
    assert (first.text, first.stop_reason) == ("AX", None)
    assert first.token_ids == [65, 88, EOS]


def test_ranked_output_lists_the_best_answers_first():
    state = make(SamplingParams(n=2, best_of=3))
    for index, logprob in enumerate((-2.0, -1.0, -3.0)):
        emit(state, index, ord("A") + index, logprob)
    found = state.output().outputs
    ranked = [(o.index, o.text, o.cumulative_logprob) for o in found]
    assert ranked == [(0, "B", -1.0), (1, "A", -2.0)]
    assert [o.logprobs for o in found] == [None, None]
    emit(state, 1, ord("Z"), -9.0)
    assert [o.text for o in state.output().outputs] == ["A", "C"]


def test_cumulative_logprob_is_none_by_default():
    state = make(SamplingParams(n=2))
    emit(state, 0, ord("A"))
    assert [o.cumulative_logprob for o in state.output().outputs] == [None, None]


def test_deltas_contain_each_token_once_and_the_finish_reason():
    state = make(SamplingParams(n=2))
    first, second = state.samples
    assert not first.has_update
    emit(state, 0, ord("A"))
    emit(state, 0, 40, reason=FinishReason.STOP)
    assert first.has_update
    assert not second.has_update
    delta = first.take_delta("r")
    assert (delta.text, delta.token_ids, delta.index) == ("A", (65, 40), 0)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", 40)
    emit(state, 1, ord("B"))
    assert second.take_delta("r").index == 1
    assert not second.has_update


def search(n: int = 2, reason: FinishReason | None = None) -> RequestState:
    """Return the state of a beam search with three hypotheses; with a `reason`, it is finished."""
    state = make(SamplingParams(n=n, beam_width=3))
    assert state.request.beam is not None
    state.request.beam.hypotheses += [
        Hypothesis((65, 66, EOS), -0.5, -0.25, is_ended=True),
        Hypothesis((65, 40), -1.0, -0.5, is_ended=True),
        Hypothesis((67, 68, 69), -3.0, -1.0, is_ended=False),
    ]
    if reason is not None:
        state.request.status, state.request.finish_reason = RequestStatus.FINISHED, reason
    return state


def test_unfinished_or_aborted_beam_search_has_no_answers():
    assert not search().samples
    assert search().output().outputs == []
    assert search(reason=FinishReason.ABORT).output().outputs == []


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_finished_beam_search_returns_its_best_answers(reason: FinishReason):
    state = search(n=3, reason=reason)
    state.finish()
    for _ in range(2):
        output = state.output()
        assert output.finished
        assert [(o.index, o.text, o.score) for o in output.outputs] == [
            (0, "AB", -0.25),
            (1, "A", -0.5),
            (2, "CDE", -1.0),
        ]
        assert [o.finish_reason for o in output.outputs] == ["stop", "stop", "length"]
        assert [o.stop_reason for o in output.outputs] == [None, 40, None]
        assert [o.cumulative_logprob for o in output.outputs] == [-0.5, -1.0, -3.0]
    assert [o.text for o in search(n=1, reason=reason).output().outputs] == ["AB"]


class CountingTokenizer(LetterTokenizer):
    def __init__(self) -> None:
        self.decoded: list[int] = []

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        self.decoded += token_ids
        return super().decode(token_ids, skip_special_tokens)


def test_logprobs_decode_their_tokens_lazily_and_once():
    rows = [pack((65, -0.5, 3), (66, -0.25), (65, -0.5)), pack((66, -1.0, 1), (66, -1.0))]
    tokenizer: Any = CountingTokenizer()
    whole = [TokenLogprobs(row.packed, tokenizer) for row in rows]
    assert list(map(len, whole)) == [1, 1]
    assert tokenizer.decoded == []
    assert whole[0] == [{65: Logprob(-0.5, 3, "A", KEPT_MASS), 66: Logprob(-0.25, 1, "B")}]
    assert [*whole[0][0]] == [65, 66]  # the emitted token comes first
    assert whole[1] == [{66: Logprob(-1.0, 1, "B", KEPT_MASS)}]
    assert whole[0][0] is whole[0][-1] is next(iter(whole[0]))
    assert whole[0][1:] == []
    assert sorted(tokenizer.decoded) == [65, 66, 66]
    assert repr(whole[1]) == repr([{66: Logprob(-1.0, 1, "B", KEPT_MASS)}])


def test_each_output_detokenizes_only_the_logprobs_of_new_tokens():
    tokenizer = CountingTokenizer()
    state = make(SamplingParams(logprobs=1, detokenize=False), tokenizer)
    for _ in range(20):
        emit(state, 0, ord("A"), -0.25)
        (answer,) = state.output().outputs
        assert answer.logprobs is not None
        assert answer.logprobs[-1][65].logprob == -0.25
    assert len(tokenizer.decoded) == 2 * 20  # the token and one alternative


def test_logprobs_can_be_copied_and_pickled_as_a_list():
    scores = TokenLogprobs(pack((65, -0.5, 3), (66, -0.25)).packed, CountingTokenizer())  # type: ignore
    plain = [{65: Logprob(-0.5, 3, "A", KEPT_MASS), 66: Logprob(-0.25, 1, "B")}]
    for copied in (copy.copy(scores), copy.deepcopy(scores), scores + plain[:0]):
        assert type(copied) is list
        assert copied == plain


def test_earlier_output_does_not_change_as_the_answer_grows():
    state = make(SamplingParams(logprobs=1))
    emit(state, 0, ord("A"), -0.25)
    (before,) = state.output().outputs
    emit(state, 0, ord("C"), -0.75)
    (after,) = state.output().outputs
    assert [list(found) for found in before.logprobs or ()] == [[65, 90]]
    pairs = zip(after.logprobs or (), b"AC", strict=True)
    assert [found[token].logprob for found, token in pairs] == [-0.25, -0.75]


def test_token_logprobs_are_read_without_decoding_an_entry():
    tokenizer = CountingTokenizer()
    state = make(SamplingParams(logprobs=1, detokenize=False), tokenizer)
    (empty,) = state.output().outputs
    assert empty.token_logprobs is not None
    assert empty.token_logprobs.tolist() == []
    emit(state, 0, ord("A"), -0.25)
    emit(state, 0, ord("C"), -0.75)
    (answer,) = state.output().outputs
    assert answer.token_logprobs is not None
    assert answer.token_logprobs.tolist() == [-0.25, -0.75]
    assert tokenizer.decoded == []
    copied = copy.deepcopy(answer)
    assert type(copied.logprobs) is list
    assert copied.token_logprobs is not None
    assert copied.token_logprobs.tolist() == [-0.25, -0.75]
    (other,) = make(SamplingParams()).output().outputs
    assert other.token_logprobs is None


def test_output_has_at_most_as_many_logprobs_as_the_vocabulary():
    state = make(SamplingParams(logprobs=20))
    emit(state, 0, ord("A"))
    (answer,) = state.output().outputs
    assert [list(found) for found in answer.logprobs or ()] == [[65, 90]]
