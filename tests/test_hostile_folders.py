"""Test that an engine refuses an invalid model folder quickly, using little memory."""

import json
import os
import resource
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged import Engine
from jpaged.config import EMBEDDED_MODEL
from jpaged.engine.startup import end_token_ids

SECONDS = 60
"""Maximum seconds for refusing a folder on a busy machine."""

SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "head_dim", "vocab_size"]
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {name: 10**9} for name in [*SIZES, "num_attention_heads"]},
    "num_key_value_heads": {"num_attention_heads": 10**4, "num_key_value_heads": 10**9},
    "max_position_embeddings": {"max_position_embeddings": 10**12},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


def refusal(folder: Path, **options: Any) -> str:
    """Return the error message of an engine start. Check that the failed start took little time and
    memory."""
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ValueError) as caught:
        Engine(folder, compilation_cache_dir=None, **options)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, "in KiB"
    assert time.monotonic() - begun < SECONDS
    return str(caught.value)


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("field", CHANGES)
def test_error_for_a_huge_size_names_its_config_field(folder: Path, field: str, load_format: str):
    change(folder, **CHANGES[field])
    assert f"{field}={CHANGES[field][field]} " in refusal(folder, load_format=load_format)


def test_error_names_the_config_size_that_differs_from_the_checkpoint(folder: Path):
    change(folder, num_hidden_layers=1000)
    assert "num_hidden_layers=1000, but the checkpoint has" in refusal(folder)
    change(folder, num_hidden_layers=6, vocab_size=2**23)
    assert "vocab_size=8388608" in refusal(folder)


def test_random_weights_larger_than_memory_are_refused(folder: Path):
    change(folder, hidden_size=2**20, vocab_size=2**24)
    error = refusal(folder, load_format="dummy")
    assert "the model's weights take" in error
    assert "vocab_size=16777216, hidden_size=1048576" in error


def test_pool_larger_than_memory_is_refused(folder: Path):
    assert "does not fit in this machine's memory" in refusal(folder, num_blocks=2**40)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_fifo_in_the_folder_is_refused(folder: Path, name: str):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is a FIFO" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]"])
def test_error_names_the_config_file_that_does_not_contain_a_json_object(
    folder: Path, name: str, content: str
):
    (folder / name).write_text(content)
    assert f"/{name} " in refusal(folder)


def test_end_token_ids_above_the_vocabulary_size_are_ignored():
    model: Any = SimpleNamespace(eos_token_ids=(258, 10**30), vocab_size=264)
    assert end_token_ids(model, {"eos_token_id": [256, 264, -1, "x"]}, None) == {258, 256}
