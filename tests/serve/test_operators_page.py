"""Test docs/operators.md against the server."""

import argparse
import re
from pathlib import Path

from bench.serving import build_parser as bench_parser
from jpaged import EngineStats, SamplingParams
from jpaged.serve.dashboard.broadcast import MAX_VIEWERS
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS
from jpaged.serve.http.connections import NUM_SPARE_CONNECTIONS
from jpaged.serve.http.metrics import Metrics
from jpaged.serve.options import build_parser

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
RAY_EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
UNDOCUMENTED_FLAGS = {"--help", "--version"}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    heads = re.findall(r"^  (-.+?)(?:  |$)", parser.format_help(), re.M)
    return {flag for head in heads for flag in re.findall(r"--[\w-]+", head)}


def test_operators_page_lists_every_flag():
    told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    own = flags_of(build_parser())
    assert own - told <= UNDOCUMENTED_FLAGS
    # Read the example instead of importing it, because it needs Ray.
    code = RAY_EXAMPLE.read_text(encoding="utf-8")
    of_example = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', code))
    assert of_example <= told
    assert told - own <= flags_of(bench_parser()) | of_example


def test_metrics_on_the_operators_page_exist():
    stats = EngineStats(16, 8, 8, 0)
    metrics = Metrics("m", max_model_len=64, block_size=16, num_blocks=9)
    metrics.record_request(EngineRequest("r", [1], SamplingParams(max_tokens=2)), "stop", 1, 1)
    text = metrics.text(stats).decode()
    told = set(re.findall(r"`((?:vllm|jpaged):\w+)`", PAGE))
    assert len(told) > 15
    for name in told:
        assert re.search(rf"^{name}(?:_count)?{{", text, re.M), name


def test_limits_and_paths_on_the_operators_page_are_correct():
    assert f"{MAX_VIEWERS} pages" in PAGE
    assert f"beyond {NUM_SPARE_CONNECTIONS} more" in PAGE
    assert all(f"`{path}`" in PAGE for path in UNAUTHENTICATED_PATHS)
