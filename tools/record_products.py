"""Record XLA's autotuning results for the shapes of published models on this machine's GPU.

    python -m tools.record_products

XLA times several implementations of each GEMM and fusion on the device. This takes most of a cold
start, and concurrent compilation makes the timings worse. So the tool first compiles the programs
with GEMMs one by one, and records the results. An engine without these results would time only a
few GEMMs. Then an engine with the same model shape starts in one process and compiles the other
programs. The results replace the record in `jpaged/assets/autotuning/` for this kind of device and
these versions of XLA and cuBLAS. `jpaged.compile.gemm_autotuning` reads the record when an engine
starts.
"""

import argparse
import itertools
import json
import tempfile
import time
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.common import ALL_SHAPES, AS_VLLM, FORMATS, SHAPES, add_format_option, make_engine
from jpaged.compile.gemm_autotuning import (
    EMPTY_RECORD,
    GemmRecord,
    autotuning_folder,
    gemm_record_path,
    read_record,
    weights_digest,
)
from jpaged.compile.recipes import Recipe, Recipes
from jpaged.compile.sizing import GPU_DEFAULTS, resolve_limits, with_pool
from jpaged.compile.store import prepare_jax
from jpaged.config import EngineConfig
from jpaged.models.config import FP8_DTYPE, ModelConfig
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.models.weight_plan import make_abstract_model
from jpaged.runtime.peer_memory import can_use_peer_memory
from jpaged.runtime.programs import DeviceShapes, SplitModel
from pallas_kernels import Backend, select_backend

DTYPE = jnp.dtype(jnp.bfloat16)
NUM_BLOCKS = 4096
"""Number of blocks of the pool. The GEMMs do not depend on this number."""

_RESULTS = (".pb", ".textproto")
"""Suffixes of XLA's autotuning files. An interrupted process may leave other files behind."""


def model_of(shape: str, form: str) -> ModelConfig:
    """Return the configuration of a published model in a data format.

    `shape` names the model (a key of `bench.common.ALL_SHAPES`), and `form` names the data types of
    the weights and the KV cache (a key of `bench.common.FORMATS`).
    """
    options = FORMATS[form]
    model = read_model_config(ALL_SHAPES[shape], options.get("quantization"))
    return replace(model, kv_cache_dtype=FP8_DTYPE) if "kv_cache_dtype" in options else model


def all_recipes(shape: str, num_devices: int = 1, form: str = "bf16") -> Recipes:
    """Return the compilation inputs (`Recipe`) of all programs that an engine compiles for a model.

    See `model_of` for `shape` and `form`. The function allocates no arrays.
    """
    model = model_of(shape, form)
    options: dict[str, Any] = AS_VLLM | FORMATS[form]
    config = EngineConfig(**options)
    limits = resolve_limits(
        config,
        model_max_len=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        backend=Backend.TRITON,
        defaults=GPU_DEFAULTS,
    )
    mesh = make_mesh(jax.devices(), num_devices)
    through_peers = num_devices > 1 and can_use_peer_memory(jax.devices()[:num_devices], DTYPE)
    runtime = replace(with_pool(limits, NUM_BLOCKS, config), has_peer_memory=through_peers)
    split = SplitModel.of(make_abstract_model(model, DTYPE, mesh))
    return Recipes(split, DeviceShapes.of(model.shard(num_devices), runtime, DTYPE, mesh), runtime)


def first_of_each_products(shape: str, num_devices: int = 1, form: str = "bf16") -> list[Recipe]:
    """Choose one program for each distinct set of GEMMs of a model, and return the compilation
    inputs (`Recipe`) of the chosen programs."""
    chosen: dict[object, Recipe] = {}
    for recipe in all_recipes(shape, num_devices, form):
        if recipe.gemm_key is not None:
            chosen.setdefault(recipe.gemm_key, recipe)
    return list(chosen.values())


def rows_measured(shape: str, num_devices: int = 1, form: str = "bf16") -> dict[str, list[int]]:
    """Return a dict with one item: the numbers of rows for which a model's GEMMs are measured.

    The key is a digest of the shapes and dtypes of the weights that one device holds. The value is
    the sorted list of the numbers of rows.
    """
    recipes = all_recipes(shape, num_devices, form)
    rows = {recipe.gemm_key[1] for recipe in recipes if recipe.gemm_key is not None}
    mesh = make_mesh(jax.devices(), num_devices)
    model = make_abstract_model(model_of(shape, form), DTYPE, mesh)
    return {weights_digest(SplitModel.of(model).shard_leaves): sorted(rows)}


def measure(
    shape: str, cache: str, path: Path, record: GemmRecord, num_devices: int = 1, form: str = "bf16"
) -> GemmRecord:
    """Let XLA autotune the GEMMs one by one. Then start an engine, so that XLA autotunes everything
    else.

    Returns:
        `record` with the new results added. The function also writes it to `path`.
    """
    begin, chosen = time.perf_counter(), first_of_each_products(shape, num_devices, form)
    for recipe in chosen:
        # Compile the exported program, as an engine does when it starts.
        recipe.compile(recipe.exported())
    quiet = time.perf_counter() - begin
    rows = {**record.rows, **rows_measured(shape, num_devices, form)}
    products = results(Path(cache))
    write_record(path, GemmRecord(rows, {**record.results, **products}))
    options = {"tensor_parallel_size": num_devices, **FORMATS[form]}
    make_engine(shape, compilation_cache_dir=cache, num_compile_workers=0, **options)
    whole, found = time.perf_counter() - begin, results(Path(cache))
    print(
        f"{shape}, {form} on {num_devices}: {len(chosen)} programs one by one in {quiet:.1f} s, "
        f"{len(products)} measurements by then; {len(found)} after an engine's start, "
        f"{whole:.1f} s in all",
        flush=True,
    )
    record = GemmRecord(rows, {**record.results, **found})
    write_record(path, record)
    return record


def results(cache: Path) -> dict[str, bytes]:
    """Return {relative path: content} of XLA's autotuning files in a compilation cache."""
    folder = autotuning_folder(cache)
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix in _RESULTS and not file.name.startswith(".") and file.parent.name != "tmp"
    )
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def write_record(path: Path, record: GemmRecord) -> None:
    """Write a record with one line per entry."""
    results = {name: b64encode(record.results[name]).decode() for name in sorted(record.results)}
    rows = "".join(f"\n{json.dumps(m)}: {json.dumps(record.rows[m])}," for m in sorted(record.rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{{"rows": {{{rows.rstrip(",")}\n}},\n"results": {json.dumps(results, indent=0)}}}\n',
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*ALL_SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument(
        "--add", action="store_true", help="keep the recorded results of other models"
    )
    what = "numbers of tensor-parallel devices to record (1)"
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1], help=what)
    add_format_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        prepare_jax(EngineConfig(compilation_cache_dir=cache))
        if select_backend(jax.default_backend()) is not Backend.TRITON:
            raise SystemExit(f"this needs an NVIDIA GPU; JAX sees only {jax.default_backend()!r}")
        path = gemm_record_path(jax.local_devices()[0])
        record = read_record(path) if args.add and path.is_file() else EMPTY_RECORD
        asked = itertools.product(args.model, args.tensor_parallel_size, args.format)
        for shape, num_devices, form in asked:
            record = measure(shape, cache, path, record, num_devices, form)
    print(f"{path}: {len(record.results)} measurements, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
