"""Time the steps of a GRPO training loop (`python -m bench.grpo`).

The trainer and the sampler share one process and one device, as in `examples/grpo.py`. A step has
four parts:

    rollout      sample `--samples` answers of `--answer-len` tokens to each prompt
    scoring      compute the log-probabilities of the answers again
    update       gradients of GRPO's loss (arXiv:2402.03300), and Adam
    hand-over    give the new weights to the sampler

The update is the same code in all systems. They differ in rollout, scoring and hand-over:

    jpaged       an `Engine`, `score_completions` and `update_weights`
    invariant    the same with `batch_invariant=True`
    contiguous   the decoder of `bench.contiguous`, which decodes greedily; scoring is the trainer's
                 own forward

The trainer has float32 weights and a forward in bfloat16 (`examples/plain_jax_llama.py`). Weights,
prompts and rewards are random. The first step compiles, and is not counted.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.common import SHAPES, make_engine, random_prompts, shape_folder
from bench.compare import parse_arguments
from bench.contiguous import Decoder, Request
from bench.contiguous_steps import Model
from bench.jax_model import make_config, make_tensors
from bench.records import print_table, record
from examples.grpo import CLIP, PARTS, CausalAttention
from examples.plain_jax_llama import make_model
from jpaged import SamplingParams
from jpaged.models.checkpoint import read_config
from jpaged.models.live_weights import ModelParameters
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import plan_model

SYSTEMS = ("jpaged", "invariant", "contiguous")
MAX_NUM_SEQS = 256
"""Maximum number of sequences that a sampler decodes at the same time."""

TokenLists = list[list[int]]


class Sampler(NamedTuple):
    """Functions that sample answers, score answers, and update the weights for sampling.

    Each function returns only after the device has finished.

    Attributes:
        sample: Returns `num_samples` consecutive answers per prompt, and the log-probabilities of
            the answers' tokens, or None if the sampling computes no log-probabilities.
        score: Returns the log-probabilities of answers to the prompts.
        update_weights: Gives the trainer's weights to the sampler.
    """

    sample: Callable[[TokenLists, int], tuple[TokenLists, np.ndarray | None]]
    score: Callable[[TokenLists, TokenLists], np.ndarray]
    update_weights: Callable[[dict[str, jax.Array]], None]


class Trainer:
    """A Llama in plain JAX with Adam.

    Args:
        config: Config of the model.
        params: Weights by name, in float32.
        lengths: Numbers of tokens of each prompt and of each answer.
        rows: Number of answers per forward and backward pass.
    """

    def __init__(
        self,
        config: dict[str, Any],
        params: dict[str, jax.Array],
        lengths: tuple[int, int],
        rows: int,
    ):
        self.params, self._rows = params, rows
        self._model, (self._prompt_len, self._answer_len) = make_model(config), lengths
        self._optimizer = optax.adam(1e-6)
        self._state = self._optimizer.init(params)
        self._jitted_score = jax.jit(
            lambda params, tokens: jax.lax.map(partial(self._logprobs, self._cast(params)), tokens)
        )
        self._jitted_update = jax.jit(self._update_step, donate_argnums=(0, 1))

    def score(self, prompts: TokenLists, answers: TokenLists) -> np.ndarray:
        """Return the log-probabilities of the answers' tokens, [answers, answer_len]."""
        return np.concatenate(self._jitted_score(self.params, self._batches(prompts, answers)))

    def update(
        self, prompts: TokenLists, answers: TokenLists, logprobs: np.ndarray, advantages: np.ndarray
    ) -> None:
        """Update the weights by GRPO's loss on all answers, and wait for the device."""
        shape = (-1, self._rows)
        batches = (
            self._batches(prompts, answers),
            logprobs.reshape(*shape, self._answer_len),
            advantages.reshape(shape),
        )
        self.params, self._state = self._jitted_update(self.params, self._state, batches)
        jax.block_until_ready(self.params)

    def _batches(self, prompts: TokenLists, answers: TokenLists) -> np.ndarray:
        tokens = np.concatenate([np.array(prompts, np.int32), np.array(answers, np.int32)], axis=1)
        return tokens.reshape(-1, self._rows, tokens.shape[1])

    def _cast(self, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.tree.map(lambda it: it.astype(jnp.bfloat16), params)

    def _logprobs(self, params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        """Return the log-probabilities of the answers in `tokens` [rows, prompt and answer]."""

        def of_row(row):
            hidden = self._model.forward(params, row, jnp.arange(len(row)), CausalAttention())
            logits = self._model.logits(params, hidden[self._prompt_len - 1 : -1])
            logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
            return jnp.take_along_axis(logprobs, row[self._prompt_len :, None], axis=-1)[:, 0]

        return jax.vmap(of_row)(tokens)

    def _loss(self, params, tokens, sampled_logprobs, advantages):
        ratio = jnp.exp(self._logprobs(self._cast(params), tokens) - sampled_logprobs)
        gain = advantages[:, None] * jnp.stack([ratio, jnp.clip(ratio, 1 - CLIP, 1 + CLIP)])
        return -jnp.mean(jnp.min(gain, axis=0))

    def _update_step(self, params, state, batches):
        def add_gradients(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(self._loss)(params, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        gradients, _ = jax.lax.scan(add_gradients, zeros, batches)
        changes, state = self._optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state


def make_engine_sampler(
    shape: str, lengths: tuple[int, int], kv_cache_bytes: int, *, is_invariant: bool
) -> Sampler:
    """Return functions that sample and score with a jpaged engine.

    If `is_invariant` is true, the engine is batch-invariant.
    """
    engine = make_engine(
        shape,
        max_model_len=sum(lengths) + 1,  # scoring also needs room for one output token
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory_bytes=kv_cache_bytes,
        batch_invariant=is_invariant,
        enable_prefix_caching=True,
    )

    def sample(prompts: TokenLists, num_samples: int) -> tuple[TokenLists, np.ndarray]:
        sampling = SamplingParams(n=num_samples, max_tokens=lengths[1], logprobs=0, ignore_eos=True)
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answers = [answer for output in outputs for answer in output.outputs]
        logprobs = np.array([it.token_logprobs for it in answers])
        return [list(it.token_ids) for it in answers], logprobs

    def score(prompts: TokenLists, answers: TokenLists) -> np.ndarray:
        scores = engine.score_completions(prompts, answers, use_tqdm=False)
        return np.array([it.logprobs for it in scores], np.float32)

    return Sampler(sample, score, engine.update_weights)


def make_contiguous_sampler(shape: str, lengths: tuple[int, int], trainer: Trainer) -> Sampler:
    """Return functions that sample with contiguous KV memory, and score with the trainer."""
    with shape_folder(shape) as folder:
        if folder is None:
            raise ValueError("shape is None: pass the name of a shape")
        config = read_model_config(read_config(folder))
        plan = plan_model(folder, config, dtype=jnp.bfloat16, load_format="dummy")
    model, parameters = Model(plan.load()), ModelParameters(plan, jax.local_devices()[:1])
    decoder = Decoder(model, "static", num_slots=MAX_NUM_SEQS, max_len=sum(lengths))

    def sample(prompts: TokenLists, num_samples: int) -> tuple[TokenLists, None]:
        requests = [
            Request(list(prompt), lengths[1]) for prompt in prompts for _ in range(num_samples)
        ]
        for request in requests:
            decoder.add(request)
        while decoder.num_unfinished:
            decoder.step()
        return [it.tokens for it in requests], None

    def update(params: dict[str, jax.Array]) -> None:
        model.leaves = list(parameters.prepare(params)(tuple(model.leaves)))
        jax.block_until_ready(model.leaves)

    return Sampler(sample, trainer.score, update)


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a system: the median seconds of each part of a step."""
    lengths = args.prompt_len, args.answer_len
    config = make_config(args.shape, None)
    params = jax.tree.map(lambda it: it.astype(jnp.float32), make_tensors(config))
    trainer = Trainer(config, params, lengths, args.rows)
    del params
    if system == "contiguous":
        sampler = make_contiguous_sampler(args.shape, lengths, trainer)
    else:
        size, is_invariant = int(args.pool_gib * 2**30), system == "invariant"
        sampler = make_engine_sampler(args.shape, lengths, size, is_invariant=is_invariant)
    seconds = [
        time_step(sampler, trainer, config["vocab_size"], seed, args)
        for seed in range(1 + args.steps)
    ]
    parts = {
        f"{part}_s": statistics.median(values)
        for part, values in zip(PARTS, np.transpose(seconds[1:]).tolist(), strict=True)
    }
    return {"shape": args.shape, "system": system, **parts, "step_s": sum(parts.values())}


def time_step(
    sampler: Sampler, trainer: Trainer, vocab_size: int, seed: int, args: argparse.Namespace
) -> list[float]:
    """Run one step, and return the seconds of its parts in the order of `PARTS`."""
    prompts = random_prompts([args.prompt_len] * args.prompts, vocab_size, seed)
    rng = np.random.RandomState(seed)
    times = [time.perf_counter()]
    answers, logprobs = sampler.sample(prompts, args.samples)
    times.append(time.perf_counter())

    repeated = [prompt for prompt in prompts for _ in range(args.samples)]
    scores = sampler.score(repeated, answers)
    times.append(time.perf_counter())

    advantages = rng.normal(size=len(answers)).astype(np.float32)
    trainer.update(repeated, answers, scores if logprobs is None else logprobs, advantages)
    times.append(time.perf_counter())

    sampler.update_weights(trainer.params)
    times.append(time.perf_counter())
    return np.diff(times).tolist()


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per system."""
    for system in args.system:
        yield measure(system, args)


def main() -> None:
    """Print one row per system, and record the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen3-0.6b")
    parser.add_argument("--system", choices=SYSTEMS, nargs="+", default=[*SYSTEMS])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--answer-len", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=4, help="answers per forward and backward pass")
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--pool-gib", type=float, default=20.0, help="size of the KV pool")
    args = parse_arguments(parser)
    if (args.prompts * args.samples) % args.rows:
        parser.error(f"--rows is {args.rows}: pass a divisor of the number of answers")
    found = []
    for row in rows(args):
        found.append(row)
        print(*row.values(), sep="  ", flush=True)
        path = record("grpo", found, by=("shape", "system"))
    print_table(found)
    print(path)


if __name__ == "__main__":
    main()
