"""Test what starting an engine changes: garbage collection, JAX options, and the compilation
cache."""

import gc
import re
import weakref
from pathlib import Path

import jax
import pytest

from jpaged.compile.store import CLIENT_VARIABLE, prepare_jax, with_usable_cache
from jpaged.config import EngineConfig
from jpaged.engine.startup import pause_garbage_collection


class Node:
    """An object that the garbage collector tracks."""

    itself: "Node"


@pytest.mark.parametrize("enabled", [True, False])
def test_engine_start_freezes_all_objects_if_garbage_collection_is_enabled(enabled: bool):
    """After an engine start, the garbage collector ignores all existing objects (`gc.freeze`).

    If the caller has disabled garbage collection, the start freezes no objects, and garbage
    collection stays disabled.
    """
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        before = Node()
        with pause_garbage_collection():
            assert not gc.isenabled()
            made = Node()
        assert gc.isenabled() is enabled
        assert is_tracked(before) is is_tracked(made) is not enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def is_tracked(node: Node) -> bool:
    return any(it is node for it in gc.get_objects())


def test_garbage_collector_still_tracks_objects_made_during_a_failed_engine_start():
    made: list[Node] = []

    def fail() -> None:
        with pause_garbage_collection():
            made.append(Node())
            raise ValueError("at the start")

    with pytest.raises(ValueError, match="at the start"):
        fail()
    assert gc.isenabled()
    assert is_tracked(made[0])


def test_engine_start_first_runs_the_garbage_collector():
    node = Node()
    node.itself = node  # A failed engine also has reference cycles.
    left = weakref.ref(node)
    del node
    with pause_garbage_collection():
        assert left() is None


def client_options_after_start(theirs: object) -> object:
    """Set JAX's client options to `theirs`, prepare the start of an engine, and return the client
    options."""
    name = "jax_pjrt_client_create_options"
    before = jax.config.values[name]
    jax.config.update(name, theirs)
    try:
        prepare_jax(EngineConfig(gpu_memory_utilization=0.25, compilation_cache_dir=None))
        return jax.config.values[name]
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("theirs", [{"memory_fraction": 0.5}, "memory_fraction:0.5"])
def test_engine_start_keeps_jax_client_options_that_the_user_has_set(theirs: object):
    assert client_options_after_start(theirs) == theirs


def test_tfrt_client_is_used_unless_the_environment_disables_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CLIENT_VARIABLE, raising=False)
    enabled = {"memory_fraction": 0.25, "use_tfrt_gpu_client": True}
    assert client_options_after_start(None) == enabled
    monkeypatch.setenv(CLIENT_VARIABLE, "0")
    assert client_options_after_start(None) == {"memory_fraction": 0.25}


def test_writable_cache_folder_is_created(tmp_path: Path):
    config = EngineConfig(compilation_cache_dir=tmp_path / "a" / "b")
    assert with_usable_cache(config) is config
    assert [*tmp_path.rglob("*")] == [tmp_path / "a", tmp_path / "a" / "b"]
    nowhere = EngineConfig(compilation_cache_dir=None)
    assert with_usable_cache(nowhere) is nowhere


@pytest.mark.parametrize("name", ["file", "file/folder", "a\0b", "a" * 300])
def test_unusable_cache_folder_raises_an_error_with_its_path(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    folder = tmp_path / name
    words = re.escape(f"compilation_cache_dir={str(folder)!r} cannot be written to (")
    with pytest.raises(ValueError, match=f"{words}.*: pass a writable folder, or None"):
        with_usable_cache(EngineConfig(compilation_cache_dir=folder))


@pytest.mark.parametrize("home", [".", "a" * 300])
def test_unwritable_home_disables_the_cache_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
):
    (tmp_path / ".cache").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    with pytest.warns(UserWarning, match=r"compilation_cache_dir='~/.*every start compiles all"):
        assert with_usable_cache(EngineConfig()).compilation_cache_dir is None


def test_read_only_cache_folder_is_used_with_a_warning():
    # No process can create files in /proc/self.
    config = EngineConfig(compilation_cache_dir="/proc/self")
    with pytest.warns(UserWarning, match="'/proc/self' cannot be written to .*not in the folder"):
        assert with_usable_cache(config) is config
