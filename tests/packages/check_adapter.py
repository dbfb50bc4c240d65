"""Check that an engine generates the tokens that a training package's own model predicts.

Run this script in an environment in which the package is installed, with jpaged in PYTHONPATH.
Usage: `python check_adapter.py MODULE`, where MODULE is a module of `examples`.
"""

import importlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import Engine, SamplingParams

PROMPTS, NUM_TOKENS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]], 24


def main(name: str) -> None:
    """Check that the engine and the training package's model give the same greedy tokens.

    The function also compares the log-probabilities of the tokens.

    Args:
        name: Name of a module of `examples`, such as "tunix_qwen3".
    """
    module = importlib.import_module(f"examples.{name}")
    settings = dict(jax.config.values)
    own = module.small_model()
    model, params = module.adapt(own)
    options = {"num_blocks": 33, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    cache = {"compilation_cache_dir": tempfile.mkdtemp()}
    engine = Engine(model, params=params, max_model_len=64, **options, **cache)
    assert dict(jax.config.values) == settings
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        found = output.outputs[0]
        tokens = jnp.asarray([*prompt, *found.token_ids], jnp.int32)
        logprobs = np.asarray(jax.nn.log_softmax(module.own_logits(own, tokens)))
        start = len(prompt) - 1
        rows = logprobs[start : start + NUM_TOKENS]
        assert [*found.token_ids] == rows.argmax(axis=1).tolist(), (found.token_ids, rows)
        scored = [
            entry[token].logprob
            for entry, token in zip(found.logprobs or (), found.token_ids, strict=True)
        ]
        np.testing.assert_allclose(scored, rows.max(axis=1), atol=1e-4)
        print(len(set(found.token_ids)), "distinct tokens")
    print("equal")


if __name__ == "__main__":
    main(sys.argv[1])
