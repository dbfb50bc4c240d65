"""Figures for Prometheus, with vLLM's names and buckets, so that its dashboards show them.

Gauges and the engine's own counters are what the last turn of its loop told of; counts and times of
requests are taken as their news arrive here.
"""

import math
import time
from bisect import bisect_left
from collections import Counter as TokenCounter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jpaged import EngineStats, RequestDelta, RequestMetrics
from jpaged.serve.engine.messages import EngineRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_TIME_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_NUM_ANSWERS_BUCKETS = (1, 2, 5, 10, 20)

_GAUGES = {
    "vllm:num_requests_running": ("Requests in the batch.", "num_running"),
    "vllm:num_requests_waiting": ("Requests waiting for a place.", "num_waiting"),
    "vllm:num_requests_swapped": ("Waiting requests with KV in host memory.", "num_swapped"),
    "vllm:kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", "kv_cache_usage"),
    "jpaged:kv_cache_waste_perc": ("Share of held slots without a token, 0 to 1.", "waste"),
    "jpaged:kv_cache_cached_blocks": ("Free blocks kept for a prefix.", "num_cached_blocks"),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    "vllm:num_preemptions": ("Times a request lost its blocks.", "num_preemptions"),
    "jpaged:block_copies": ("Blocks copied on write.", "num_block_copies"),
    "jpaged:swapped_out_blocks": ("Blocks to host memory.", "num_swapped_out_blocks"),
    "jpaged:swapped_in_blocks": ("Blocks back from host memory.", "num_swapped_in_blocks"),
    "jpaged:steps": ("Steps launched.", "num_steps"),
}

# What each is, its buckets, and whether it is observed with every token.
_TIME_HISTOGRAMS = {
    "time_to_first_token": (
        "From a request's arrival to its first token.",
        _FIRST_TOKEN_BUCKETS,
        False,
    ),
    "inter_token_latency": ("Between two tokens of a request.", _INTER_TOKEN_BUCKETS, True),
    "request_time_per_output_token": (
        "A request's mean between tokens.",
        _INTER_TOKEN_BUCKETS,
        False,
    ),
    "e2e_request_latency": ("Of a request in all.", _REQUEST_TIME_BUCKETS, False),
    "request_queue_time": ("Waiting for the first step.", _REQUEST_TIME_BUCKETS, False),
    "request_prefill_time": (
        "From a request's first step to its first token.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
    "request_decode_time": (
        "From a request's first token to its last.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
    "request_inference_time": (
        "From a request's first step to its last token.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
}
_COUNT_HISTOGRAMS = {
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of all answers to a prompt.",
    "request_max_num_generation_tokens": "Tokens of the longest answer to a prompt.",
    "request_params_max_tokens": "max_tokens that requests ask for.",
    "request_params_n": "n that requests ask for.",
}


class Metrics:
    """All figures of one server.

    Args:
        model_name: Their label.
        max_model_len: Most tokens of a sequence.
        block_size, num_blocks: The pool's.
        cache_dtype: What the pool was asked to be kept in.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        cache_dtype: str = "auto",
    ):
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = _EngineCollector(self._labels)
        self._registry.register(self._engine)
        sizes = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}
        pool = self._labels | sizes | {"cache_dtype": cache_dtype}
        info = Gauge("vllm:cache_config_info", "The pool.", [*pool], registry=self._registry)
        info.labels(**pool).set(1)
        self.prompt_tokens = self._add_counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._add_counter(
            "vllm:prompt_tokens_cached", "Prompt tokens whose KV the prefix cache had."
        )
        self.output_tokens = self._add_counter("vllm:generation_tokens", "Tokens of answers.")
        self._num_ended_requests = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._histograms: dict[str, Histogram | _TokenHistogram] = {}
        for name, (documentation, buckets, is_per_token) in _TIME_HISTOGRAMS.items():
            add = self._add_token_histogram if is_per_token else self._add_histogram
            add(name, f"vllm:{name}_seconds", f"Seconds. {documentation}", buckets)
        length_buckets = _build_1_2_5_buckets(max_model_len)
        for name, documentation in _COUNT_HISTOGRAMS.items():
            buckets = _NUM_ANSWERS_BUCKETS if name == "request_params_n" else length_buckets
            self._add_histogram(name, f"vllm:{name}", documentation, buckets)

    def text(self, stats: EngineStats | None) -> bytes:
        """All of them in Prometheus's text format.

        Args:
            stats: The engine's own, as of late.
        """
        self._engine.stats = stats
        return generate_latest(self._registry)

    def observe(self, name: str, value: float) -> None:
        """Count a value of a histogram."""
        self._histograms[name].observe(value)

    def record_request(
        self, request: EngineRequest, reason: str, num_tokens: int, max_answer_tokens: int
    ) -> None:
        """A request ended, after so many tokens, of its longest answer so many."""
        self._num_ended_requests.labels(**self._labels, finished_reason=reason).inc()
        self.observe("request_prompt_tokens", len(request.prompt_token_ids))
        self.observe("request_generation_tokens", num_tokens)
        self.observe("request_max_num_generation_tokens", max_answer_tokens)
        self.observe("request_params_n", request.params.n)
        if request.params.max_tokens is not None:
            self.observe("request_params_max_tokens", request.params.max_tokens)

    def _add_counter(self, name: str, documentation: str) -> Counter:
        counter = Counter(name, documentation, [*self._labels], registry=self._registry)
        return counter.labels(**self._labels)

    def _add_histogram(
        self, key: str, name: str, documentation: str, buckets: Sequence[float]
    ) -> None:
        labels = self._labels
        histogram = Histogram(
            name, documentation, [*labels], buckets=buckets, registry=self._registry
        )
        self._histograms[key] = histogram.labels(**labels)

    def _add_token_histogram(
        self, key: str, name: str, documentation: str, buckets: Sequence[float]
    ) -> None:
        histogram = self._histograms[key] = _TokenHistogram(
            name, documentation, buckets, self._labels
        )
        self._registry.register(histogram)


class RequestMeter:
    """Measures one request from its start to its end."""

    def __init__(self, metrics: Metrics, request: EngineRequest):
        self._metrics, self._request = metrics, request
        self._start_time = self._last_token_time = time.monotonic()
        self._num_tokens = 0
        self._num_tokens_by_answer = TokenCounter[int]()
        self._is_over = False

    def record_delta(self, delta: RequestDelta) -> None:
        """The request grew."""
        num_tokens = 0
        for each in delta.deltas:
            num_tokens += len(each.token_ids)
            self._num_tokens_by_answer[each.index] += len(each.token_ids)
        if num_tokens:
            self._record_tokens(num_tokens, delta.num_cached_tokens)
        if delta.finished:
            reasons = [each.finish_reason for each in delta.deltas if each.finish_reason]
            self.end("error" if delta.error else reasons[-1] if reasons else "abort")
            if delta.metrics is not None:
                self._record_times(delta.metrics)

    def end(self, reason: str) -> None:
        """Count the end of the request, once; a refused request is not counted."""
        if self._is_over or reason == "refused":
            return
        self._is_over = True
        max_answer_tokens = max(self._num_tokens_by_answer.values(), default=0)
        self._metrics.record_request(self._request, reason, self._num_tokens, max_answer_tokens)
        self._metrics.observe("e2e_request_latency", time.monotonic() - self._start_time)

    def _record_tokens(self, num_tokens: int, num_cached: int) -> None:
        now, metrics = time.monotonic(), self._metrics
        if self._num_tokens:
            metrics.observe("inter_token_latency", (now - self._last_token_time) / num_tokens)
        else:
            metrics.observe("time_to_first_token", now - self._start_time)
            metrics.prompt_tokens.inc(len(self._request.prompt_token_ids))
            metrics.cached_tokens.inc(num_cached)
        self._last_token_time = now
        self._num_tokens += num_tokens
        metrics.output_tokens.inc(num_tokens)

    def _record_times(self, times: RequestMetrics) -> None:
        """The engine's own times: both processes read one clock."""
        scheduled, first = times.first_scheduled_time, times.first_token_time
        last, observe = times.finished_time, self._metrics.observe
        if scheduled is None or first is None or last is None:
            return
        observe("request_queue_time", scheduled - times.arrival_time)
        observe("request_prefill_time", first - scheduled)
        observe("request_decode_time", last - first)
        observe("request_inference_time", last - scheduled)
        if self._num_tokens > 1:
            observe("request_time_per_output_token", (last - first) / (self._num_tokens - 1))


class _TokenHistogram(Collector):
    """A histogram of what happens with every token: `observe` costs a tenth of `Histogram`'s.

    For one thread.
    """

    def __init__(
        self, name: str, documentation: str, buckets: Sequence[float], labels: dict[str, str]
    ):
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The counts as Prometheus has them: each bucket with those before it."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=[*self._labels])
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([*self._labels.values()], [*buckets], self._sum)
        yield family


class _EngineCollector(Collector):
    """The engine's latest figures."""

    def __init__(self, labels: dict[str, str]):
        self.stats: EngineStats | None = None
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Each as Prometheus has it."""
        if self.stats is None:
            return
        for family_type, fields_by_metric in (
            (GaugeMetricFamily, _GAUGES),
            (CounterMetricFamily, _COUNTERS),
        ):
            for name, (documentation, attribute) in fields_by_metric.items():
                family: Any = family_type(name, documentation, labels=[*self._labels])
                family.add_metric([*self._labels.values()], getattr(self.stats, attribute))
                yield family
        yield self._waiting_metric(self.stats)
        yield self._step_metric(self.stats)

    def _waiting_metric(self, stats: EngineStats) -> Metric:
        """vLLM's reasons: nothing here is deferred for another reason than a lack of room."""
        documentation = "Requests waiting, by reason; their sum is num_requests_waiting."
        labels = [*self._labels, "reason"]
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", documentation, labels=labels
        )
        for reason, number in (("capacity", stats.num_waiting), ("deferred", 0)):
            family.add_metric([*self._labels.values(), reason], number)
        return family

    def _step_metric(self, stats: EngineStats) -> Metric:
        bounds = [*(f"{size:.1f}" for size in stats.STEP_SIZES), "+Inf"]
        documentation = (
            "Tokens of a step: those of prompts that it computes, and those that it samples."
        )
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", documentation, labels=[*self._labels]
        )
        buckets = [*zip(bounds, accumulate(stats.num_steps_by_size), strict=True)]
        family.add_metric([*self._labels.values()], buckets, stats.num_step_tokens)
        return family


def _build_1_2_5_buckets(max_value: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20 ... up to `max_value`."""
    bounds = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_value)
