"""Engines shared by the end-to-end tests, and the census after each test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_options import LOOPS, SMALL, Engines

from jpaged import Engine


@pytest.fixture
def engines(kept_engines: Engines) -> Iterator[Engines]:
    """Makes (or reuses) an engine; after the test each one used has all its blocks back."""
    used: list[Engine] = []

    def make(model: str | Path | None = None, **options: Any) -> Engine:
        used.append(kept_engines(model, **{"num_blocks": 129, **SMALL, **options}))
        return used[-1]

    yield make
    for engine in used:
        engine.abort_all()
        engine.check_integrity()
        stats = engine.stats()
        if stats.num_free_blocks != stats.num_blocks:
            pytest.fail(f"blocks were lost: {stats}")


@pytest.fixture(params=[*LOOPS])
def engine(engines: Engines, request: pytest.FixtureRequest) -> Engine:
    """The embedded model's, in each loop."""
    return engines(**LOOPS[request.param])


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
        max_position_embeddings=256,
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
