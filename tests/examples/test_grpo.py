"""Test the example that trains the bundled model while an engine samples."""

import jax
import pytest

from examples.grpo import reward_of, train

pytestmark = pytest.mark.full


def test_reward_increases_and_scored_logprobs_equal_sampled_logprobs():
    # The model multiplies rows [T, D] by a vector [D], which JAX refuses with the tests' settings.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        results = list(train(num_steps=3, num_prompts=8, num_samples=8, seed=0))
    assert results[-1].reward > results[0].reward + 0.1
    assert [it.scoring_difference for it in results] == [0.0] * 3
    assert all(0 < it.trainer_difference < 1e-3 for it in results)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("\n1, 2, 3, 4", 1.0),
        ("1, 2, 4, 3", 0.5),
        ("1, 2", 0.5),
        ("1, 2, 3, 4, 5, 6, 7, 8", 0.5),
        ("4", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_the_fraction_of_the_numbers_before_the_first_wrong_number(
    text: str, reward: float
):
    assert reward_of(text, ["1", "2", "3", "4"]) == reward
