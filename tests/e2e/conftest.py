"""Fixtures of the end-to-end tests: engines and checkpoints. After each test, the fixture `engines`
checks that all KV cache blocks are free."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_options import LOOPS, SMALL, Engines
from lazy_programs import lazy_programs
from random_models import Logits, load_logits, random_model
from safetensors.numpy import load_file, save_file

from jpaged import Engine
from jpaged.config import EMBEDDED_MODEL


@pytest.fixture
def engines(kept_engines: Engines) -> Iterator[Engines]:
    """Return a function that creates an engine or reuses one with the same options. Each program of
    the engine is compiled when it is first called. After the test, check that every block of every
    engine is free."""
    used: list[Engine] = []

    def make(model: str | Path | None = None, **options: Any) -> Engine:
        with lazy_programs():
            used.append(kept_engines(model, **{"num_blocks": 129, **SMALL, **options}))
        return used[-1]

    yield make
    for engine in used:
        engine.abort_all()
        engine.check_integrity()
        stats = engine.stats()
        if stats.num_free_blocks != stats.num_blocks:
            pytest.fail(f"blocks were lost: {stats}")


@pytest.fixture
def new_engine(compilation_cache: Path) -> Engines:
    """Return a function that creates an engine for one test only. Each program of the engine is
    compiled when it is first called."""

    def make(model: str | Path | None = None, **options: Any) -> Engine:
        with lazy_programs():
            options = {"num_blocks": 129, **SMALL, **options}
            return Engine(model, compilation_cache_dir=compilation_cache, **options)

    return make


@pytest.fixture(params=[*LOOPS])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Engine:
    """Return an engine with the model that ships with jpaged. A test with this fixture runs once
    for each engine loop in `LOOPS`."""
    return engines(**LOOPS[request.param])


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint with the first two layers of the model that ships with jpaged, and with the
    model's tokenizer. Return the folder of the checkpoint.

    Two layers compile in a third of the time of the whole model. The answers of two layers are
    wrong, so use the checkpoint only in tests that compare answers with each other.
    """
    folder = tmp_path_factory.mktemp("shallow")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    first = {n: it for n, it in tensors.items() if not re.search(r"layers\.([2-9]|\d\d)", n)}
    save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Qwen3 checkpoint without a tokenizer."""
    model = random_model(
        "qwen3",
        std=0.2,
        vocab_size=128,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen_logits(qwen_folder: Path) -> Logits:
    """Return a function that computes the logits of `qwen_folder` with `transformers`."""
    return load_logits(qwen_folder)
