"""Test that grammar masks enforce JSON schemas that other projects published.

Each answer consists of random tokens that the masks allow. A JSON schema validator checks it."""

import json

import jsonschema
import pytest
from grammar_walks import walk

from bench.structured import published
from jpaged import StructuredOutputs

PUBLISHED = published()


def test_fifty_published_schemas_are_valid():
    assert len(PUBLISHED) == 50
    assert all(
        jsonschema.Draft202012Validator.check_schema(it) is None for it in PUBLISHED.values()
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_grammar_masks_enforce_published_schemas(name: str):
    spec = StructuredOutputs(json=PUBLISHED[name])
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(PUBLISHED[name], format_checker=checker)
    ended = [text for seed in range(3) if (text := walk(spec, seed, 1500)) is not None]
    assert ended
    for text in ended:
        validator.validate(json.loads(text))
