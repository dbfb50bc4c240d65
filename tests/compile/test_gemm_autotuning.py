"""Test how GEMM measurements that jpaged ships are copied to XLA's autotuning cache."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import jaxlib
import pytest

from bench.common import SHAPES, SPARSE
from jpaged.compile import gemm_autotuning
from jpaged.compile.gemm_autotuning import EMPTY_RECORD, GemmRecord, read_record, weights_digest
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import make_abstract_model
from jpaged.runtime.programs import SplitModel
from tools.record_products import rows_measured, write_record

DEVICE = SimpleNamespace(device_kind="NVIDIA H2/00 X")


@pytest.fixture
def cache(tmp_path: Path, jax_settings: None) -> Path:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gemm_autotuning, "AUTOTUNING_DIR", tmp_path)
    path = gemm_autotuning.gemm_record_path(DEVICE)
    results = {"version/two": b"faster", "version/one": b"\x80fast"}
    write_record(path, GemmRecord({"m": [8]}, results))
    return path


def test_file_name_of_gemm_measurements_contains_device_and_versions(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
):
    assert recorded.name.startswith(f"NVIDIA_H2_00_X-{jaxlib.__version__}-")
    versions = {"nvidia-cublas-cu12": "12.9", "nvidia-cublas": "13.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise gemm_autotuning.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(gemm_autotuning.metadata, "version", version)
    assert gemm_autotuning.gemm_record_path(DEVICE).name.endswith("-13.1.json")
    del versions["nvidia-cublas"]
    assert gemm_autotuning.gemm_record_path(DEVICE).name.endswith("-12.9.json")


def test_shipped_gemm_measurements_are_copied_to_the_folder_that_xla_reads(
    cache: Path, recorded: Path
):
    folder = gemm_autotuning.autotuning_folder(cache)
    (folder / "version").mkdir(parents=True)
    (folder / "version" / "two").write_bytes(b"own")
    for _ in range(2):
        assert gemm_autotuning.install_gemm_record(DEVICE).rows == {"m": [8]}
        files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.glob("*/*")}
        assert files == {"version/one": b"\x80fast", "version/two": b"own"}


def test_gemm_measurements_are_not_copied_for_another_device_or_without_a_cache_folder(
    cache: Path, recorded: Path
):
    another = SimpleNamespace(device_kind="another")
    assert gemm_autotuning.install_gemm_record(another) == EMPTY_RECORD
    assert not cache.exists()
    jax.config.update("jax_compilation_cache_dir", None)
    gemm_autotuning.install_gemm_record(DEVICE)
    assert not cache.exists()


def test_url_of_a_compilation_cache_is_not_used_as_a_folder(
    recorded: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(recorded.parent)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket")
    gemm_autotuning.install_gemm_record(DEVICE)
    assert not (recorded.parent / "gs:").exists()


def test_gemm_measurements_are_not_copied_to_a_cache_folder_that_is_not_writable(
    cache: Path, recorded: Path
):
    cache.write_text("a file")
    assert gemm_autotuning.install_gemm_record(DEVICE) == EMPTY_RECORD
    assert cache.read_text() == "a file"


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"\xff", b"[]", b"{}"),
        b'{"rows": {}, "results": []}',
        b'{"rows": {"m": 8}, "results": {}}',
        b'{"rows": {"m": ["8"]}, "results": {}}',
        *(
            b'{"rows": {}, "results": {%s}}' % result
            for result in (
                b'"one": 1',
                b'"one": "?"',
                b'"../one": ""',
                b'"/one": ""',
                b'"a/../../one": ""',
                b'"one\\u0000": ""',
                b'"": ""',
            )
        ),
    ],
)
def test_damaged_file_of_gemm_measurements_gives_a_warning_and_is_ignored(
    content: bytes, cache: Path, recorded: Path
):
    recorded.write_bytes(content)
    with pytest.warns(UserWarning, match=re.escape(str(recorded))):
        gemm_autotuning.install_gemm_record(DEVICE)
    assert not cache.exists()


def test_shipped_gemm_measurements_include_all_gemms_of_the_published_models():
    records = [read_record(path) for path in gemm_autotuning.AUTOTUNING_DIR.iterdir()]
    assert records
    for record in records:
        assert record.rows
        assert all(record.results.values())
        for shape in (*SHAPES, *SPARSE):
            for model, rows in rows_measured(shape).items():
                assert record.rows[model] == rows


def test_measurements_cover_a_model_only_if_every_gemm_of_the_model_was_measured():
    def leaf(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    leaves = [leaf(8, 16), leaf(8)]
    record = GemmRecord({weights_digest(leaves): [8, 16, 64]}, {})
    assert record.covers(reversed(leaves), {8, 64})
    assert not record.covers(leaves, {8, 32})
    assert not record.covers([leaf(8, 16), leaf(8, dtype="float16")], {8})
    assert not record.covers([leaf(8, 32), leaf(8)], {8})
    assert not EMPTY_RECORD.covers(leaves, {8})


def test_failed_copy_of_gemm_measurements_leaves_no_partial_file(
    cache: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("full")))
    gemm_autotuning.install_gemm_record(DEVICE)
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_gemm_measurements_of_a_model_are_valid_with_and_without_a_float8_kv_cache():
    config = read_model_config(SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2})
    narrow = replace(config, kv_cache_dtype="float8_e4m3fn")
    one, other = (
        SplitModel.of(make_abstract_model(it, jnp.dtype("bfloat16"))).shard_leaves
        for it in (config, narrow)
    )
    assert len(other) == len(one) + 4
    assert weights_digest(other) == weights_digest(one)
