"""Test the tool that records XLA's GEMM autotuning; only the measurement needs a GPU."""

from pathlib import Path
from typing import Any

import jax
import pytest

from jpaged.compile.gemm_autotuning import GemmRecord, autotuning_folder, read_record
from tools import record_products
from tools.record_products import (
    all_recipes,
    first_of_each_products,
    measure,
    results,
    rows_measured,
)


def test_autotuning_files_are_found_and_temporary_files_are_ignored(tmp_path: Path):
    files = {
        "device/one.pb": b"\x80fast",
        "two.textproto": b"faster",
        "device/.tmp_one_7": b"",
        "device/.half.pb": b"",
        "tmp/three.textproto": b"",
    }
    for name, content in files.items():
        file = autotuning_folder(tmp_path) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    assert results(tmp_path) == dict(list(files.items())[:2])
    assert results(tmp_path / "none") == {}


def test_each_set_of_gemms_is_measured_once():
    chosen = [recipe.gemm_key or () for recipe in first_of_each_products("qwen3-0.6b")]
    decode, prefill = [8, 16, 32, 48, 64, 96, 128, 192, 256], [384, 512, 768, 1024, 1536]
    rows = [*decode, *prefill, 2048, 3072, 4096, 6144, 8192]
    # Decode steps need 64 rows of logits, and prompt log-probabilities need 256 rows.
    heads = [("head", 64), ("head", 256)]
    assert sorted(chosen) == [*heads, *(("layers", n) for n in rows)]


def test_gemms_of_tensor_parallel_shards_are_recorded_separately():
    alone, shared = (rows_measured("qwen3-0.6b", count) for count in (1, 2))
    assert [*alone.values()] == [*shared.values()]
    assert alone.keys().isdisjoint(shared)


@pytest.mark.full
def test_gemms_with_fp8_weights_are_recorded_separately():
    wide, narrow = (rows_measured("qwen3-0.6b", form=form) for form in ("bf16", "fp8"))
    assert [*wide.values()] == [*narrow.values()]
    assert wide.keys().isdisjoint(narrow)
    recipes = [*all_recipes("qwen3-0.6b", form="fp8")]
    pools = {
        leaf.dtype.name
        for recipe in recipes
        for leaf in jax.tree.leaves((recipe.arguments, recipe.keywords))
    }
    # An FP8 pool has the dtype uint16, because an element holds two FP8 numbers.
    assert "uint16" in pools


def test_gemms_are_recorded_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, found = tmp_path / "record.json", autotuning_folder(tmp_path) / "device"

    def start(shape: str, **options: Any) -> None:
        assert read_record(path).rows["a model"] == [8]
        # Concurrent compilations would distort the measurements.
        assert options["num_compile_workers"] == 0
        (found / "fusion.pb").write_bytes(b"native")

    found.mkdir(parents=True)
    (found / "product.pb").write_bytes(b"fast")
    monkeypatch.setattr(record_products, "first_of_each_products", lambda *_: [])
    monkeypatch.setattr(record_products, "rows_measured", lambda *_: {"a model": [8]})
    monkeypatch.setattr(record_products, "make_engine", start)
    kept = GemmRecord({"another": [16]}, {"device/kept.pb": b"kept", "device/product.pb": b"slow"})
    record = measure("shape", str(tmp_path), path, kept)
    assert record.rows == {"another": [16], "a model": [8]}
    assert record.results == {
        "device/kept.pb": b"kept",
        "device/product.pb": b"fast",
        "device/fusion.pb": b"native",
    }
    assert read_record(path) == record
