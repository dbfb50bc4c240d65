"""Test the metrics in `/metrics` and the routes in `/openapi.json`."""

import json
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serve_helpers import QUESTION, RawRequest, Server

from jpaged import Engine, EngineStats
from jpaged.serve.http.metrics import Metrics

Run = Callable[..., None]
LONG: dict[str, Any] = {"prompt": "x" * 40, "max_tokens": 200, "ignore_eos": True}


async def fetch_metrics(server: Server) -> dict[str, float]:
    """Fetch `/metrics`, and return the result of `samples_of`."""
    return samples_of((await server.http.get("/metrics")).text)


def samples_of(text: str) -> dict[str, float]:
    """Return the values in a Prometheus text. Each key is a metric name, followed by the value of
    its label `reason` or `le`, if it has one."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kinds = [sample.labels.get(name, "") for name in ("finished_reason", "reason", "le")]
            reason = "".join(kinds)
            found[f"{sample.name} {reason}".strip()] = sample.value
            assert sample.labels["model_name"] == "jpaged-tiny"
    return found


VLLM_NAMES = {
    *("num_requests_running", "num_requests_waiting", "num_requests_swapped"),
    *("kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket"),
    *("request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket"),
    *("request_inference_time_seconds_bucket", "request_time_per_output_token_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("prompt_tokens_cached_total", "iteration_tokens_total_bucket"),
    *("request_max_num_generation_tokens_bucket", "num_requests_waiting_by_reason"),
    *("request_params_n_bucket", "request_params_max_tokens_bucket", "cache_config_info"),
}


def test_metrics_count_tokens_requests_and_cache_hits(serve: Run, engine: Engine):
    engine.reset_prefix_cache()
    before = engine.stats()
    hits = before.prefix_cache_hits

    async def scenario(server: Server) -> None:
        await server.complete(prompt=QUESTION, max_tokens=64, temperature=0)
        await server.complete(prompt=QUESTION, max_tokens=4, temperature=0)
        await server.complete(prompt="Hello", max_tokens=5, n=2, ignore_eos=True)
        refused = {"prompt": "a", "allowed_token_ids": [264]}
        assert (await server.http.post("/v1/completions", json=refused)).status_code == 400
        found = await fetch_metrics(server)
        names = {name.partition(" ")[0] for name in found}
        assert {f"vllm:{name}" for name in VLLM_NAMES} <= names
        assert found["vllm:prompt_tokens_total"] == 17 + 17 + 5
        assert found["vllm:generation_tokens_total"] == 15 + 4 + 10
        assert found["vllm:request_success_total stop"] == 1
        assert found["vllm:request_success_total length"] == 2
        assert "vllm:request_success_total abort" not in found
        assert found["vllm:time_to_first_token_seconds_count"] == 3
        assert found["vllm:e2e_request_latency_seconds_count"] == 3
        assert found["vllm:request_queue_time_seconds_count"] == 3
        assert found["vllm:request_params_n_sum"] == 4
        assert found["vllm:inter_token_latency_seconds_count"] == 14 + 3 + 4
        assert found["vllm:prefix_cache_hits_total"] == hits + 16
        assert found["vllm:prompt_tokens_cached_total"] == 16
        assert found["vllm:request_max_num_generation_tokens_count"] == 3
        assert found["vllm:request_max_num_generation_tokens_sum"] == 15 + 4 + 5
        assert found["vllm:request_generation_tokens_sum"] == 15 + 4 + 10
        assert found["vllm:request_max_num_generation_tokens_bucket 10.0"] == 2
        assert found["vllm:num_requests_running"] == 0
        assert found["vllm:kv_cache_usage_perc"] == 0

    serve(scenario)


STEPS = "vllm:iteration_tokens_total"


def test_step_metrics_count_the_tokens_of_each_step(serve: Run, engine: Engine):
    """A prompt of 100 tokens runs in chunks of 64 and 36 tokens. The model then generates 3
    tokens."""
    engine.reset_prefix_cache()

    def now(server: Server) -> dict[str, float]:
        return samples_of(server.serving.metrics.text(engine.stats()).decode())

    async def scenario(server: Server) -> None:
        before = now(server)
        asked = {"prompt": "x" * 100, "max_tokens": 3, "ignore_eos": True}
        body = await server.complete(**asked)
        assert body["usage"]["prompt_tokens"] == 100
        await server.idle()
        found = now(server)

        def new(name: str) -> float:
            return found[f"{STEPS}_{name}"] - before[f"{STEPS}_{name}"]

        wasted = new("count") - 4  # extra steps, launched before the last token was read
        assert 0 <= wasted <= 2
        assert new("sum") == 64 + 37 + 2 + wasted
        assert new("bucket 1.0") == new("bucket 32.0") == 2 + wasted
        assert new("bucket 64.0") == new("bucket +Inf") == 4 + wasted
        assert found[f"{STEPS}_bucket 16384.0"] == found[f"{STEPS}_count"]

    serve(scenario)


def test_metrics_report_the_kv_cache_dtype(serve: Run, engines: Callable[..., Engine]):
    async def scenario(server: Server) -> None:
        text = (await server.http.get("/metrics")).text
        (line,) = [it for it in text.splitlines() if it.startswith("vllm:cache_config_info{")]
        assert 'cache_dtype="fp8"' in line

    serve(scenario, engines(kv_cache_dtype="fp8"))


def test_metrics_count_waiting_requests_by_reason():
    metrics = Metrics("jpaged-tiny", max_model_len=64, block_size=16, num_blocks=9)
    text = metrics.text(EngineStats(16, 8, 8, 0, num_waiting=3)).decode()
    found, name = samples_of(text), "vllm:num_requests_waiting_by_reason"
    assert found[f"{name} capacity"] == found["vllm:num_requests_waiting"] == 3
    assert found[f"{name} deferred"] == 0


def test_request_of_a_disconnected_client_is_counted_as_aborted(serve: Run):
    async def scenario(server: Server) -> None:
        leaving = RawRequest(server.app, "/v1/completions", {**LONG, "stream": True})
        await leaving.read_some()
        leaving.leave()
        await leaving.task
        found = await fetch_metrics(server)
        assert found["vllm:request_success_total abort"] == 1

    serve(scenario)


def test_openapi_description_has_every_path_and_field(serve: Run):
    async def scenario(server: Server) -> None:
        schema = (await server.http.get("/openapi.json")).json()
        assert schema["openapi"].startswith("3.1")
        for path, methods in schema["paths"].items():
            for method in methods.keys() - {"parameters"}:
                url = path.format(name="jpaged-tiny")
                answer = await server.http.request(method.upper(), url)
                assert answer.status_code not in (404, 405), path
        fields = schema["components"]["schemas"]["CompletionRequest"]
        assert fields["required"] == ["prompt"]
        assert {"n", "stream_options", "use_beam_search"} <= set(fields["properties"])
        json.dumps(schema, allow_nan=False)

    serve(scenario)


def test_inter_token_histogram_equals_the_prometheus_client_output():
    own = Metrics("m", max_model_len=100, block_size=16, num_blocks=3)
    registry, labels = CollectorRegistry(), {"model_name": "m", "engine": "0"}
    bounds = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75), 1.0, 2.5, 5.0, 7.5)
    bounds += (10.0, 20.0, 40.0, 80.0)
    name, meaning = (
        "vllm:inter_token_latency_seconds",
        "Seconds. Time between two tokens of a request.",
    )
    theirs = Histogram(name, meaning, [*labels], buckets=bounds, registry=registry)
    for seconds in (0.0, 0.01, 0.011, 0.5, 3.0, 80.0, 90.0):
        own.observe("inter_token_latency", seconds)
        theirs.labels(**labels).observe(seconds)

    def lines(text: bytes) -> list[str]:
        found = text.decode().splitlines()
        return [line for line in found if name in line and f"{name}_created" not in line]

    assert len(lines(generate_latest(registry))) == 24
    assert lines(own.text(None)) == lines(generate_latest(registry))
