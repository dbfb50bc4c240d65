"""Test the open-loop load client, its figures and its errors."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import records, serving
from bench.load_client import Answer, Report, Share, Target, Work, serve_share
from bench.serving import client_figures, half_of_what_fits, make_work, merged, summarise

WORK = [Work([1, 2, 3], 2, 0.0)]


def test_arrivals_are_a_poisson_process():
    work = make_work(4000, 8.0, vocab_size=50, max_tokens=100)
    gaps = np.diff([0.0, *(one.due for one in work)])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.05)
    assert max(max(one.prompt) for one in work) < 50
    assert all(4 <= len(one.prompt) <= 100 and 4 <= one.num_outputs <= 100 for one in work)
    assert work == make_work(4000, 8.0, vocab_size=50, max_tokens=100)
    assert work != make_work(4000, 8.0, vocab_size=50, max_tokens=100, seed=1)


def test_infinite_rate_sends_all_requests_at_time_zero():
    assert {one.due for one in make_work(9, math.inf, vocab_size=50, max_tokens=9)} == {0.0}


def test_summary_of_answers_has_rates_latencies_and_errors():
    work = [Work([1] * 4, 3, 0.0), Work([1] * 4, 3, 1.0), Work([1] * 4, 3, 1.0)]
    answers = [
        Answer([0.1, 0.2, 0.4], 0.6, 4, 3),
        Answer([0.3, 0.4, 0.5], 0.9, 4, 3),
        Answer([0.2], 9.0, 4, 1, error="status 503"),
    ]
    row = summarise(2.0, work, answers)
    assert (row["requests"], row["errors"], row["seconds"]) == (3, 1, 10.0)
    assert row["requests_per_s"] == pytest.approx(0.2)
    assert row["output_tokens_per_s"] == pytest.approx(0.6)
    assert row["tokens_per_s"] == pytest.approx(1.4)
    assert row["ttft_ms_p50"] == pytest.approx(200)
    assert row["inter_token_ms_p50"] == pytest.approx(100)
    assert row["inter_token_ms_p99"] == pytest.approx(197)
    assert row["normalised_ms_p50"] == pytest.approx(250)
    row = summarise(math.inf, work[:1], [Answer(end=1.0, error="x")])
    assert (row["rate"], row["ttft_ms_p50"], row["requests_per_s"]) == ("inf", None, 0.0)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def share(target: Target) -> Report:
    return await serve_share(Share(target, WORK), time.monotonic())


def run_against(handler: Handler, run: Callable[[Target], Awaitable[Any]] = share) -> Any:
    """Start a server that answers every request with `handler`. Call `run`, and return its
    result."""

    async def serve() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with TestServer(app) as server:
            return await run(Target(str(server.make_url("/v1")), "m", "secret"))

    return asyncio.run(serve())


def ask(events: list, status: int = 200) -> tuple[Answer, dict]:
    """Send one request to a server that answers with `events`.

    Returns:
        The client's answer, and the JSON fields of the request.
    """
    asked = {}

    async def answer(request: web.Request) -> web.Response:
        asked.update(await request.json(), key=request.headers["authorization"])
        data = [event if isinstance(event, str) else json.dumps(event) for event in events]
        return web.Response(status=status, text="".join(f"data: {text}\n\n" for text in data))

    return run_against(answer).answers[0], asked


TEXT = {"choices": [{"index": 0, "text": "a"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def test_client_sends_a_streaming_completion_request():
    answer, asked = ask([TEXT, TEXT, USAGE, "[DONE]"])
    assert (answer.error, answer.num_prompt_tokens, answer.num_output_tokens) == (None, 3, 2)
    assert len(answer.chunk_times) == 2
    assert asked.pop("key") == "Bearer secret"
    assert asked == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("events", "status", "error"),
    [
        ([], 503, "status 503"),
        ([TEXT, {"error": {"message": "gone"}}], 200, "error event: {'message': 'gone'}"),
        ([TEXT, "no JSON"], 200, "JSON is malformed"),
        ([TEXT, TEXT], 200, "wrong number of output tokens"),
        (
            [TEXT, {**USAGE, "usage": {"prompt_tokens": 3, "completion_tokens": 1}}],
            200,
            "wrong number",
        ),
    ],
)
def test_answers_of_failed_requests_have_an_error(events: list, status: int, error: str):
    answer, _ = ask(events, status)
    assert answer.error is not None
    assert answer.error.startswith(error)


def test_unreachable_server_is_an_error():
    (answer,) = asyncio.run(share(Target("http://127.0.0.1:1/v1"))).answers
    assert answer.error == "ClientConnectorError"


def test_error_of_an_answer_contains_the_message_of_the_server():
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    report = run_against(refuse)
    assert report.answers[0].error == "status 404: no such model"


def test_client_reads_events_split_across_chunks():
    whole = f"data: {json.dumps(TEXT)}\n\ndata: {json.dumps(USAGE)}\r\n\r\ndata: [DONE]\n\n"

    async def drip(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for i in range(0, len(whole), 7):
            await answer.write(whole[i : i + 7].encode())
            await asyncio.sleep(0)
        return answer

    (answer,) = run_against(drip).answers
    assert (answer.error, len(answer.chunk_times), answer.num_output_tokens) == (None, 1, 2)


def test_client_reports_its_processor_load_and_event_loop_lag():
    async def answer(request: web.Request) -> web.Response:
        # The sleep delays the client too, because server and client share an event loop in this
        # test.
        time.sleep(0.2)
        return web.Response(text="")

    report = run_against(answer)
    figures = client_figures([report, Report([], busy=0.5)])
    assert figures["client_busy"] == max(report.busy, 0.5)
    assert figures["client_lag_ms_p99"] > 50


def test_benchmark_warns_if_a_busy_or_late_client_limits_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def warning_of(busy: float, lag: float) -> str:
        report = Report([Answer([0.1], 0.2, 3, 2)], busy=busy, lags=[lag])
        monkeypatch.setattr(serving, "run_shares", lambda *_: [report])
        serving.sweep(Target("http://test/v1"), {1.0: WORK}, 1)
        return capsys.readouterr().err

    assert warning_of(0.5, 0.001) == ""
    assert "the client was the limit" in warning_of(0.95, 0.001)
    assert "the client was the limit" in warning_of(0.5, 0.02)


def test_answers_of_client_processes_are_merged_in_request_order():
    answers = [Answer(num_output_tokens=i) for i in range(7)]
    reports = [Report(answers[i::3]) for i in range(3)]
    assert merged(reports) == answers


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"data": [{"id": "a", "max_model_len": 64}, {"id": "m", "max_model_len": 100}]}, 50),
        ({"data": [{"id": "m", "max_model_len": 10**6}]}, 1024),
        ({"data": [{"id": "m"}]}, 1024),
        ({"data": []}, 1024),
        ([], 1024),
    ],
)
def test_default_max_tokens_is_half_of_max_model_len(answer: object, expected: int):
    async def models(request: web.Request) -> web.Response:
        return web.json_response(answer)

    async def fits(target: Target) -> int:
        return await asyncio.to_thread(half_of_what_fits, target)

    assert run_against(models, fits) == expected


@pytest.mark.parametrize(
    "option", ["--num-requests=0", "--num-requests=-1", "--num-requests=many", "--rate=1,0"]
)
def test_invalid_options_are_refused(option: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        serving.main([option])
    assert ("above 0" if "rate" in option else "at least 1") in capsys.readouterr().err


def test_record_names_the_device_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    path = records.record("serving", [{"rate": 1.0}], device="Some GPU")
    assert path.name == "serving_some-gpu.json"
    assert json.loads(path.read_text())["device"] == "Some GPU"
