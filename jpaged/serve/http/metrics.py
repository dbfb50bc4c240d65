"""Metrics for Prometheus, with vLLM's names and buckets, so that vLLM's dashboards work.

The engine's gauges and counters have the values of the engine's latest report. The counts and times
of requests are measured when their updates arrive in the HTTP process.
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
from typing_extensions import override

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
    "vllm:num_requests_running": ("Running requests.", "num_running"),
    "vllm:num_requests_waiting": ("Waiting requests.", "num_waiting"),
    "vllm:num_requests_swapped": ("Waiting requests with KV in host memory.", "num_swapped"),
    "vllm:kv_cache_usage_perc": ("Fraction of the KV blocks in use, 0 to 1.", "kv_cache_usage"),
    "jpaged:kv_cache_waste_perc": ("Fraction of empty slots in used blocks, 0 to 1.", "waste"),
    "jpaged:kv_cache_cached_blocks": ("Unused blocks in the prefix cache.", "num_cached_blocks"),
}
_COUNTERS = {
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    "vllm:spec_decode_num_drafts": (
        "Number of times that drafts of a sequence were verified.",
        "num_drafts",
    ),
    "vllm:spec_decode_num_draft_tokens": ("Drafts that were verified.", "num_draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": (
        "Drafts that were accepted.",
        "num_accepted_tokens",
    ),
    "vllm:num_preemptions": ("Number of preemptions of requests.", "num_preemptions"),
    "jpaged:block_copies": ("Blocks copied on write.", "num_block_copies"),
    "jpaged:swapped_out_blocks": ("Blocks swapped out to host memory.", "num_swapped_out_blocks"),
    "jpaged:swapped_in_blocks": ("Blocks swapped in from host memory.", "num_swapped_in_blocks"),
    "jpaged:steps": ("Steps launched.", "num_steps"),
}

# For each histogram: its description, its buckets, and whether it gets one value per token.
_TIME_HISTOGRAMS = {
    "time_to_first_token": (
        "Time from a request's arrival to its first token.",
        _FIRST_TOKEN_BUCKETS,
        False,
    ),
    "inter_token_latency": ("Time between two tokens of a request.", _INTER_TOKEN_BUCKETS, True),
    "request_time_per_output_token": (
        "Mean time between two tokens of a request.",
        _INTER_TOKEN_BUCKETS,
        False,
    ),
    "e2e_request_latency": (
        "Time from a request's arrival to its end.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
    "request_queue_time": (
        "Time from a request's arrival to its first step.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
    "request_prefill_time": (
        "Time from a request's first step to its first token.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
    "request_decode_time": (
        "Time from a request's first token to its last token.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
    "request_inference_time": (
        "Time from a request's first step to its last token.",
        _REQUEST_TIME_BUCKETS,
        False,
    ),
}
_COUNT_HISTOGRAMS = {
    "request_prompt_tokens": "Number of tokens of a prompt.",
    "request_generation_tokens": "Number of tokens of all answers to a prompt.",
    "request_max_num_generation_tokens": "Number of tokens of the longest answer to a prompt.",
    "request_params_max_tokens": "Value of max_tokens in requests.",
    "request_params_n": "Value of n in requests.",
}


class Metrics:
    """All metrics of one server.

    Args:
        model_name: Label of all metrics.
        max_model_len: Maximum number of tokens of a sequence.
        block_size: Number of slots of a block.
        num_blocks: Number of blocks in the pool.
        cache_dtype: The option `kv_cache_dtype`.
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
        info = Gauge(
            "vllm:cache_config_info", "Configuration of the pool.", [*pool], registry=self._registry
        )
        info.labels(**pool).set(1)
        self.prompt_tokens = self._add_counter("vllm:prompt_tokens", "Number of prompt tokens.")
        self.cached_tokens = self._add_counter(
            "vllm:prompt_tokens_cached", "Number of prompt tokens whose KV was in the prefix cache."
        )
        self.output_tokens = self._add_counter(
            "vllm:generation_tokens", "Number of generated tokens."
        )
        self._num_ended_requests = Counter(
            "vllm:request_success",
            "Number of requests that ended, by finish reason.",
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
        """Return all metrics in Prometheus's text format.

        Args:
            stats: Latest statistics of the engine; None leaves out the engine's metrics.
        """
        self._engine.stats = stats
        return generate_latest(self._registry)

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram with this name."""
        self._histograms[name].observe(value)

    def record_request(
        self, request: EngineRequest, reason: str, num_tokens: int, max_answer_tokens: int
    ) -> None:
        """Count a request that ended.

        Args:
            request: The request.
            reason: Finish reason of the request.
            num_tokens: Number of tokens of all its answers.
            max_answer_tokens: Number of tokens of its longest answer.
        """
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
    """Measures the tokens and times of one request for the metrics."""

    def __init__(self, metrics: Metrics, request: EngineRequest):
        self._metrics, self._request = metrics, request
        self._start_time = self._last_token_time = time.monotonic()
        self._num_tokens = 0
        self._num_tokens_by_answer = TokenCounter[int]()
        self._is_over = False

    def record_delta(self, delta: RequestDelta) -> None:
        """Record the new tokens of the request and, if the request has finished, its end."""
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
        """Record the end of the request, unless it is recorded already or `reason` is "refused"."""
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
        """Record how long each phase of the request took. The engine measured `times`."""
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
    """Histogram of values per token, at a tenth of the cost of `prometheus_client.Histogram`.

    Only one thread may use it.
    """

    def __init__(
        self, name: str, documentation: str, buckets: Sequence[float], labels: dict[str, str]
    ):
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add a value to the first bucket whose upper bound is at least the value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @override
    def collect(self) -> Iterator[Metric]:
        # In Prometheus, the count of a bucket includes the counts of all lower buckets.
        family = HistogramMetricFamily(self._name, self._documentation, labels=[*self._labels])
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([*self._labels.values()], [*buckets], self._sum)
        yield family


class _EngineCollector(Collector):
    """Collects the metrics of the engine from its latest statistics."""

    def __init__(self, labels: dict[str, str]):
        self.stats: EngineStats | None = None
        self._labels = labels

    @override
    def collect(self) -> Iterator[Metric]:
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
        """Return the metric of waiting requests by reason. The reason "deferred" is always 0."""
        documentation = "Number of waiting requests by reason; the sum is num_requests_waiting."
        labels = [*self._labels, "reason"]
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", documentation, labels=labels
        )
        for reason, number in (("capacity", stats.num_waiting), ("deferred", 0)):
            family.add_metric([*self._labels.values(), reason], number)
        return family

    def _step_metric(self, stats: EngineStats) -> Metric:
        bounds = [*(f"{size:.1f}" for size in stats.STEP_SIZES), "+Inf"]
        documentation = "Number of tokens per step: prompt tokens computed and tokens sampled."
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", documentation, labels=[*self._labels]
        )
        buckets = [*zip(bounds, accumulate(stats.num_steps_by_size), strict=True)]
        family.add_metric([*self._labels.values()], buckets, stats.num_step_tokens)
        return family


def _build_1_2_5_buckets(max_value: int) -> tuple[int, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    bounds = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_value)
