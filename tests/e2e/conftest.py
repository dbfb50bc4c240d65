"""Engines shared by the end-to-end tests, and the census after each test."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_options import LOOPS, SMALL, Engines
from lazy_programs import lazy_programs
from safetensors.numpy import load_file, save_file

from jpaged import Engine
from jpaged.config import EMBEDDED_MODEL


@pytest.fixture
def engines(kept_engines: Engines) -> Iterator[Engines]:
    """Makes (or reuses) an engine, which compiles each program when it is first called; after the
    test each one used has all its blocks back."""
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
    """Makes an engine of a test's own, which compiles each program when it is first called."""

    def make(model: str | Path | None = None, **options: Any) -> Engine:
        with lazy_programs():
            given = {"num_blocks": 129, **SMALL, **options}
            return Engine(model, compilation_cache_dir=compilation_cache, **given)

    return make


@pytest.fixture(params=[*LOOPS])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Engine:
    """The embedded model's, in each loop."""
    return engines(**LOOPS[request.param])


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the embedded model, with its tokenizer: compiled in a third of the
    time, for tests that compare answers and need no right ones."""
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
    """A random Qwen3 checkpoint without a tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)  # spread the logits, so that greedy choices are clear
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    return folder
