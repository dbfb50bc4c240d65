"""Random requests as in section 6 of the paper: their arrival times and lengths.

Arrivals follow a Poisson process. The datasets are not shipped. Instead, lengths are log-normal
with sigma 1, right-skewed as in figure 11 of the paper, with the means that the figure states:

| lengths  | mean prompt | mean output |
|----------|-------------|-------------|
| sharegpt | 161.31      | 337.99      |
| alpaca   | 19.31       | 58.45       |

A prompt has 1 to 2,047 tokens. An output has at least 1 token, and prompt and output together have
at most 2,048 tokens, the longest sequence of OPT. Clipping lowers a mean, so the scales of the
distributions are chosen such that the means after clipping are the ones above. The mean of a trace
of n requests has a relative deviation of about 1.1 / sqrt(n). Prompt and output are independent.

A seed gives the same requests at every rate: gaps are drawn for one request per second, and then
divided by the rate. `from_file` draws the lengths from a user's file instead.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

MAX_MODEL_LEN = 2048
"""Maximum number of tokens of a sequence of OPT, prompt and output together."""

SIGMA = 1.0
"""Standard deviation of the natural logarithm of a length."""

MEAN_LENGTHS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
"""Mean number of prompt tokens and of output tokens of each dataset, from figure 11."""

NUM_PREFIX_TOKENS = {"1-shot": 80, "5-shot": 341}
"""Number of tokens that all prompts of figure 16 share (the prefix)."""

MEAN_TRANSLATION = (25.0, 30.0)
"""Mean number of prompt tokens after the shared prefix of figure 16, and of output tokens.

The paper does not state these numbers. They are a guess, since a WMT16 English-German sentence has
20 to 25 words. The records of the figure say that they are a guess.
"""

CHAT_PROMPT = CHAT_OUTPUT = 1024
"""Maximum number of prompt tokens, and of output tokens, in a round of figure 17."""

MEAN_ROUNDS, MEAN_PAUSE_S = 10, 30.0
"""Mean number of rounds of a conversation, and mean seconds between arrivals of its rounds.

The paper states neither number. It says that most prompts have the maximum of 1,024 tokens. With
ten rounds of ShareGPT-like lengths, 77 % of the prompts have the maximum.
"""

_WORD = re.compile(r"\w+|[^\w\s]")

Piece = tuple[int, int, int]
Lengths = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    Attributes:
        arrival: Arrival time in seconds since the trace began.
        prompt_len: Number of prompt tokens.
        output_len: Number of tokens of each output; end tokens are ignored.
        prompt: Tokens of the prompt, for prefix caching, as pieces `(stream, start, stop)`. A piece
            is tokens `start` to `stop` of the endless token sequence with the number `stream`.
            Equal pieces have equal tokens. If empty, the prompt has no token in common with other
            prompts.
    """

    arrival: float
    prompt_len: int
    output_len: int
    prompt: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Source:
    """Source from which the prompt lengths and output lengths of a trace are drawn.

    Attributes:
        name: Name in tables and file names.
        means: Mean number of prompt tokens and of output tokens, after clipping.
        draw: `draw(count, rng)` returns `count` prompt lengths and `count` output lengths.
    """

    name: str
    means: tuple[float, float]
    draw: Callable[[int, np.random.Generator], Lengths]


def of_dataset(name: str) -> Source:
    """Return a source of lengths with the distribution of the paper's dataset `name`.

    Raises:
        ValueError: `name` is not a key of `MEAN_LENGTHS`.
    """
    if name not in MEAN_LENGTHS:
        raise ValueError(f"lengths {name!r} are unknown: pass one of {', '.join(MEAN_LENGTHS)}")
    return log_normal(name, MEAN_LENGTHS[name])


def log_normal(name: str, means: tuple[float, float], longest: int = MAX_MODEL_LEN) -> Source:
    """Return a source of log-normal lengths with the given means after clipping.

    Prompt and output have at most `longest` tokens together.
    """
    scales = solve_scales(*means, longest)

    def draw(count: int, rng: np.random.Generator) -> Lengths:
        normal = rng.standard_normal((2, count))
        prompts = _clip(scales[0] * np.exp(SIGMA * normal[0]), longest - 1)
        return prompts, _clip(scales[1] * np.exp(SIGMA * normal[1]), longest - prompts)

    return Source(name, means, draw)


def from_file(path: str | Path, longest: int = MAX_MODEL_LEN) -> Source:
    """Return a source that draws lengths from a JSON lines file, with replacement.

    Each line is an object with either the token counts `prompt_len` and `output_len`, or the texts
    `prompt` and `output`. Each word and each punctuation mark of a text counts as a token; a
    tokenizer would give about a quarter more tokens. Long sequences are clipped to `longest`.

    Raises:
        ValueError: the file cannot be read or is empty, or a line is not such an object. The
            message names the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the trace file {str(path)!r}: {error}") from error
    pairs = [_pair(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise ValueError(f"the trace file {str(path)!r} has no requests: write one line for each")
    prompts, outputs = np.array(pairs).T
    prompts = np.minimum(prompts, longest - 1)
    outputs = np.minimum(outputs, longest - prompts)

    def draw(count: int, rng: np.random.Generator) -> Lengths:
        chosen = rng.integers(0, len(pairs), count)
        return prompts[chosen], outputs[chosen]

    return Source(path.stem, (float(prompts.mean()), float(outputs.mean())), draw)


def poisson(source: Source, rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Return requests that arrive within `seconds`, on average `rate` per second.

    Raises:
        ValueError: `rate` or `seconds` is not a positive number.
    """
    _check_positive(rate=rate, seconds=seconds)
    arrivals = _arrivals(rate, seconds, np.random.default_rng([seed, 0]))
    prompts, outputs = _lengths(source, len(arrivals), seed)
    return list(map(TraceRequest, arrivals.tolist(), prompts, outputs))


def with_prefix(trace: Sequence[TraceRequest], num_tokens: int) -> list[TraceRequest]:
    """Return the trace with the same `num_tokens` tokens before each prompt, for figure 16."""
    return [
        replace(
            request,
            prompt_len=num_tokens + request.prompt_len,
            prompt=((0, 0, num_tokens), (own, 0, request.prompt_len)),
        )
        for own, request in enumerate(trace, 1)
    ]


def translation(kind: str, rate: float, seconds: float, seed: int) -> list[TraceRequest]:
    """Return requests with a shared prefix (`kind` is "1-shot" or "5-shot"), for figure 16."""
    num_tokens = NUM_PREFIX_TOKENS[kind]
    source = log_normal("translation", MEAN_TRANSLATION, MAX_MODEL_LEN - num_tokens)
    return with_prefix(poisson(source, rate, seconds, seed), num_tokens)


def chat(
    rate: float, seconds: float, seed: int, source: Source | None = None
) -> list[TraceRequest]:
    """Return the rounds of conversations for figure 17, on average `rate` rounds per second.

    The prompt of a round is the conversation so far and the new question, cut to the last
    `CHAT_PROMPT` tokens. The answer has at most `CHAT_OUTPUT` tokens. The starts of conversations
    are a Poisson process, and the number of rounds is geometric. The pauses between the arrivals of
    rounds are exponential; a round may arrive before the previous answer is complete. Questions and
    answers have the lengths of `source` (None means ShareGPT-like lengths). The first conversations
    begin before the trace, so that the mean number of open conversations is constant during the
    trace.

    Raises:
        ValueError: `rate` or `seconds` is not a positive number.
    """
    _check_positive(rate=rate, seconds=seconds)
    source = source or of_dataset("sharegpt")
    # Leave out conversations that begin more than this many seconds before the trace. At most e**-5
    # of these conversations still run at time 0.
    lead = 5 * MEAN_ROUNDS * MEAN_PAUSE_S
    rng = np.random.default_rng([seed, 2])
    begins = _arrivals(rate / MEAN_ROUNDS, seconds + lead, np.random.default_rng([seed, 0])) - lead
    rounds = rng.geometric(1 / MEAN_ROUNDS, len(begins))
    pauses = iter(rng.exponential(MEAN_PAUSE_S, int(rounds.sum())))
    lengths = zip(*_lengths(source, int(rounds.sum()), seed), strict=True)
    found = []
    for stream, (begin, count) in enumerate(zip(begins, rounds, strict=True)):
        found += _conversation(stream, begin, list(itertools.islice(lengths, int(count))), pauses)
    return sorted((r for r in found if 0 <= r.arrival < seconds), key=lambda r: r.arrival)


def _conversation(
    stream: int, begin: float, rounds: list[tuple[int, int]], pauses: Iterator[float]
) -> Iterator[TraceRequest]:
    said, arrival = 0, begin
    for question, answer in rounds:
        asked, answer = said + int(question), min(int(answer), CHAT_OUTPUT)
        start = max(asked - CHAT_PROMPT, 0)
        yield TraceRequest(float(arrival), asked - start, answer, ((stream, start, asked),))
        said, arrival = asked + answer, arrival + next(pauses)


@functools.cache
def solve_scales(mean_prompt: float, mean_output: float, longest: int) -> tuple[float, float]:
    """Return the medians of prompt and output lengths that give these means after clipping.

    Both lengths are log-normal, and have at most `longest` tokens together.

    Raises:
        ValueError: a mean cannot be reached within `longest` tokens.
    """
    prompt = _bisect(lambda scale: _clipped_mean(scale, longest - 1), mean_prompt)
    normal = NormalDist(math.log(prompt), SIGMA)
    prompts = np.exp([normal.inv_cdf((i + 0.5) / 1000) for i in range(1000)])
    left, counts = np.unique(longest - _clip(prompts, longest - 1), return_counts=True)
    output = _bisect(
        lambda scale: float(np.average([_clipped_mean(scale, n) for n in left], weights=counts)),
        mean_output,
    )
    return prompt, output


def _clipped_mean(scale: float, longest: float) -> float:
    """Return the mean of min(X, longest) for a log-normal X with median `scale`."""
    normal, at = NormalDist(), math.log(longest / scale) / SIGMA
    below = scale * math.exp(SIGMA**2 / 2) * normal.cdf(at - SIGMA)
    return below + longest * (1 - normal.cdf(at))


def _bisect(mean_of: Callable[[float], float], wanted: float) -> float:
    low, high = 1.0, 1e6
    if not mean_of(low) < wanted < mean_of(high):
        raise ValueError(
            f"no lengths have a mean of {wanted} tokens: give a mean between {mean_of(low):.2f} "
            f"and {mean_of(high):.2f}"
        )
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_of(middle) < wanted else (low, middle)
    return low


def _clip(lengths: np.ndarray, longest: int | np.ndarray) -> np.ndarray:
    return np.clip(np.rint(lengths), 1, longest).astype(int)


def _arrivals(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Return the event times of a Poisson process with `rate` events per second, up to `seconds`.

    With the same seed of `rng`, the rate only scales the times. For example, at twice the rate,
    each event comes at half the time.
    """
    times = [0.0]
    while times[-1] < rate * seconds:
        times += (times[-1] + np.cumsum(rng.exponential(1.0, 1024))).tolist()
    arrivals = np.array(times[1:]) / rate
    return arrivals[arrivals < seconds]


def _lengths(source: Source, count: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw `count` prompt lengths and output lengths.

    The function draws chunks of 1,024 lengths, so that long and short traces begin with the same
    requests.
    """
    rng = np.random.default_rng([seed, 1])
    drawn = [source.draw(1024, rng) for _ in range(-(-count // 1024) or 1)]
    prompts, outputs = (np.concatenate(part)[:count] for part in zip(*drawn, strict=True))
    return prompts.tolist(), outputs.tolist()


def _pair(line: str, where: str) -> tuple[int, int]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: must be a JSON object, not {line[:60]!r}")
    if "prompt_len" in fields or "output_len" in fields:
        return _count(fields, "prompt_len", where), _count(fields, "output_len", where)
    if "prompt" in fields or "output" in fields:
        return _num_words(fields, "prompt", where), _num_words(fields, "output", where)
    raise ValueError(
        f"{where}: lengths are missing: add prompt_len and output_len, or prompt and output"
    )


def _count(fields: dict, name: str, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {name} must be an integer of at least 1, not {value!r}")
    return value


def _num_words(fields: dict, name: str, where: str) -> int:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name} must be a string with at least one word, not {value!r}")
    return len(_WORD.findall(value))


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value!r}")


def mean_lengths(trace: Iterable[TraceRequest]) -> tuple[float, float]:
    """Return the mean prompt length and the mean output length, in tokens."""
    lengths = np.array([(request.prompt_len, request.output_len) for request in trace])
    return float(lengths[:, 0].mean()), float(lengths[:, 1].mean())
