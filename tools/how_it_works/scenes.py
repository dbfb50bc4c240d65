"""The states that the pictures show, from a real scheduler and block manager without a model.

A `Scene` schedules steps as the engine does. Words replace the tokens of a model; they are the
words in the figures of the paper. The state of the pool is read by the functions that the dashboard
uses: `block_tables`, `block_map` and `PoolWatch`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from jpaged.core.admission import SchedulerConfig
from jpaged.core.beam import BeamSearch
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import StepPlan
from jpaged.core.prefix_cache import PrefixCache, seeded_hash_function
from jpaged.core.request import BeamCandidates, Request, StopCriteria
from jpaged.core.request import Sequence as TokenSequence
from jpaged.core.scheduler import Scheduler
from jpaged.observe.pool_changes import PoolWatch
from jpaged.observe.pool_report import block_map, block_tables

BLOCK_SIZE = 4

Script = Callable[[tuple[str, ...]], Sequence[tuple[str, float]]]
"""A function that stands in for a language model.

The function takes the words so far, and returns the likeliest next words with their
log-probabilities.
"""


@dataclass(frozen=True)
class Table:
    """The block table of a sequence: sample number `index` of request `request_id`."""

    request_id: str
    index: int
    block_table: tuple[int, ...]
    num_computed_tokens: int
    status: str

    @property
    def filled(self) -> list[int]:
        """Number of filled slots in each block."""
        ends = range(0, self.num_computed_tokens, BLOCK_SIZE)
        return [min(BLOCK_SIZE, self.num_computed_tokens - start) for start in ends]


@dataclass(frozen=True)
class Snapshot:
    """State of a pool at one moment.

    Attributes:
        tables: Block tables of the sequences that hold blocks.
        words: Words in each used block, by block id.
        counts: Reference count of each block except the null block, by block id; 0 if free.
        copies: Copies of blocks since the previous snapshot: a dict from the id of the new block to
            the id of the source block.
        num_free: Number of free blocks.
    """

    tables: list[Table]
    words: dict[int, list[str]]
    counts: dict[int, int]
    copies: dict[int, int]
    num_free: int

    def table(self, request_id: str, index: int = 0) -> Table:
        """Return the block table of sample number `index` of a request."""
        return next(t for t in self.tables if (t.request_id, t.index) == (request_id, index))


class Scene:
    """A scheduler with a pool whose blocks are allocated in the order `free_order`.

    To set the order, the constructor allocates all blocks, each to a separate sequence. Then the
    constructor frees the blocks in the order `free_order`.
    """

    def __init__(
        self,
        free_order: Iterable[int],
        *,
        max_num_batched_tokens: int = 64,
        with_prefix_cache: bool = False,
    ):
        order = list(free_order)
        config = SchedulerConfig(len(order), max_num_batched_tokens, 64)
        cache = PrefixCache(BLOCK_SIZE, seeded_hash_function(0)) if with_prefix_cache else None
        self.scheduler = Scheduler(config, BlockManager(len(order) + 1, BLOCK_SIZE, cache))
        self._vocabulary: list[str] = []
        self._scripts: dict[str, Script] = {}
        self._seq_ids = count()
        self._words: dict[int, list[str]] = {}
        self._set_free_order(order)
        self._watch = PoolWatch(self.scheduler, num_token_blocks=len(order))

    def add(
        self,
        request_id: str,
        prompt: str,
        script: Script,
        *,
        max_tokens: int = 6,
        n: int = 1,
        beam_width: int = 0,
    ) -> Request:
        """Add a request to the scheduler, and return it.

        `prompt` consists of words between spaces, each of which becomes one token. `script` stands
        in for a language model and chooses the output words.
        """
        request = Request.from_prompt(
            request_id,
            [self._id(word) for word in prompt.split()],
            StopCriteria(max_tokens),
            seq_id_counter=self._seq_ids,
            num_samples=n,
            beam=BeamSearch(beam_width) if beam_width else None,
        )
        self._scripts[request_id] = script
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        """Schedule a step, sample its tokens, and update the scheduler with the tokens."""
        plan = self.schedule()
        self.read(plan)
        return plan

    def schedule(self) -> StepPlan:
        """Return the scheduler's plan of the next step.

        The scheduler allocates the blocks of the step. It treats the tokens of the step as computed
        as soon as the plan is made.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            raise RuntimeError("the scene has no unfinished request: add one before the next step")
        self._watch.note(plan)
        return plan

    def read(self, plan: StepPlan) -> None:
        """Sample tokens for each sequence of the step, and update the scheduler with the tokens."""
        offers = [self._offer(row.sequence) for row in plan.scheduled]
        width = min(len(ids) for ids, _ in offers)
        token_ids = np.array([ids[:width] for ids, _ in offers], np.int32)
        logprobs = np.array([logs[:width] for _, logs in offers], np.float32)
        self.scheduler.update(plan, token_ids[:, 0], BeamCandidates(token_ids, logprobs))
        self.scheduler.check_integrity()

    def look(self) -> Snapshot:
        """Return a snapshot of the pool."""
        changes = self._watch.look()
        for block_id, token_ids in changes.tokens.items():
            self._words[block_id] = [self._vocabulary[i] for i in token_ids]
        infos = block_map(self.scheduler)
        held = {b: words for b, words in self._words.items() if infos[b].ref_cnt}
        tables = [
            Table(s.request_id, s.index, s.block_table, s.num_computed_tokens, s.status)
            for s in block_tables(self.scheduler)
            if s.block_table
        ]
        counts = {block_id: info.ref_cnt for block_id, info in infos.items()}
        num_free = self.scheduler.block_manager.num_free_blocks
        return Snapshot(tables, dict(sorted(held.items())), counts, dict(changes.copies), num_free)

    def _set_free_order(self, order: list[int]) -> None:
        manager = self.scheduler.block_manager
        holders = {}
        for _ in order:
            sequence = TokenSequence(next(self._seq_ids), [0], 1)
            manager.append(sequence, 1)
            holders[sequence.block_table[0]] = sequence
        for block_id in order:
            manager.free(holders[block_id])

    def _offer(self, sequence) -> tuple[list[int], list[float]]:
        words = tuple(self._vocabulary[i] for i in sequence.token_ids)
        script = self._scripts[sequence.request.request_id]
        pairs = script((*words, f"#{sequence.index}"))
        return [self._id(word) for word, _ in pairs], [logprob for _, logprob in pairs]

    def _id(self, word: str) -> int:
        if word not in self._vocabulary:
            self._vocabulary.append(word)
        return self._vocabulary.index(word)


def says(*texts: str) -> Script:
    """Return a stand-in for a language model (`Script`) that outputs given words.

    `texts[i]` contains the prompt, followed by the output words of sample i.
    """

    def script(words: tuple[str, ...]) -> list[tuple[str, float]]:
        *said, sample = words
        text = texts[int(sample[1:])].split()
        return [(text[len(said)] if len(said) < len(text) else "...", 0.0)]

    return script


def searches(sentences: dict[str, float], width: int) -> Script:
    """Return a stand-in for a language model (`Script`), for beam search over given sentences.

    `sentences` maps each sentence to its weight. A sentence counts if it begins with the prompt and
    the words generated so far. The probability of a next word is proportional to the total weight
    of the counted sentences that continue with this word. All other words are improbable.
    """

    def script(words: tuple[str, ...]) -> list[tuple[str, float]]:
        said, weights = words[:-1], dict[str, float]()
        for sentence, weight in sentences.items():
            other = tuple(sentence.split())
            if len(other) > len(said) and other[: len(said)] == said:
                weights[other[len(said)]] = weights.get(other[len(said)], 0.0) + weight
        total = sum(weights.values())
        known = [(word, float(np.log(weight / total))) for word, weight in weights.items()]
        unknown = [(f"?{i}", -20.0 - i) for i in range(width)]
        return sorted([*known, *unknown], key=lambda pair: -pair[1])[:width]

    return script


# ---- the paper's figures

GETTYSBURG = "Four score and seven years ago our"


def decoding() -> list[Snapshot]:
    """Return the states of figure 6: request A after its prompt, and after each of two steps."""
    scene = Scene([7, 1, 3, 8, 5, 2, 4, 6])
    scene.add("A", GETTYSBURG, says(f"{GETTYSBURG} fathers brought forth"))
    snapshots = []
    for _ in range(3):
        scene.step()
        snapshots.append(scene.look())
    return snapshots


def attending() -> tuple[Snapshot, str]:
    """Return the state of figure 5: request A after four steps.

    Also return the word whose query the last step computed.
    """
    scene = Scene([7, 1, 3, 8, 5, 2, 4, 6])
    scene.add("A", GETTYSBURG, says(f"{GETTYSBURG} fathers brought forth"))
    for _ in range(4):
        scene.step()
    snapshot = scene.look()
    (table,) = snapshot.tables
    return snapshot, snapshot.words[table.block_table[-1]][-1]


def two_requests() -> Snapshot:
    """Return the state of figure 7: two requests in one pool."""
    scene = Scene([7, 1, 5, 2, 3, 8, 4, 6])
    scene.add("A", GETTYSBURG, says(f"{GETTYSBURG} fathers brought forth"))
    scene.add("B", "It was the best of", says("It was the best of times it was"))
    for _ in range(3):
        scene.step()
    return scene.look()


def sampling() -> list[Snapshot]:
    """Return the states of figure 8, with two samples of a prompt.

    The states are: after the fork, after a copy on write, and a step later.
    """
    scene = Scene([7, 1, 3, 8, 5, 2, 4, 6])
    texts = (f"{GETTYSBURG} {word}" for word in ("fathers", "mothers"))
    scene.add("A", GETTYSBURG, says(*texts), n=2)
    snapshots = []
    for _ in range(3):
        scene.step()
        snapshots.append(scene.look())
    return snapshots


def searching() -> list[Snapshot]:
    """Return the states of figure 9: four beams, before and after a step in which two beams end."""
    stem = "Once upon a time"
    king = f"{stem} there lived a king who had three clever"
    sentences = {
        f"{king} sons and one horse which": 0.2,
        f"{king} daughters and a castle by the sea": 0.28,
        f"{king} daughters and a castle on a hill": 0.27,
        f"{king} cats that could talk and sing all": 0.26,
        f"{king} cats that could talk but never told": 0.25,
        f"{stem} in a land far away stood the mill of an old man": 0.1,
    }
    scene = Scene(range(1, 25))
    scene.add("A", stem, searches(sentences, 4), beam_width=4, max_tokens=20)
    while True:
        plan = scene.schedule()
        snapshot = scene.look()
        num_computed = snapshot.tables[0].num_computed_tokens
        if num_computed == len(king.split()) + 4:
            before = snapshot
        elif num_computed > len(king.split()) + 4:
            return [before, snapshot]
        scene.read(plan)


def shared_prefix() -> tuple[Snapshot, list[int]]:
    """Run two requests whose prompts have a common prefix, for figure 10.

    Request A runs for one step before request B arrives. Then two more steps run.

    Returns:
        The state of the pool at the end, and the number of B's tokens that each of the last two
        steps computed.
    """
    prefix = (
        "Translate English to French: sea otter => loutre de mer peppermint => "
        "menthe poivrée plush giraffe => girafe en peluche"
    )
    scene = Scene([7, 1, 4, 9, 2, 10, 3, 8, 5, 11, 6, 12], with_prefix_cache=True)
    ask_a, ask_b = f"{prefix} cheese =>", f"{prefix} I love you =>"
    scene.add("A", ask_a, says(f"{ask_a} fromage . ."))
    scene.step()
    scene.add("B", ask_b, says(f"{ask_b} je t'aime ."))
    plans = [scene.step(), scene.step()]
    rows = (row for plan in plans for row in plan.scheduled)
    num_tokens = [r.num_scheduled_tokens for r in rows if r.sequence.request.request_id == "B"]
    return scene.look(), num_tokens


# ---- pressure


@dataclass(frozen=True)
class Turn:
    """The result of one step of the scheduler.

    Attributes:
        num_tokens: Number of tokens that the step computed, by request.
        preempted: Requests that were preempted before the step.
        num_free: Number of free blocks after the step.
        statuses: Status of each request.
    """

    num_tokens: dict[str, int]
    preempted: tuple[str, ...]
    num_free: int
    statuses: dict[str, str]


def pressing() -> tuple[list[Turn], int]:
    """Run three requests in a pool that is too small for them.

    Returns:
        The steps, and the number of blocks in the pool.
    """
    scene = Scene(range(1, 9), max_num_batched_tokens=8)
    for name, num_prompt, max_tokens in (("A", 6, 9), ("B", 10, 7), ("C", 5, 7)):
        scene.add(name, " ".join(["p"] * num_prompt), says(""), max_tokens=max_tokens)
    turns = []
    while scene.scheduler.has_unfinished_requests:
        plan = scene.schedule()
        num_tokens = {r.sequence.request.request_id: r.num_scheduled_tokens for r in plan.scheduled}
        statuses = {r.request_id: str(r.status) for r in scene.scheduler.unfinished_requests}
        turns.append(Turn(num_tokens, plan.preempted_request_ids, scene.look().num_free, statuses))
        scene.read(plan)
    return turns, 8
