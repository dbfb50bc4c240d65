"""The open-loop client of `bench.serving` against the real server."""

import json
from pathlib import Path

import pytest
from browsing import serving as real_server

from bench import records, serving

pytestmark = pytest.mark.slow


def test_it_measures_the_real_server(
    tmp_path: Path,
    compilation_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    arguments = ["--rate", "20,inf", "--num-requests", "6", "--max-tokens", "24", "--device", "cpu"]
    with real_server(compilation_cache, "--api-key", "secret") as address:
        target = ["--url", f"{address}/v1", *arguments]
        assert serving.main(target) == 1  # without the key
        assert serving.main([*target, "--api-key", "secret", "--model", "jpaged-tiny"]) == 0
    said = capsys.readouterr()
    assert "6 requests: status 401" in said.err
    rows = json.loads((tmp_path / "serving_cpu.json").read_text())["rows"]
    assert [row["rate"] for row in rows] == [20.0, "inf"]
    for row in rows:
        assert (row["requests"], row["errors"]) == (6, 0)
        assert 0 < row["normalised_ms_p50"] <= row["normalised_ms_p90"] <= row["normalised_ms_p99"]
        assert row["ttft_ms_p50"] < 1e3 * row["seconds"]
        assert row["output_tokens_per_s"] > 0
