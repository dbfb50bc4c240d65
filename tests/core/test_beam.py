"""Test beam search on small cases; test_beam_transformers.py compares with transformers."""

import numpy as np
import pytest

from jpaged.core.beam import BeamSearch, Continuation, Hypothesis

END = 9


def candidates(*rows: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return each beam's next tokens and their log-probabilities."""
    return np.array([list(row) for row in rows]), np.array(
        [list(row.values()) for row in rows], np.float32
    )


def first_step(search: BeamSearch, row: dict[int, float], max_tokens: int = 8):
    return search.advance([[]], [0.0], *candidates(row), max_tokens=max_tokens)


def test_first_step_of_a_beam_search_forks_the_prompt():
    beams = first_step(BeamSearch(2), {5: -0.5, 6: -1.0, 7: -1.5})
    assert beams == [Continuation(0, 5, -0.5), Continuation(0, 6, -1.0)]


def test_best_continuations_are_kept_even_if_all_extend_the_same_beam():
    rows = candidates({5: -2.0, 6: -3.0}, {7: -0.25, 8: -0.5})
    beams = BeamSearch(2).advance([[1], [2]], [-0.5, -1.0], *rows, max_tokens=8)
    assert beams == [Continuation(1, 7, -1.25), Continuation(1, 8, -1.5)]


def test_equal_scores_are_ordered_by_beam_and_then_by_candidate():
    rows = candidates({5: -0.5, 6: -0.5}, {7: -0.5, 8: -0.5})
    beams = BeamSearch(3).advance([[1], [2]], [-1.0, -1.0], *rows, max_tokens=8)
    assert [(beam.parent, beam.token_id) for beam in beams] == [(0, 5), (0, 6), (1, 7)]
    rows = candidates(*[dict.fromkeys(range(20), -1.0)] * 8)
    beams = BeamSearch(30).advance([[1]] * 8, [-1.0] * 8, *rows, max_tokens=8)
    assert [(beam.parent, beam.token_id) for beam in beams] == [divmod(i, 20) for i in range(30)]


def test_end_token_completes_an_answer_and_the_next_best_token_extends_the_beam():
    search = BeamSearch(2, end_token_ids=frozenset({END}))
    assert search.num_candidates == 3
    rows = candidates({END: -0.5, 5: -1.0, 6: -2.0}, {7: -2.0, 8: -2.5, 6: -3.0})
    beams = search.advance([[1], [2]], [-0.5, -1.0], *rows, max_tokens=8)
    assert beams == [Continuation(0, 5, -1.5), Continuation(0, 6, -2.5)]
    assert search.hypotheses == [Hypothesis((1, END), -1.0, -0.5, True)]


def test_end_token_that_ranks_after_the_best_continuations_is_ignored():
    search = BeamSearch(2, end_token_ids=frozenset({END}))
    beams = first_step(search, {5: -0.5, 6: -1.0, END: -1.5})
    assert [beam.token_id for beam in beams] == [5, 6]
    assert search.hypotheses == []


def test_answer_of_maximum_length_needs_no_end_token():
    search = BeamSearch(2, end_token_ids=frozenset({END}))
    rows = candidates({5: -1.0, END: -2.0, 6: -3.0})
    assert search.advance([[1, 2, 3]], [-3.0], *rows, max_tokens=4) == []
    assert search.hypotheses == [
        Hypothesis((1, 2, 3, 5), -4.0, -1.0, False),
        Hypothesis((1, 2, 3, END), -5.0, -1.25, True),
    ]


@pytest.mark.parametrize(
    ("length_penalty", "score"), [(0, -4.0), (1.0, -1.0), (2.0, -0.25), (-1.0, -16.0)]
)
def test_score_is_sum_of_logprobs_divided_by_length_to_the_power_of_length_penalty(
    length_penalty: float, score: float
):
    search = BeamSearch(1, length_penalty=length_penalty)
    search.advance([[1, 2, 3]], [-3.0], *candidates({5: -1.0}), max_tokens=4)
    assert search.hypotheses == [Hypothesis((1, 2, 3, 5), -4.0, score, False)]


def two_answers_and_a_beam(**options) -> tuple[BeamSearch, list[Continuation]]:
    """Return a search of width 2 after one step with max_tokens=4, and its beams.

    The search has complete answers with scores -1 and -2. The best beam has one token and the
    log-probability -3.
    """
    search = BeamSearch(2, end_token_ids=frozenset({END, 8}), **options)
    return search, first_step(search, {END: -1.0, 8: -2.0, 5: -3.0, 6: -4.0}, max_tokens=4)


def test_beam_search_ends_when_no_beam_beats_the_worst_complete_answer():
    search, beams = two_answers_and_a_beam()
    assert beams == []
    assert [answer.score for answer in search.hypotheses] == [-1.0, -2.0]
    ties = first_step(BeamSearch(2, end_token_ids=frozenset({END, 8})), {END: -1, 8: -2, 5: -2})
    assert ties == []


def answers_around_a_beam(**options) -> list[Continuation]:
    """Return the beams of a search that has two complete answers, with log-probabilities -1 and
    -2.5. The best beam has the log-probability -2.25.
    """
    search = BeamSearch(2, end_token_ids=frozenset({END}), **options)
    first_step(search, {END: -1.0, 5: -1.5, 6: -2.0}, max_tokens=4)
    rows = candidates({7: -0.75, END: -1.0, 6: -3.0}, {5: -4.0, 7: -5.0, 6: -6.0})
    beams = search.advance([[5], [6]], [-1.5, -2.0], *rows, max_tokens=4)
    assert [answer.output_token_ids for answer in search.hypotheses] == [(END,), (5, END)]
    return beams


def test_early_stopping_drops_a_beam_with_a_better_score():
    assert answers_around_a_beam(early_stopping=True) == []
    assert answers_around_a_beam(early_stopping=False)[0] == Continuation(0, 7, -2.25)


def test_negative_length_penalty_scores_the_best_beam_at_its_current_length():
    # With a length penalty of -1, a score is the sum of the log-probabilities times the length. The
    # score of the worst complete answer is -2.5 * 2 = -5. The score of the best beam is now
    # -2.25 * 2 = -4.5, and would be -2.25 * 4 = -9 at the maximum length of 4 tokens.
    beams = answers_around_a_beam(early_stopping="never", length_penalty=-1.0)
    assert beams[0] == Continuation(0, 7, -2.25)


def test_search_continues_while_a_longer_answer_could_score_better():
    # The sum of the best beam's log-probabilities is -3. With 4 tokens, the score of this beam
    # would be -3 / 4 = -0.75 with a length penalty of 1, and -3 with a length penalty of 0.
    beams = two_answers_and_a_beam(early_stopping="never")[1]
    assert [beam.token_id for beam in beams] == [5, 6]
    assert two_answers_and_a_beam(early_stopping="never", length_penalty=0.0)[1] == []
    assert two_answers_and_a_beam(early_stopping="never", length_penalty=-1.0)[1] == []


def test_better_complete_answer_replaces_the_worst_one():
    search, beams = two_answers_and_a_beam(early_stopping="never")
    rows = candidates({END: -0.5, 5: -1.0}, {5: -1.0, 6: -9.0})
    search.advance([[5], [6]], [beam.score for beam in beams], *rows, max_tokens=4)
    assert [answer.output_token_ids for answer in search.hypotheses] == [(END,), (5, END)]
    assert [answer.score for answer in search.hypotheses] == [-1.0, -1.75]


def test_beam_search_of_width_1_is_greedy_even_if_early_stopping_is_never():
    search = BeamSearch(1, early_stopping="never", end_token_ids=frozenset({END}))
    assert first_step(search, {END: -0.6, 5: -0.8}) == []
    assert [answer.output_token_ids for answer in search.hypotheses] == [(END,)]


def test_vocabulary_smaller_than_the_beam_width_gives_fewer_beams_and_answers():
    search = BeamSearch(4, end_token_ids=frozenset({END}))
    beams = first_step(search, {5: -0.5, END: -1.0, 6: -1.5, 7: -np.inf, 8: np.nan}, 2)
    assert [beam.token_id for beam in beams] == [5, 6]
    assert search.advance([[5]], [-0.5], *candidates({5: -0.5}), max_tokens=2) == []
    assert [answer.output_token_ids for answer in search.hypotheses] == [(5, 5), (END,)]


def test_beam_search_ends_when_every_continuation_ends():
    search = BeamSearch(3, end_token_ids=frozenset({END}))
    assert first_step(search, {END: 0.0}) == []
    assert [answer.output_token_ids for answer in search.hypotheses] == [(END,)]


def test_beam_scores_are_summed_in_float32():
    score = first_step(BeamSearch(1), {5: -0.1})[0].score
    rows = candidates({6: -0.7})
    beams = BeamSearch(1).advance([[5]], [score], *rows, max_tokens=8)
    assert beams[0].score == float(np.float32(-0.1) + np.float32(-0.7))


@pytest.mark.parametrize("length_penalty", [-1e300, -500.0, 500.0, 1e300])
def test_extreme_length_penalty_gives_finite_scores(length_penalty: float):
    search = BeamSearch(2, length_penalty=length_penalty, early_stopping="never")
    rows = candidates({5: 0.0, 6: -3e9})
    search.advance([[1] * 99], [-1.0], *rows, max_tokens=100)
    assert [answer.output_token_ids[-1] for answer in search.hypotheses] == [5, 6]


def test_beam_search_copies_its_arguments():
    ends = {END}
    options = {"length_penalty": np.float32(0.5), "end_token_ids": ends}
    search = BeamSearch(np.int64(2), **options)  # pyright: ignore[reportArgumentType]
    ends.clear()
    assert repr(search) == repr(BeamSearch(2, length_penalty=0.5, end_token_ids=frozenset({END})))
    assert search.num_candidates == 3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("width", [0, -3, 2.0, True, "2", None]),
        ("length_penalty", [float("nan"), float("inf"), -float("inf"), "1", None]),
        ("early_stopping", ["always", "", None, 1, 0.0]),
    ],
)
def test_invalid_beam_search_option_is_refused(name: str, values: list):
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}={value!r} "):
            BeamSearch(**{"width": 2, name: value})


@pytest.mark.parametrize(
    ("outputs", "scores", "num_rows", "num_logprobs", "match"),
    [
        ([], [], 0, 3, "at least one"),
        ([[1], [2]], [0.0], 2, 3, r"scores \(1\)"),
        ([[1], [2]], [0.0, 0.0], 1, 3, r"token_ids \(1\)"),
        ([[1], [2, 3]], [0.0, 0.0], 2, 3, r"lengths \[1, 2\]"),
        ([[]], [0.0], 1, 2, "the same shape"),
    ],
)
def test_mismatched_beam_arrays_are_refused(outputs, scores, num_rows, num_logprobs, match):
    rows = np.zeros((num_rows, 3), np.int32), np.zeros((num_rows, num_logprobs), np.float32)
    with pytest.raises(ValueError, match=match):
        BeamSearch(2).advance(outputs, scores, *rows, max_tokens=8)
