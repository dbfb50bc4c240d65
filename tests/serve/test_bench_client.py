"""The open-loop client of `bench.serving` against the real server."""

import json
from pathlib import Path

import pytest
from server_process import ServerProcess

from bench import records, serving

pytestmark = pytest.mark.slow


def test_it_measures_the_real_server(
    tmp_path: Path,
    real_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    target = ["--url", f"{real_server.url}/v1", "--rate", "20,inf", "--num-requests", "6"]
    target += ["--max-tokens", "24", "--device", "cpu"]
    assert serving.main([*target, "--model", "another"]) == 1
    assert serving.main([*target, "--model", "jpaged-tiny"]) == 0
    said = capsys.readouterr()
    assert "6 requests: status 404: the model 'another' does not exist" in said.err
    document = json.loads((tmp_path / "serving_cpu.json").read_text())
    assert [row["rate"] for row in document["rows"]] == [20.0, "inf"]
    for row in document["rows"]:
        assert (row["requests"], row["errors"]) == (6, 0)
        assert 0 < row["normalised_ms_p50"] <= row["normalised_ms_p90"] <= row["normalised_ms_p99"]
        assert row["ttft_ms_p50"] < 1e3 * row["seconds"]
        assert row["output_tokens_per_s"] > 0
