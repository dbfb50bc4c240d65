"""Test the model runner with hand-made plans on a tiny model."""

import itertools
from collections.abc import Sequence as Sized
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.recipes import Recipes
from jpaged.compile.store import ProgramStore
from jpaged.core.plan import ScheduledSequence, StepPlan, SwapIn, SwapOut
from jpaged.core.request import Request, Sequence, StopCriteria
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import make_abstract_model, plan_model
from jpaged.runtime import batch, model_runner
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.preemption_timing import measure_preemption_costs
from jpaged.runtime.programs import DeviceShapes, SplitModel
from jpaged.runtime.results import StepResult
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend

BLOCK_SIZE, NUM_BLOCKS = 8, 160
# Log-probabilities also show errors of attention that do not change the token.
GREEDY = SamplingParams(temperature=0.0, logprobs=0)
CONFIG = RuntimeConfig(
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    max_model_len=48,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    vocab_size=96,
    backend=Backend.XLA,
    num_host_blocks=20,
)
MODEL = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def shared_runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    model = read_model_config(MODEL)
    folder = tmp_path_factory.mktemp("none")
    loaded = plan_model(folder, model, dtype=jax.numpy.float32, load_format="dummy", seed=3).load()
    split = SplitModel.of(loaded)
    shapes = DeviceShapes.of(model, CONFIG, jax.numpy.float32)
    store = ProgramStore(folder, model, jax.local_devices()[0])
    # The second builder must load stored programs. It cannot trace them, because its model has no
    # treedef.
    for traced in (split, replace(split, treedef=None)):
        with ProgramBuilder(2, store) as builder:
            builder.add(Recipes(traced, shapes, CONFIG))
            programs = builder.programs()
    runner = ModelRunner(split, shapes, CONFIG, programs)
    runner.warm_up()
    return runner


class Driver:
    """Replace the scheduler, so that a test can choose the steps and the blocks of each
    sequence."""

    seq_id_counter = itertools.count()

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.sampling: dict[Request, SamplingParams] = {}
        self.present: set[int] = set()
        self.faults: tuple[tuple[Request, Exception], ...] = ()

    def request(self, params: SamplingParams, prompt: Sized[int], num_samples: int = 1) -> Request:
        stop = StopCriteria(max_tokens=20)
        options: Any = {"num_samples": num_samples, "seed": params.seed or 0}
        options["first_scored_position"] = None if params.prompt_logprobs is None else 1
        made = Request.from_prompt(
            "r", list(prompt), stop, seq_id_counter=self.seq_id_counter, **options
        )
        self.sampling[made] = params
        return made

    def run(self, *scheduled: ScheduledSequence, **orders) -> np.ndarray:
        """Run one step. Return the sampled token and the log-probability of each row; the
        log-probability is 0 if no request asked for it."""
        plan = StepPlan(step_id=0, scheduled=scheduled, **orders)
        self.present.update(s.sequence.seq_id for s in scheduled)
        self.present.update(child.seq_id for _, child in plan.row_forks)
        self.present.difference_update(plan.released_seq_ids)
        handle = self.runner.launch(plan, self.sampling.__getitem__)
        self.faults, result = handle.faults, handle.read()
        logprobs = result.logprobs and result.logprobs.logprobs
        if logprobs is None:
            logprobs = np.zeros(len(scheduled))
        return np.stack([result.token_ids, logprobs], axis=1)

    def prefill(self, sequence: Sequence, blocks: list[int]) -> np.ndarray:
        """Compute all tokens of a sequence in one step, append the sampled token, and return the
        result of `run`."""
        sequence.block_table = blocks
        sequence.num_admitted_tokens = n = len(sequence.token_ids)
        updates = tuple(enumerate(blocks))
        seen = self.run(ScheduledSequence(sequence, 0, n, True, updates))
        sequence.token_ids.append(int(seen[0, 0]))
        return seen

    def decode_row(self, sequence: Sequence, block: int | None = None) -> ScheduledSequence:
        updates = ()
        if block is not None:
            updates = ((len(sequence.block_table), block),)
            sequence.block_table = [*sequence.block_table, block]
        sequence.num_admitted_tokens = 0
        return ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, True, updates)

    def decode(self, *sequences: Sequence, **orders) -> np.ndarray:
        seen = self.run(*(self.decode_row(s) for s in sequences), **orders)
        for sequence, (token, _) in zip(sequences, seen, strict=True):
            sequence.token_ids.append(int(token))
        return seen


@pytest.fixture
def driver(shared_runner: ModelRunner):
    made = Driver(shared_runner)
    yield made
    made.run(released_seq_ids=tuple(made.present))


def outputs_alone(driver: Driver, params: SamplingParams, prompt: Sized[int], n: int) -> np.ndarray:
    """Return the results of the first `n` steps of a request that runs alone."""
    (sequence,) = driver.request(params, prompt).sequences
    seen = [driver.prefill(sequence, [30, 31, 32, 33])]
    return np.concatenate(seen + [driver.decode(sequence) for _ in range(n - 1)])


def check_same(seen, expected) -> None:
    np.testing.assert_allclose(np.reshape(seen, (-1, 2)), np.reshape(expected, (-1, 2)), atol=1e-5)


def share_all_but_last_block(
    parent: Sequence, child: Sequence, last_block: int
) -> tuple[tuple[int, int], ...]:
    """Give the child the blocks of the parent, with `last_block` instead of the parent's last
    block. Return the pair of blocks to copy."""
    child.token_ids = list(parent.token_ids)
    child.block_table = [*parent.block_table[:-1], last_block]
    return ((parent.block_table[-1], last_block),)


PROMPT = list(range(5, 16))


def test_step_plan_can_copy_any_number_of_blocks(driver: Driver):
    """The plan copies so many blocks that the copies need more than two launches."""
    (sequence,) = driver.request(GREEDY, PROMPT).sequences
    driver.prefill(sequence, [1, 2])
    targets = range(3, 149)
    driver.run(block_copies=tuple((2 - target % 2, target) for target in targets))
    expected = outputs_alone(driver, GREEDY, PROMPT, 2)[1]
    for first in range(3, 149, 2):
        table = ((0, first), (1, first + 1))
        check_same(driver.run(ScheduledSequence(sequence, 11, 1, True, table)), expected)


@pytest.mark.parametrize("is_separate_plan", [False, True])
def test_forked_sequence_gets_a_copy_of_its_parents_block_table(
    driver: Driver, is_separate_plan: bool
):
    """The source of the second fork is the child of the first fork."""
    a, b, c = driver.request(GREEDY, PROMPT, 3).sequences
    driver.prefill(a, [1, 2])
    forks = {
        "block_copies": share_all_but_last_block(a, b, 9) + share_all_but_last_block(a, c, 10),
        "row_forks": ((a, b), (b, c)),
    }
    if is_separate_plan:
        driver.run(**forks)
        forks = {}
    rows = [ScheduledSequence(s, 11, 1, True, ((1, s.block_table[1]),)) for s in (a, b, c)]
    seen = driver.run(*rows, **forks)
    check_same(seen, [outputs_alone(driver, GREEDY, PROMPT, 2)[1]] * 3)


def test_results_have_the_same_order_as_the_step_plan(driver: Driver):
    """The first plan mixes prefill chunks and decode rows. The second plan has only decode rows."""
    params = SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0)
    prompts = [range(1, n + 1) for n in (12, 3, 5, 20)]
    tables = [1, 2], [3], [8], [5, 6, 7]
    alone = [outputs_alone(driver, params, prompt, 3) for prompt in prompts]
    driver.run(released_seq_ids=tuple(driver.present))
    a, b, c, d = (driver.request(params, prompt).sequences[0] for prompt in prompts)
    for sequence, table in zip((a, b, c, d), tables, strict=True):
        sequence.block_table = table

    def whole(sequence: Sequence) -> ScheduledSequence:
        driver.present.add(sequence.seq_id)
        updates = tuple(enumerate(sequence.block_table))
        return ScheduledSequence(sequence, 0, len(sequence.token_ids), True, updates)

    def launch(*rows: ScheduledSequence) -> StepResult:
        return driver.runner.launch(StepPlan(0, rows), driver.sampling.__getitem__).read()

    expected = {s.seq_id: launch(whole(s)).prompt_logprobs[s.seq_id] for s in (a, c)}
    for sequence in (b, d):
        driver.prefill(sequence, sequence.block_table)
    result = launch(whole(a), driver.decode_row(b), whole(c), driver.decode_row(d))
    assert result.logprobs is not None
    seen = np.stack([result.token_ids, result.logprobs.logprobs], axis=1)
    check_same(seen, [alone[0][0], alone[1][1], alone[2][0], alone[3][1]])
    for sequence, token in zip((a, b, c, d), result.token_ids, strict=True):
        sequence.token_ids.append(int(token))
    check_same(driver.decode(a, b, c, d), [alone[0][1], alone[1][2], alone[2][1], alone[3][2]])
    assert set(result.prompt_logprobs) == set(expected)
    for seq_id, scores in result.prompt_logprobs.items():
        np.testing.assert_allclose(scores.logprobs, expected[seq_id].logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("seed", "options"), [(2**64 - 1, {}), (-1, {"presence_penalty": 1.5, "logit_bias": {3: 4.0}})]
)
def test_second_sample_equals_a_single_request_with_the_next_seed(
    driver: Driver, seed: int, options: dict
):
    options = options | {"temperature": 0.9, "logprobs": 0}
    params = SamplingParams(seed=seed, **options)
    first, second = driver.request(params, PROMPT, 2).sequences
    num_shared = len(PROMPT) - 1
    first.block_table = second.block_table = [1, 2]
    first.num_admitted_tokens = second.num_admitted_tokens = len(PROMPT)
    driver.run(ScheduledSequence(first, 0, num_shared, False, ((0, 1), (1, 2))))
    second.block_table = [1, 9]
    seen = driver.run(
        ScheduledSequence(first, num_shared, 1, True),
        ScheduledSequence(second, num_shared, 1, True, ((1, 9),)),
        row_forks=((first, second),),
        block_copies=((2, 9),),
    )
    for sequence, (token, _) in zip((first, second), seen, strict=True):
        sequence.token_ids.append(int(token))
    of_second = [seen[1], *(driver.decode(first, second)[1] for _ in range(4))]
    # The seed of the second sample is the seed of the first sample plus 1, modulo 2**64.
    check_same(of_second, outputs_alone(driver, SamplingParams(seed=0, **options), PROMPT, 5))


def test_new_batch_rows_are_loaded_onto_the_device_by_one_launch(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    """Only a row with logit biases needs its own launch, because a row of biases has one number per
    token of the vocabulary."""
    programs, launched = driver.runner.programs, []

    def counted(name: str):
        run = programs[name, None]
        return lambda **arguments: launched.append(name) or run(**arguments)

    both = {(name, None): counted(name) for name in ("load_rows", "load_bias")}
    monkeypatch.setattr(driver.runner, "programs", {**programs, **both})
    kinds = [{"presence_penalty": 1.0}, {"min_tokens": 2}, {"logit_bias": {3: 1.0}}, {}]
    sequences = [
        driver.request(SamplingParams(temperature=0.0, **kind), PROMPT[:3]).sequences[0]
        for kind in kinds
    ]
    for number, sequence in enumerate(sequences):
        sequence.block_table = [number + 1]
        sequence.num_admitted_tokens = 3
    driver.run(
        *(ScheduledSequence(one, 0, 3, True, ((0, i + 1),)) for i, one in enumerate(sequences))
    )
    assert launched == ["load_bias", "load_rows"]
    driver.run(ScheduledSequence(sequences[0], 3, 1, True))
    assert len(launched) == 2


def test_samples_of_a_best_of_request_get_logprobs(driver: Driver):
    params = SamplingParams(temperature=0.5, seed=1, n=1, best_of=2)
    (sequence, _) = driver.request(params, PROMPT, 2).sequences
    driver.prefill(sequence, [1, 2])
    plan = StepPlan(step_id=0, scheduled=(driver.decode_row(sequence),))
    logprobs = driver.runner.launch(plan, driver.sampling.__getitem__).read().logprobs
    assert logprobs is not None
    assert logprobs.top_token_ids.shape == (1, 20)


def test_swapped_sequence_continues_with_the_same_tokens(driver: Driver):
    alone = outputs_alone(driver, GREEDY, PROMPT, 6)
    (victim,) = driver.request(GREEDY, PROMPT).sequences
    (other,) = driver.request(GREEDY, range(20, 40)).sequences
    driver.prefill(victim, [1, 2])
    check_same(driver.decode(victim), alone[1])
    other.block_table = [1, 2, 5]
    seen = driver.run(
        ScheduledSequence(other, 0, 20, True, ((0, 1), (1, 2), (2, 5))),
        released_seq_ids=(victim.seq_id,),
        swap_outs=(SwapOut(7, (1, 2)),),
        block_copies=((6, 2),),
    )
    other.token_ids.append(int(seen[0, 0]))
    # The swapped blocks return in another order, during a decode step of another sequence.
    expected = outputs_alone(driver, GREEDY, range(20, 40), 3)
    check_same(driver.decode(other, swap_ins=(SwapIn(7, ((0, 12), (1, 11))),)), expected[1])
    victim.block_table = [12, 11]
    victim.num_admitted_tokens = n = len(victim.token_ids)
    seen = driver.run(
        driver.decode_row(other), ScheduledSequence(victim, n - 1, 1, True, ((0, 12), (1, 11)))
    )
    check_same(seen, [expected[2], alone[2]])
    victim.token_ids.append(int(seen[1, 0]))
    check_same([driver.decode(victim) for _ in range(3)], alone[3:])


def test_step_plan_with_only_swaps_is_launched(driver: Driver):
    (sequence,) = driver.request(GREEDY, PROMPT).sequences
    driver.prefill(sequence, [1, 2])
    plan = StepPlan(step_id=0, scheduled=(), swap_outs=(SwapOut(1, (1, 2)), SwapOut(2, (1,))))
    result = driver.runner.launch(plan, {}.__getitem__).read()
    assert result.token_ids.shape == (0,)
    assert result.logprobs is None
    assert result.prompt_logprobs == {}
    driver.run(dropped_swap_entry_ids=(2,), swap_ins=(SwapIn(1, ((0, 3), (1, 4))),))
    sequence.block_table = [3, 4]
    seen = driver.run(ScheduledSequence(sequence, 11, 1, True, ((0, 3), (1, 4))))
    check_same(seen, outputs_alone(driver, GREEDY, PROMPT, 2)[1])
    driver.run(swap_outs=(SwapOut(1, (1,)), SwapOut(2, (1,))))  # both ids are free again
    driver.run(dropped_swap_entry_ids=(1, 2))


def test_nothing_compiles_after_the_warm_up(driver: Driver):
    compiled = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 2)(1)
        assert len(compiled) == 1  # the listener is called
        parent, child = driver.request(GREEDY, PROMPT, 2).sequences
        driver.prefill(parent, [1, 2])
        copies = share_all_but_last_block(parent, child, 9)
        driver.run(row_forks=((parent, child),), block_copies=copies)
        for size in (1, 8, 9, 39):
            blocks = tuple(range(1, size + 1))
            driver.run(swap_outs=(SwapOut(1, blocks),))
            driver.decode(parent, swap_ins=(SwapIn(1, tuple(enumerate(blocks))),))
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_costs_of_recomputing_and_swapping_are_measured(driver: Driver):
    """The measurement changes no block of a sequence, and releases the batch rows that it used."""
    (sequence,) = driver.request(GREEDY, PROMPT).sequences
    driver.prefill(sequence, [1, 2])
    costs = measure_preemption_costs(driver.runner, CONFIG)
    assert [tokens for tokens, _ in costs.prefill_seconds] == [64]
    assert [blocks for blocks, _ in costs.swap_seconds] == [8, 16, 32]
    assert all(seconds > 0 for _, seconds in costs.prefill_seconds + costs.swap_seconds)
    roomy = measure_preemption_costs(driver.runner, replace(CONFIG, num_host_blocks=100))
    assert [blocks for blocks, _ in roomy.swap_seconds] == [8, 16, 32, 100]
    for block in range(3, 2 + CONFIG.max_num_seqs):
        driver.prefill(driver.request(GREEDY, [block]).sequences[0], [block])
    assert len(driver.present) == CONFIG.max_num_seqs  # all rows can be assigned
    seen = driver.decode(sequence)
    driver.run(released_seq_ids=tuple(driver.present))
    driver.present.clear()
    check_same(seen, outputs_alone(driver, GREEDY, PROMPT, 2)[1])


def test_error_in_sampling_setup_fails_only_that_request(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    faulty_params = SamplingParams(temperature=0.125, seed=3)
    healthy, faulty = driver.request(GREEDY, [1, 2, 3]), driver.request(faulty_params, [4, 5])
    expected = outputs_alone(driver, GREEDY, [1, 2, 3], 1)
    encode = batch.pack_params

    def fails_for_one(params: SamplingParams, seed: int) -> np.ndarray:
        if params is faulty_params:
            raise KeyError("injected")
        return encode(params, seed)

    monkeypatch.setattr(batch, "pack_params", fails_for_one)
    scheduled = []
    for block, (sequence,) in enumerate((faulty.sequences, healthy.sequences), start=1):
        sequence.block_table, num_tokens = [block], len(sequence.token_ids)
        scheduled.append(ScheduledSequence(sequence, 0, num_tokens, True, ((0, block),)))
    check_same(driver.run(*scheduled)[1], expected[0])
    ((request, error),) = driver.faults
    assert request is faulty
    assert isinstance(error, KeyError)


def test_error_during_batch_row_assignment_is_raised_to_the_caller(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> int:
        raise KeyError("injected")

    (sequence,) = driver.request(GREEDY, [1, 2, 3]).sequences
    monkeypatch.setattr(batch.RowTable, "assign", fail)
    plan = StepPlan(0, (ScheduledSequence(sequence, 0, 3, True, ((0, 1),)),))
    with pytest.raises(KeyError, match="injected"):
        driver.runner.launch(plan, driver.sampling.__getitem__)


@pytest.mark.parametrize(("backend", "held"), [(Backend.XLA, 0), (Backend.TRITON, 1)])
def test_memory_is_reserved_for_small_buffers_on_a_gpu_but_not_on_a_cpu(
    shared_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, backend: Backend, held: int
):
    made = []
    monkeypatch.setattr(
        model_runner, "reserve_fragments", lambda devices: made.append(backend) or made
    )
    model, dtype = read_model_config(MODEL), jax.numpy.dtype(jax.numpy.float32)
    split = SplitModel.of(make_abstract_model(model, dtype))
    config = replace(CONFIG, backend=backend)
    shapes = DeviceShapes.of(model, config, dtype)
    ModelRunner(split, shapes, config, shared_runner.programs)
    assert len(made) == held
