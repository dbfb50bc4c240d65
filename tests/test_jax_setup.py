"""Recorded products reach XLA's own cache, once, and nothing there is overwritten."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jaxlib
import pytest

from jpaged import jax_setup

DEVICE = SimpleNamespace(device_kind="NVIDIA H2/00 X")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jax_setup, "AUTOTUNING", tmp_path)
    path = jax_setup.recorded_products(DEVICE)
    found = {"version/one": b"\x80fast", "version/two": b"faster"}
    path.write_text(json.dumps({name: b64encode(what).decode() for name, what in found.items()}))
    return path


def test_the_name_tells_device_and_versions(recorded: Path, monkeypatch: pytest.MonkeyPatch):
    assert recorded.name.startswith(f"NVIDIA_H2_00_X-{jaxlib.__version__}-")
    versions = {"nvidia-cublas-cu12": "12.9", "nvidia-cublas": "13.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise jax_setup.metadata.PackageNotFoundError
        return versions[name]

    monkeypatch.setattr(jax_setup.metadata, "version", version)
    assert jax_setup.recorded_products(DEVICE).name.endswith("-13.1.json")
    del versions["nvidia-cublas"]
    assert jax_setup.recorded_products(DEVICE).name.endswith("-12.9.json")


def test_what_was_recorded_is_where_xla_looks(cache: Path, recorded: Path):
    folder = jax_setup.autotuning_folder(cache)
    (folder / "version").mkdir(parents=True)
    (folder / "version" / "two").write_bytes(b"own")
    for _ in range(2):
        jax_setup.offer_recorded_products(DEVICE)
        files = {str(f.relative_to(folder)): f.read_bytes() for f in folder.glob("*/*")}
        assert files == {"version/one": b"\x80fast", "version/two": b"own"}


def test_without_a_record_or_a_cache_nothing_is_written(cache: Path, recorded: Path):
    jax_setup.offer_recorded_products(SimpleNamespace(device_kind="another"))
    assert not cache.exists()
    jax.config.update("jax_compilation_cache_dir", None)
    jax_setup.offer_recorded_products(DEVICE)
    assert not cache.exists()


def test_a_cache_that_is_no_folder_is_left_alone(
    recorded: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(recorded.parent)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket")
    jax_setup.offer_recorded_products(DEVICE)
    assert not (recorded.parent / "gs:").exists()


def test_a_folder_that_cannot_be_written_stops_nothing(cache: Path, recorded: Path):
    cache.write_text("a file")
    jax_setup.offer_recorded_products(DEVICE)
    assert cache.read_text() == "a file"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"one": 1}',
        b'{"one": "?"}',
        b'{"../one": ""}',
        b'{"/one": ""}',
        b'{"a/../../one": ""}',
        b'{"one\\u0000": ""}',
        b'{"": ""}',
    ],
)
def test_a_damaged_record_is_told_and_nothing_of_it_is_written(
    content: bytes, cache: Path, recorded: Path
):
    recorded.write_bytes(content)
    with pytest.warns(UserWarning, match=re.escape(str(recorded))):
        jax_setup.offer_recorded_products(DEVICE)
    assert not cache.exists()


def test_what_is_shipped_can_be_read():
    records = [*jax_setup.AUTOTUNING.iterdir()]
    assert records
    for path in records:
        assert all(jax_setup.read_record(path).values())


def test_what_cannot_be_put_in_place_leaves_nothing_half_done(
    cache: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", fail)
    jax_setup.offer_recorded_products(DEVICE)
    assert not [file for file in cache.rglob("*") if file.is_file()]
