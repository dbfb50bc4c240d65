"""Test `bench.serving`, a client that measures a server, against a server process."""

import json
from pathlib import Path

import pytest
from server_process import ServerProcess

from bench import records, serving


@pytest.mark.full
def test_serving_bench_measures_a_real_server(
    tmp_path: Path,
    real_server: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    target = ["--url", f"{real_server.url}/v1", "--rate", "20,inf", "--num-requests", "6"]
    target += ["--max-tokens", "24", "--device", "cpu", "--processes", "2"]
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
        assert row["through"] == "http"
        assert 0 < row["client_busy"] < 1.5


@pytest.mark.full
def test_serving_bench_measures_an_engine_with_and_without_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512}
    monkeypatch.setitem(serving.ALL_SHAPES, "small", {**serving.ALL_SHAPES["qwen3-0.6b"], **small})
    options = {"max_model_len": 128, "max_num_seqs": 8, "num_blocks": 65}
    options |= {"max_num_batched_tokens": 64, "compilation_cache_dir": str(tmp_path / "compiled")}
    monkeypatch.setattr(serving, "AS_VLLM", {**options, "enable_prefix_caching": False})
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    asked = ["--shape", "small", "--num-requests", "6", "--max-tokens", "16", "--rate", "50"]
    assert serving.main([*asked, "--processes", "1", "--device", "cpu"]) == 0
    http, engine = json.loads((tmp_path / "serving_cpu.json").read_text())["rows"]
    assert (http["through"], engine["through"]) == ("http", "engine")
    for row in (http, engine):
        assert (row["requests"], row["errors"]) == (6, 0)
        assert row["output_tokens_per_s"] > 0
        assert row["ttft_ms_p50"] <= row["normalised_ms_p99"] * 16
