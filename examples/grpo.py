"""Train the bundled model by reinforcement learning, in the process of the engine that samples.

    python -m examples.grpo --steps 12 --plot reward.png

The bundled model was trained to sort up to 8 numbers, and sorts 12 numbers badly. Each step has
four parts:

1. The engine samples several answers to each question.
2. `score_completions` computes the log-probabilities of the answers again.
3. GRPO (Group Relative Policy Optimization, arXiv:2402.03300) updates the weights, with
   `reward_of` as the reward of an answer.
4. `engine.update_weights` gives the new weights to the engine. Nothing is compiled again.

The engine is batch-invariant, so parts 1 and 2 give log-probabilities with the same bits. Part 3
uses plain JAX, which rounds differently. Each step prints how far parts 2 and 3 are from part 1.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.plain_jax_llama import load
from jpaged import CompletionOutput, Engine, SamplingParams
from jpaged.config import EMBEDDED_MODEL

PARTS: list[str] = ["rollout", "scoring", "update", "hand-over"]
# Maximum number of tokens of a prompt and its answer together.
MAX_LEN = 160
# GRPO clips the ratio (new probability / old probability of a token) to 1 - CLIP ... 1 + CLIP:
# further improvements of the ratio have no gradient.
CLIP = 0.2


class StepResult(NamedTuple):
    """Results of a training step.

    Attributes:
        reward: Mean reward of the answers.
        exact: Share of the answers that are completely right, from 0 to 1.
        scoring_difference: Largest difference between the log-probability with which a token was
            sampled and the log-probability that `score_completions` returns for the token.
        trainer_difference: Largest difference between the log-probability with which a token was
            sampled and the log-probability that the trainer's forward computes for the token.
        seconds: Duration of each part of the step, by the name of the part.
    """

    reward: float
    exact: float
    scoring_difference: float
    trainer_difference: float
    seconds: dict[str, float]


class CausalAttention:
    """Replacement for the object `step` that the engine passes to a model's `forward`. It computes
    attention over one whole sequence, without a KV cache."""

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Return causal attention: every token attends to itself and to the tokens before it."""
        del layer
        return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def make_question(rng: random.Random) -> tuple[str, list[str]]:
    """Return a prompt with random numbers to sort, and the sorted numbers."""
    numbers = rng.sample(range(1, 1000), 12)
    return f"Sort {', '.join(map(str, numbers))}\n", [str(it) for it in sorted(numbers)]


def reward_of(text: str, solution: list[str]) -> float:
    """Return (right numbers before the first wrong number) / (length of the longer list)."""
    found = text.strip().split(", ")
    is_wrong = [a != b for a, b in zip(found, solution, strict=False)]
    num_right = is_wrong.index(True) if True in is_wrong else len(is_wrong)
    return num_right / max(len(found), len(solution))


def make_batch(
    samples: list[tuple[Sequence[int], CompletionOutput]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays about B answers with their prompts, padded to L = MAX_LEN tokens.

    The arrays are: the tokens of prompt and answer [B, L]; for each token but the first, whether it
    was sampled [B, L - 1]; and the log-probability with which it was sampled [B, L - 1].
    """
    tokens = np.zeros((len(samples), MAX_LEN), np.int32)
    is_sampled = np.zeros((len(samples), MAX_LEN - 1), bool)
    logprobs = np.zeros((len(samples), MAX_LEN - 1), np.float32)
    for row, (prompt, answer) in enumerate(samples):
        start, end = len(prompt), len(prompt) + len(answer.token_ids)
        tokens[row, :end] = [*prompt, *answer.token_ids]
        is_sampled[row, start - 1 : end - 1] = True
        logprobs[row, start - 1 : end - 1] = answer.token_logprobs
    return tokens, is_sampled, logprobs


def train(num_steps: int, num_prompts: int, num_samples: int, seed: int) -> Iterator[StepResult]:
    """Train the bundled model, and yield the result of each step."""
    model, params = load(EMBEDDED_MODEL)
    options: dict[str, Any] = {"batch_invariant": True, "max_num_seqs": num_prompts * num_samples}
    engine = Engine(None, dtype="float32", max_model_len=MAX_LEN, **options)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))

    def logprobs_of(params, tokens):  # log-probabilities of tokens[1:]
        hidden = model.forward(params, tokens, jnp.arange(len(tokens)), CausalAttention())
        logprobs = jax.nn.log_softmax(model.logits(params, hidden)[:-1])
        return jnp.take_along_axis(logprobs, tokens[1:, None], axis=-1)[:, 0]

    def loss(params, tokens, is_sampled, sampled_logprobs, advantages):
        logprobs = jax.vmap(logprobs_of, (None, 0))(params, tokens)
        change = jnp.where(is_sampled, logprobs - sampled_logprobs, 0.0)
        ratio, advantages = jnp.exp(change), advantages[:, None]
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        return -jnp.sum(gain * is_sampled) / jnp.sum(is_sampled), jnp.max(jnp.abs(change))

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, *batch):
        gradients, difference = jax.grad(loss, has_aux=True)(params, *batch)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, difference

    state, rng = optimizer.init(params), random.Random(seed)
    for step in range(num_steps):
        times = [time.perf_counter()]
        prompts, solutions = zip(*[make_question(rng) for _ in range(num_prompts)], strict=True)
        sampling = SamplingParams(n=num_samples, max_tokens=72, seed=seed + step, logprobs=0)
        outputs = engine.generate(list(prompts), sampling, use_tqdm=False)
        samples = [(it.prompt_token_ids, answer) for it in outputs for answer in it.outputs]
        times.append(time.perf_counter())

        pairs = [(list(prompt), list(answer.token_ids)) for prompt, answer in samples]
        scores = engine.score_completions(*map(list, zip(*pairs, strict=True)), use_tqdm=False)
        scored = np.concatenate([score.logprobs for score in scores])
        sampled = np.concatenate([np.asarray(answer.token_logprobs) for _, answer in samples])
        scoring_difference = np.abs(scored - sampled).max()
        times.append(time.perf_counter())

        graded = zip(outputs, solutions, strict=True)
        rewards = [[reward_of(it.text, right) for it in out.outputs] for out, right in graded]
        rewards = np.array(rewards, np.float32)
        centered = rewards - rewards.mean(axis=1, keepdims=True)
        advantages = centered / (rewards.std(axis=1, keepdims=True) + 1e-4)
        batch = (*make_batch(samples), advantages.ravel())
        params, state, trainer_difference = jax.block_until_ready(update(params, state, *batch))
        times.append(time.perf_counter())

        engine.update_weights(params, version=step + 1)
        times.append(time.perf_counter())
        seconds = dict(zip(PARTS, np.diff(times).tolist(), strict=True))
        differences = float(scoring_difference), float(trainer_difference)
        yield StepResult(rewards.mean().item(), (rewards == 1).mean().item(), *differences, seconds)


def plot(results: list[StepResult], path: Path) -> None:
    """Write a plot of the mean reward and of the share of exact answers."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4))).subplots()
    axes.plot([it.reward for it in results], label="mean reward")
    axes.plot([it.exact for it in results], label="share of exact answers")
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Train the bundled model, and print the result of each step."""
    parser = argparse.ArgumentParser(description="Train the bundled model to sort 12 numbers.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8, help="questions per step")
    parser.add_argument("--samples", type=int, default=8, help="answers per question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="file to plot the reward to; needs matplotlib")
    args = parser.parse_args()
    results = []
    for result in train(args.steps, args.prompts, args.samples, args.seed):
        results.append(result)
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in result.seconds.items())
        print(
            f"step {len(results)}: reward {result.reward:.3f}, exact {result.exact:.2f}, "
            f"log-probabilities differ from scoring by {result.scoring_difference:g} and from the "
            f"trainer's forward by {result.trainer_difference:.1e}; {seconds}",
            flush=True,
        )
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
