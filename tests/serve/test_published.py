"""What users see: the published schema, the names of metrics, and both command lines.

The files in `published/` are compared as they are committed. After a change that users are to see,
`python tests/serve/test_published.py` writes them anew, and the change shows in the commit.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from jpaged import EngineStats, SamplingParams
from jpaged.__main__ import build_parser as generate
from jpaged.serve.app import openapi
from jpaged.serve.messages import EngineRequest
from jpaged.serve.metrics import Metrics
from jpaged.serve.options import build_parser as serve

FOLDER = Path(__file__).parent / "published"


def schema() -> str:
    """`/openapi.json`, without jpaged's version."""
    document = openapi()
    document["info"].pop("version")
    return json.dumps(document, indent=1, sort_keys=True)


def metrics() -> str:
    """Names, meanings, labels and buckets of `/metrics`, without the values."""
    figures = Metrics("m", max_model_len=64, block_size=16, num_blocks=9)
    figures.ended(EngineRequest("r", [1], SamplingParams(max_tokens=2)), "stop", 1, 1)
    lines = figures.text(EngineStats(16, 8, 8, 0)).decode().splitlines()
    return "\n".join(line if line[0] == "#" else line.rpartition(" ")[0] for line in lines)


def help_of(parser: argparse.ArgumentParser) -> str:
    """What `--help` says, without its line breaks in the middle of a sentence."""
    with mock.patch.dict(os.environ, COLUMNS="10000"):
        said = parser.format_help()
    return "\n".join(" ".join(line.split()) for line in said.splitlines())


PUBLISHED: dict[str, Callable[[], str]] = {
    "openapi.json": schema,
    "metrics.txt": metrics,
    "jpaged_help.txt": lambda: help_of(generate()),
    "serve_help.txt": lambda: help_of(serve()),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_users_see_what_is_committed(name: str):
    assert f"{PUBLISHED[name]()}\n" == (FOLDER / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, made in PUBLISHED.items():
        (FOLDER / name).write_text(f"{made()}\n", encoding="utf-8")
