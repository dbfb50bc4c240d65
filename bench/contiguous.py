"""Decode greedily with a contiguous KV cache, as a JAX program without paging does.

The cache has B batch rows. A row has a slab: `width` token slots in each layer's K and V.

    static   static batching: the next batch starts when the last sequence of a batch ends.
             The slab width is the longest sequence's length, rounded up to one of `widths`
    slabs    iteration-level batching: waiting sequences take free rows before each step.
             A slab has `max_len` slots (as in JetStream, and in Orca with max_len reserved)

Prompts are padded to a length bucket, and a prefill computes several prompts. Sampled tokens feed
the next step on the device; the host reads them later. `bench.contiguous_steps` has the programs.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench.common import ALL_SHAPES, random_prompts, shape_folder
from bench.contiguous_steps import MIN_ROWS, Model
from bench.records import print_table
from bench.throughput import lengths_of
from jpaged.config import EMBEDDED_MODEL
from jpaged.models.checkpoint import read_config, read_generation_config, resolve_checkpoint
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import plan_model

BATCHINGS = ("static", "slabs")
# The smallest prompt bucket has `SMALLEST_BUCKET` tokens. Larger buckets are powers of two.
SMALLEST_BUCKET = 64
# Each sequence of a static batch has a contiguous range of cache slots. The length of the range is
# one of these numbers, or `max_len`.
WIDTHS = (256, 512, 1024)
READ_BEHIND = 2  # The host reads the tokens of a launch after `READ_BEHIND` further launches.


@dataclass(eq=False)
class Request:
    """A prompt, and the output tokens generated so far (`tokens`).

    `Decoder.step` returns the request when `tokens` is complete.
    """

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = True
    tokens: list[int] = field(default_factory=list)
    num_launched: int = 0
    ended: bool = False


class Decoder:
    """Serve requests in the order of arrival, at most `num_slots` at a time.

    Args:
        model: The model and its programs.
        batching: "static" or "slabs". With "static", a batch starts when all sequences of the
            previous batch have ended. With "slabs", waiting requests take free batch rows before
            each launch, and each batch row has `max_len` cache slots.
        num_slots: Maximum number of sequences in a batch. The cache has at least `MIN_ROWS` rows.
        max_len: Maximum number of tokens of a sequence, prompt and output together. A batch row of
            the cache has at most this many slots.
        widths: Smaller numbers of slots per batch row that a static batch may use.
        launch_steps: Allowed numbers of decode steps per launch; must include 1. With "slabs", a
            launch ends at the latest when the first sequence is complete; with "static", when the
            last sequence is complete.
        arrivals: Whether requests may arrive at any time. If true, "slabs" launches one decode step
            at a time while a row is free.
        max_batched_tokens: Maximum number of padded tokens of a prefill of several prompts.
        eos_token_ids: Tokens that end a sequence; the output includes the token.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        model: Model,
        batching: str,
        *,
        num_slots: int,
        max_len: int,
        widths: Sequence[int] = (),
        launch_steps: Sequence[int] = (1, 4, 16),
        arrivals: bool = False,
        max_batched_tokens: int = 8192,
        eos_token_ids: Iterable[int] = (),
    ):
        positions = model.config.max_position_embeddings
        check(batching in BATCHINGS, "batching", batching, f"be one of {BATCHINGS}")
        check(num_slots >= 1, "num_slots", num_slots, "be 1 or more")
        check(2 <= max_len <= positions, "max_len", max_len, f"be 2 to the model's {positions}")
        check(1 in launch_steps, "launch_steps", launch_steps, "include 1")
        below = {width for width in widths if width < max_len} if batching == "static" else ()
        self.model, self.batching, self.widths = model, batching, (*sorted(below), max_len)
        self.launch_steps, self.eos = sorted(launch_steps), frozenset(eos_token_ids)
        self.num_slots, self.arrivals = num_slots, arrivals and batching == "slabs"
        self._max_batched_tokens, self.num_unfinished = max_batched_tokens, 0
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}  # `running` maps batch rows to requests
        self._unread: deque[tuple[jax.Array, list[tuple[int, Request]]]] = deque()
        self._rows = max(num_slots, MIN_ROWS)
        # `_cache` is the KV cache of the current batch, and `width` the number of token slots per
        # batch row.
        self._cache, self.width = None, 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: the request can never be served.
        """
        vocab_size, room = self.model.config.vocab_size, self.widths[-1] - len(request.prompt)
        unknown = [token for token in request.prompt if not 0 <= token < vocab_size]
        check(bool(request.prompt), "prompt", request.prompt, "have a token")
        check(not unknown, "prompt", unknown, f"have tokens from 0 to {vocab_size - 1}")
        wanted = f"be 1 to {room}: max_len={self.widths[-1]} holds prompt and output"
        check(1 <= request.max_tokens <= room, "max_tokens", request.max_tokens, wanted)
        self.waiting.append(request)
        self.num_unfinished += 1

    @property
    def batch_size(self) -> int:
        """Number of admitted sequences whose last token the host has not read yet."""
        return self.num_unfinished - len(self.waiting)

    def step(self) -> list[Request]:
        """Admit requests, launch decode steps, and read the tokens of earlier launches.

        Return the requests that these tokens complete.
        """
        if self.waiting and (self.batching == "slabs" or not self.running):
            self._admit()
        if self.running:
            self._launch()
        ended: list[Request] = []
        while len(self._unread) > (READ_BEHIND if self.running or self.waiting else 0):
            ended += self._read()
        return ended

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], ignore_eos: bool = True
    ) -> list[list[int]]:
        """Return the output tokens of each prompt.

        Static batching serves the prompts with long outputs first.
        """
        given = zip(map(list, prompts), max_tokens, strict=True)
        requests = [Request(prompt, most, ignore_eos) for prompt, most in given]
        longest_first = self.batching == "static"
        for request in sorted(requests, key=lambda each: -each.max_tokens * longest_first):
            self.add(request)
        while self.num_unfinished:
            self.step()
        return [request.tokens for request in requests]

    def clear(self) -> None:
        """Drop all requests."""
        self.waiting.clear()
        self.running.clear()
        self._unread.clear()
        self.num_unfinished = 0
        jax.block_until_ready(self._cache)

    def warm_up(self, longest_prompt: int | None = None) -> None:
        """Compile all programs. If `longest_prompt` is given, leave out the programs for longer
        prompts."""
        shapes = set()
        for width in self.widths:
            top = bucket(min(longest_prompt or width, width), width)
            lengths = {bucket(length, width) for length in range(1, top + 1)}
            shapes |= {(width, n, length) for length in lengths for n in self._counts(length)}
            shapes |= {(width, steps) for steps in self.launch_steps}
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda shape: self.model.program(self._rows, *shape), sorted(shapes)))

    def _counts(self, length: int) -> list[int]:
        """Return the batch sizes of the compiled prefill programs for prompts padded to `length`.

        The batch sizes (numbers of prompts) are the powers of 4 below the maximum batch size, and
        the maximum batch size.
        """
        most = min(max(self._max_batched_tokens // length, 1), self.num_slots)
        return [n for n in (4**i for i in range(8)) if n < most] + [most]

    def _admit(self) -> None:
        """Give free rows to waiting requests, and prefill the prompts bucket by bucket."""
        free = [slot for slot in range(self.num_slots) if slot not in self.running]
        taken = [(slot, self.waiting.popleft()) for slot in free[: len(self.waiting)]]
        needed = max((len(request.prompt) + request.max_tokens for _, request in taken), default=1)
        width = min(width for width in self.widths if width >= needed)
        if width != self.width:
            # The new cache needs the memory of the old cache, so wait until no step uses the old
            # cache.
            jax.block_until_ready(self._cache)
            self._cache, self.width = None, width
            self._cache = self.model.empty(self._rows, width)
        self.running.update(taken)
        taken.sort(key=lambda pair: len(pair[1].prompt))
        for length, found in groupby(taken, lambda pair: bucket(len(pair[1].prompt), self.width)):
            group, counts = list(found), self._counts(length)
            for first in range(0, len(group), counts[-1]):
                self._prefill(group[first : first + counts[-1]], length, counts)

    def _prefill(self, group: list[tuple[int, Request]], length: int, counts: list[int]) -> None:
        n = min(count for count in counts if count >= len(group))
        prompts, lens = np.zeros((n, length), np.int32), np.ones(n, np.int32)
        slots = self._rows + np.arange(n, dtype=np.int32)
        for row, (slot, request) in enumerate(group):
            lens[row], slots[row] = len(request.prompt), slot
            prompts[row, : lens[row]] = request.prompt
        run = self.model.program(self._rows, self.width, n, length)
        self._cache, tokens = run(self.model.leaves, self._cache, prompts, lens, slots)
        self._launched(tokens[None], list(enumerate(request for _, request in group)), 1)

    def _launch(self) -> None:
        """Launch a program with several decode steps. Choose the largest allowed number of steps
        below a limit.

        With static batching, the limit is the number of tokens that the longest sequence still
        needs. Otherwise, the limit is the number that the shortest sequence still needs. If
        requests may arrive and a row is free, launch one step.
        """
        wanted = [request.max_tokens - request.num_launched for request in self.running.values()]
        known = max(wanted) if self.batching == "static" else min(wanted)
        if self.arrivals and len(self.running) < self.num_slots:
            known = 1
        steps = max(steps for steps in self.launch_steps if steps <= known)
        stops = np.zeros(self._rows, np.int32)
        for slot, request in self.running.items():
            stops[slot] = len(request.prompt) + request.max_tokens - 1
        run = self.model.program(self._rows, self.width, steps)
        self._cache, tokens = run(self.model.leaves, self._cache, stops)
        self._launched(tokens, list(self.running.items()), steps)

    def _launched(
        self, tokens: jax.Array, columns: list[tuple[int, Request]], num_steps: int
    ) -> None:
        """Queue the tokens [num_steps, ...] of a launch, so that `_read` reads them later. Free the
        batch rows of requests whose last token this launch computes.
        """
        tokens.copy_to_host_async()
        self._unread.append((tokens, columns))
        for _, request in columns:
            request.num_launched += num_steps
        self._free_rows(lambda request: request.num_launched >= request.max_tokens)

    def _read(self) -> list[Request]:
        """Read the tokens of the oldest launch. Return the requests that these tokens complete."""
        tokens, columns = self._unread.popleft()
        found, ended = np.asarray(tokens).T.tolist(), []
        for column, request in columns:
            for token in found[column]:
                if not request.ended:
                    request.tokens.append(token)
                    at_end = token in self.eos and not request.ignore_eos
                    request.ended = at_end or len(request.tokens) == request.max_tokens
                    ended += [request] * request.ended
        self._free_rows(lambda request: request.ended)
        self.num_unfinished -= len(ended)
        return ended

    def _free_rows(self, is_over: Callable[[Request], bool]) -> None:
        kept = {slot: request for slot, request in self.running.items() if not is_over(request)}
        self.running = kept


def bucket(length: int, most: int) -> int:
    """Return the padded length of a prompt: a power of two of at least 64, limited to `most`."""
    return min(max(1 << (int(length) - 1).bit_length(), SMALLEST_BUCKET), most)


def check(holds: bool, name: str, value: object, wanted: str) -> None:
    """Raise ValueError unless `holds` is true.

    `wanted` completes the message: "be 1 or more" gives "num_slots=0 must be 1 or more".
    """
    if not holds:
        raise ValueError(f"{name}={value!r} must {wanted}")


def load(
    folder: str | Path = EMBEDDED_MODEL, *, load_format: str = "auto", seed: int = 0
) -> tuple[Model, frozenset[int]]:
    """Load a model and its EOS token ids, with the weights and dtype that `Engine` would use.

    Raises:
        ValueError: the checkpoint cannot be loaded.
    """
    folder = resolve_checkpoint(folder)
    config = read_model_config(read_config(folder))
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.dtype("float32" if on_cpu else config.checkpoint_dtype or "bfloat16")
    model = plan_model(folder, config, dtype=dtype, load_format=load_format, seed=seed).load()
    listed = read_generation_config(folder).get("eos_token_id", [])
    more = listed if isinstance(listed, list) else [listed]
    return Model(model), frozenset({*config.eos_token_ids, *more})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="model folder (the bundled model)")
    parser.add_argument("--shape", choices=[*ALL_SHAPES], help="random weights of this shape")
    parser.add_argument("--batching", choices=BATCHINGS, nargs="+", default=[*BATCHINGS])
    parser.add_argument("--num-slots", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--case", choices=["A", "B"], default="A", help="case of bench.throughput")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests")
    args = parser.parse_args()
    with shape_folder(args.shape) as folder:
        model, eos = load(folder or args.model, load_format="dummy" if args.shape else "auto")
    prompt_lens, output_lens = lengths_of(args.case, args.scale)
    prompts = random_prompts(prompt_lens.tolist(), model.config.vocab_size)
    rows = []
    for batching in args.batching:
        sizes = {"num_slots": args.num_slots, "max_len": args.max_len, "widths": WIDTHS}
        decoder = Decoder(model, batching, eos_token_ids=eos, **sizes)
        decoder.warm_up(max(prompt_lens))
        start = time.perf_counter()
        tokens = decoder.generate(prompts, output_lens.tolist())
        speed = sum(map(len, tokens)) / (time.perf_counter() - start)
        rows.append({"batching": batching, "case": args.case, "output_tokens_per_s": speed})
    print_table(rows)


if __name__ == "__main__":
    main()
