"""Test that errors for options of speculative decoding name the option."""

from typing import Any

import pytest

from jpaged.config import EngineConfig, SpeculativeConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens=0 is out of"),
        ({"num_speculative_tokens": -1}, "speculative_config.num_speculative_tokens=-1"),
        ({"num_speculative_tokens": 8}, "it must be an integer from 1 to 7"),
        ({"num_speculative_tokens": "3"}, "speculative_config.num_speculative_tokens='3'"),
        ({"method": "eagle3"}, "speculative_config.method='eagle3' is not supported"),
        ({"prompt_lookup": 4}, "speculative_config.prompt_lookup is not supported"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5 is above prompt_lookup_max=4"),
        ([], "speculative_config=[] must be a dict"),
    ],
)
def test_error_for_an_invalid_field_names_the_field(fields: Any, message: str):
    with pytest.raises((TypeError, ValueError)) as error:
        EngineConfig.from_options("no/such/folder", {"speculative_config": fields})
    assert message in str(error.value)


def test_speculative_config_accepts_the_field_names_of_vllm():
    fields = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    config = EngineConfig.from_options(None, {"speculative_config": fields})
    assert config.speculation == SpeculativeConfig("ngram", 3, 4, 1)
    assert EngineConfig().speculation is None
