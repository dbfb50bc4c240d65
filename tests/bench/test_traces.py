"""Test the lengths and arrivals of traces, and the reading of trace files."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from bench.paper import traces
from bench.paper.traces import CHAT_OUTPUT, CHAT_PROMPT, MAX_MODEL_LEN, MEAN_LENGTHS, TraceRequest


@pytest.mark.parametrize("name", MEAN_LENGTHS)
@pytest.mark.parametrize("seed", [0, 1])
def test_mean_lengths_after_clipping_equal_the_means_in_the_paper(name: str, seed: int):
    trace = traces.poisson(traces.of_dataset(name), 100, 1000, seed)
    prompts, outputs = np.array(_lengths(trace)).T
    assert len(prompts) == pytest.approx(100_000, rel=0.02)
    for drawn, mean in zip((prompts, outputs), MEAN_LENGTHS[name], strict=True):
        # The mean may differ by four standard errors. The standard deviation of these lengths is at
        # most 1.31 times their mean.
        assert drawn.mean() == pytest.approx(mean, rel=4 * 1.31 / math.sqrt(len(drawn)))
        assert np.median(drawn) < 0.75 * mean, "right-skewed"
    assert min(prompts.min(), outputs.min()) >= 1
    assert (prompts + outputs).max() <= MAX_MODEL_LEN
    if name == "sharegpt":
        assert (prompts + outputs).max() == MAX_MODEL_LEN, "some are clipped"


def test_arrivals_of_a_trace_are_a_poisson_process():
    times = np.array([r.arrival for r in traces.poisson(traces.of_dataset("alpaca"), 50, 400, 3)])
    gaps = np.diff(times)
    assert times[0] >= 0
    assert times[-1] < 400
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "exponential"
    counts = np.bincount(times.astype(int), minlength=400)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.3)


def test_same_seed_gives_the_same_requests_at_each_rate():
    source = traces.of_dataset("sharegpt")
    slow, fast = traces.poisson(source, 2, 100, 5), traces.poisson(source, 4, 100, 5)
    assert slow == traces.poisson(source, 2, 100, 5)
    assert slow != traces.poisson(source, 2, 100, 6)
    assert _lengths(fast)[: len(slow)] == _lengths(slow)
    assert [2 * r.arrival for r in fast[:50]] == pytest.approx([r.arrival for r in slow[:50]])
    assert len(fast) == pytest.approx(2 * len(slow), rel=0.25)


def test_translation_prompts_begin_with_a_shared_prefix():
    few = traces.translation("5-shot", 10, 20, 0)
    assert {request.prompt[0] for request in few} == {(0, 0, 341)}
    assert all(_num_tokens(request) == request.prompt_len > 341 for request in few)
    own = [request.prompt[1][0] for request in few]
    assert len(set(own)) == len(few), "the tokens after the prefix differ between prompts"
    assert 0 not in own
    assert all(r.prompt_len + r.output_len <= MAX_MODEL_LEN for r in few)


def test_chat_prompts_end_with_the_latest_tokens_of_the_conversation():
    rounds = traces.chat(4, 1800, 0)
    assert len(rounds) == pytest.approx(4 * 1800, rel=0.15)
    assert [r.arrival for r in rounds] == sorted(r.arrival for r in rounds)
    assert max(r.prompt_len for r in rounds) == CHAT_PROMPT
    assert max(r.output_len for r in rounds) == CHAT_OUTPUT
    assert np.mean([r.prompt_len == CHAT_PROMPT for r in rounds]) > 0.5, "the paper: most"
    assert all(_num_tokens(r) == r.prompt_len for r in rounds)
    by_stream: dict[int, list[TraceRequest]] = {}
    for request in rounds:
        by_stream.setdefault(request.prompt[0][0], []).append(request)
    followed = 0
    for earlier, later in (pair for r in by_stream.values() for pair in itertools.pairwise(r)):
        stop = earlier.prompt[0][2] + earlier.output_len
        assert later.prompt[0][2] > stop, "the prompt has the last answer and a new question"
        assert later.prompt[0][1] == max(later.prompt[0][2] - CHAT_PROMPT, 0)
        followed += 1
    assert followed > len(rounds) / 2
    early = np.mean([r.prompt_len for r in rounds if r.arrival < 600])
    late = np.mean([r.prompt_len for r in rounds if r.arrival > 1200])
    assert early == pytest.approx(late, rel=0.1)


def test_request_lengths_are_read_from_a_trace_file(tmp_path: Path):
    texts = '{"prompt": "Hello, you two", "output": "Good day."}'
    source = traces.from_file(_file(tmp_path, '{"prompt_len": 5, "output_len": 7}', texts, ""))
    drawn = _lengths(traces.poisson(source, 10, 50, 0))
    assert set(drawn) == {(5, 7), (4, 3)}
    assert source.means == (4.5, 5.0)


def test_long_requests_in_a_trace_file_are_clipped_to_max_model_len(tmp_path: Path):
    source = traces.from_file(_file(tmp_path, '{"prompt_len": 9000, "output_len": 10}'))
    assert set(_lengths(traces.poisson(source, 10, 5, 0))) == {(MAX_MODEL_LEN - 1, 1)}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "must be a JSON object"),
        ("{}", "add prompt_len and output_len"),
        ('{"prompt_len": 3}', "output_len must be an integer of at least 1, not None"),
        ('{"prompt_len": 0, "output_len": 1}', "prompt_len must be .* not 0"),
        ('{"prompt_len": true, "output_len": 1}', "prompt_len must be .* not True"),
        ('{"prompt_len": 1.5, "output_len": 1}', "prompt_len must be .* not 1.5"),
        ('{"prompt": "a", "output": " "}', "output must be a string"),
        ('{"prompt": "a"}', "output must be a string"),
    ],
)
def test_error_for_an_invalid_line_names_the_file_and_the_line(
    tmp_path: Path, line: str, named: str
):
    path = _file(tmp_path, '{"prompt_len": 1, "output_len": 1}', "", line)
    with pytest.raises(ValueError, match=rf"lengths\.jsonl, line 3: .*{named}"):
        traces.from_file(path)


def test_empty_or_unreadable_file_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"lengths\.jsonl' has no requests"):
        traces.from_file(_file(tmp_path, ""))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary"):
        with pytest.raises(ValueError, match=rf"cannot read .*{name}\.jsonl"):
            traces.from_file(tmp_path / f"{name}.jsonl")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rate_must_be_a_positive_number(rate: float):
    with pytest.raises(ValueError, match="rate must be a positive number"):
        traces.poisson(traces.of_dataset("alpaca"), rate, 10, 0)
    with pytest.raises(ValueError, match="rate must be a positive number"):
        traces.chat(rate, 10, 0)


def test_unknown_or_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match="'wiki' are unknown: pass one of sharegpt, alpaca"):
        traces.of_dataset("wiki")
    with pytest.raises(ValueError, match="no lengths have a mean of 3000 tokens"):
        traces.solve_scales(3000, 10, MAX_MODEL_LEN)


def _lengths(trace: list[TraceRequest]) -> list[tuple[int, int]]:
    return [(request.prompt_len, request.output_len) for request in trace]


def _num_tokens(request: TraceRequest) -> int:
    return sum(stop - start for _, start, stop in request.prompt)


def _file(folder: Path, *lines: str) -> Path:
    path = folder / "lengths.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
