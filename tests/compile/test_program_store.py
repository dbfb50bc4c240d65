"""Test the store of lowered programs: keys, damaged files, failed writes and pruning."""

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental.compilation_cache import compilation_cache

from jpaged.compile.builder import lower
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import ProgramStore
from jpaged.runtime import step_programs
from pallas_kernels.gemm import tuning

DEVICE = jax.local_devices()[0]


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Path]:
    """Set JAX's compilation cache to an empty folder in which JAX stores every compiled program,
    and return the folder."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}
    _set_jax_cache(settings)
    yield tmp_path / "jax"
    _set_jax_cache(before)


def _set_jax_cache(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads these settings only once


def make_store(folder: Path, made_from: object = "a model") -> ProgramStore:
    return ProgramStore(folder / "programs", made_from, DEVICE)


def recipe(size: int = 4) -> Recipe:
    def add(state, x):
        return {"sum": state["a"] + x}

    shape = jax.ShapeDtypeStruct((size,), jnp.float32)
    return Recipe(("add", size), add, ({"a": shape}, shape), donate=("state",))


def save(store: ProgramStore, made: Recipe) -> None:
    store.save(made.key, made.exported())


def save_bytes(store: ProgramStore, key: str, payload: bytes) -> None:
    """Save a program whose serialization is `payload`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.Exported, "serialize", lambda _: payload)
        store.save(key, recipe().exported())


def test_stored_program_gives_the_same_results(tmp_path: Path):
    save(make_store(tmp_path), recipe())
    program: Any = recipe().compile(make_store(tmp_path).load(recipe().key))
    a = jnp.arange(4, dtype=jnp.float32)
    total = program({"a": a}, jnp.ones(4, jnp.float32))["sum"]
    assert total.tolist() == [1, 2, 3, 4]
    assert a.is_deleted()  # still donated


def test_second_start_traces_and_compiles_nothing(tmp_path: Path, jax_cache: Path):
    traced = []

    def start() -> Any:
        def step(x):
            traced.append(x)
            return 3 * x

        made = Recipe(("triple", None), step, (jax.ShapeDtypeStruct((5,), jnp.int32),))
        program: Any = lower(made, make_store(tmp_path)).compile()
        return program(jnp.arange(5, dtype=jnp.int32)).tolist()

    first, files = start(), sorted(jax_cache.glob("jit_step-*-cache"))
    assert (len(traced), len(files)) == (1, 1)
    assert start() == first == [0, 3, 6, 9, 12]
    assert (len(traced), sorted(jax_cache.glob("jit_step-*-cache"))) == (1, files)
    for file in (tmp_path / "programs").iterdir():
        file.write_bytes(b"damaged")
    assert start() == first
    assert (len(traced), sorted(jax_cache.glob("jit_step-*-cache"))) == (2, files)


def test_program_key_depends_on_shapes_model_code_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(make_store(tmp_path), recipe())
    assert make_store(tmp_path).load(recipe(8).key) is None
    assert make_store(tmp_path, "another model").load(recipe().key) is None
    splits = tuning.num_splits
    step = replace(step_programs.PROGRAMS["mask"], function=lambda logits, allowed: logits)
    for change in (
        lambda patch: patch.setattr(tuning, "num_splits", lambda gemm: 2 * splits(gemm)),
        lambda patch: patch.setattr(tuning, "MIN_SPLIT_DEPTH", 256),
        lambda patch: patch.setitem(cast(dict, step_programs.PROGRAMS), "mask", step),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_example=1"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert make_store(tmp_path).load(recipe().key) is None
    with jax.default_matmul_precision("highest"):
        assert make_store(tmp_path).load(recipe().key) is None
    with monkeypatch.context() as patch:  # programs do not depend on these variables
        patch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
        assert make_store(tmp_path).load(recipe().key) is not None
    assert make_store(tmp_path).load(recipe().key) is not None


def test_program_key_depends_on_the_device_its_cores_and_its_memory(tmp_path: Path):
    def store(**changes: Any) -> ProgramStore:
        facts = {"client": DEVICE.client, "device_kind": "a GPU", "core_count": 132, "share": 7}
        facts |= changes
        stats = {"bytes_limit": facts.pop("share")}
        device = SimpleNamespace(**facts, memory_stats=lambda: stats)
        return ProgramStore(tmp_path, "a model", device)

    save(store(), recipe())
    assert store(core_count=66).load(recipe().key) is None
    assert store(share=8).load(recipe().key) is None  # XLA's scheduling depends on the memory limit
    assert store(device_kind="another GPU").load(recipe().key) is None
    assert store().load(recipe().key) is not None


@pytest.mark.parametrize(
    "part",
    [slice(0, -7), slice(0, 0), slice(1, None)],
    ids=["without its end", "empty", "without its beginning"],
)
def test_truncated_program_file_is_not_loaded(tmp_path: Path, part: slice):
    save(make_store(tmp_path), recipe())
    (file,) = (tmp_path / "programs").iterdir()
    file.write_bytes(file.read_bytes()[part])
    assert make_store(tmp_path).load(recipe().key) is None


def test_invalid_program_file_gives_a_warning(tmp_path: Path):
    store = make_store(tmp_path)
    save_bytes(store, recipe().key, b"no program")
    with pytest.warns(UserWarning, match="traced again"):
        assert store.load(recipe().key) is None


def test_unwritable_store_folder_gives_one_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    (tmp_path / "programs").write_text("a file")
    store = make_store(tmp_path)
    for size in (4, 8):
        save(store, recipe(size))
    assert [str(warning.message)[:23] for warning in recwarn] == ["programs are not stored"]


def test_read_only_store_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(make_store(tmp_path), recipe())
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError("read-only")))
    assert make_store(tmp_path).load(recipe().key) is not None


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(make_store(tmp_path), recipe())
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("no space left")))
    with pytest.warns(UserWarning, match="no space left"):
        save(make_store(tmp_path), recipe(8))
    assert len([*(tmp_path / "programs").iterdir()]) == 1


def test_store_folder_is_private_to_the_user(tmp_path: Path):
    save(make_store(tmp_path), recipe())
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700


def test_load_or_compute_computes_a_number_only_if_the_store_lacks_it(tmp_path: Path):
    assert make_store(tmp_path).load_or_compute("bytes", lambda: 42) == 42
    unused = functools.partial(pytest.fail, "computed again")
    assert make_store(tmp_path).load_or_compute("bytes", unused) == 42
    save_bytes(make_store(tmp_path), "bytes", b"no number")
    assert make_store(tmp_path).load_or_compute("bytes", lambda: 43) == 43


def test_least_recently_used_files_are_deleted_first(tmp_path: Path):
    store = make_store(tmp_path)
    for size in (4, 8, 16):
        save(store, recipe(size))
    assert store.load(recipe(4).key) is not None
    files = sorted((tmp_path / "programs").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    store.prune(sum(file.stat().st_size for file in files) - 1)
    assert store.load(recipe(8).key) is None
    assert store.load(recipe(4).key) is not None
    assert store.load(recipe(16).key) is not None


def test_program_with_a_unique_name_is_not_loaded_from_the_jax_cache(jax_cache: Path):
    recipe(32).compile()
    for count in (2, 3):
        recipe(32).with_unique_name().compile()
        assert len([*jax_cache.glob("*-cache")]) == count
    a = jnp.zeros(32, jnp.float32)
    recipe(32).with_unique_name().compile()({"a": a}, jnp.ones(32, jnp.float32))
    assert a.is_deleted()  # still donated
