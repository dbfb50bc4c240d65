"""What is recorded of the steps that a loop launches, over programs that compute nothing."""

import pytest

from bench.null_device import BLOCK_SIZE, MAX_MODEL_LEN, Clock, make_runner
from jpaged.config import LoopMode
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import Goal
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.engine.generation import Generation
from jpaged.engine.loop import EngineLoop
from jpaged.engine.preprocessing import Preprocessor, Prompt
from jpaged.engine.step_recorder import StepRecorder
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend

NUM_SEQS, NUM_BLOCKS, VOCAB_SIZE = 12, 100, 151936
LIMITS = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": NUM_SEQS}


def new_runner() -> ModelRunner:
    config = RuntimeConfig(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=8192,
        vocab_size=VOCAB_SIZE,
        backend=Backend.XLA,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_SEQS,
    )
    return make_runner(config, Clock())


def test_plans_and_programs_are_recorded_while_it_is_open():
    runner = new_runner()
    programs, launch = runner.programs, runner.launch
    limits = SchedulerConfig(NUM_SEQS, 8192, MAX_MODEL_LEN)
    scheduler = Scheduler(limits, BlockManager(NUM_BLOCKS, BLOCK_SIZE))
    loop = EngineLoop(scheduler, runner, LoopMode.SYNCHRONOUS)
    preprocessor = Preprocessor(
        None, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset(), seed=0, **LIMITS
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    asked = [preprocessor.check(Prompt(token_ids=[1, 2, 3]), greedy) for _ in range(NUM_SEQS)]
    sizes: list[int] = []
    with StepRecorder(runner, lambda plans: sizes.append(len(plans))) as steps:
        Generation(loop, preprocessor).complete(asked, Goal.LATENCY)
    assert sizes == [1, 1, 1]
    assert [len(launch.plans[0].scheduled) for launch in steps.launches] == [NUM_SEQS] * 3
    kinds = [[kind for kind, _ in launch.programs] for launch in steps.launches]
    assert kinds == [["prefill", "sample"], ["decode", "sample"], ["decode", "sample"]]
    assert [launch.batch_size("decode") for launch in steps.launches] == [None, 16, 16]
    Generation(loop, preprocessor).complete(asked, Goal.LATENCY)
    assert len(steps.launches) == 3
    assert runner.programs is programs
    assert runner.launch == launch


def test_a_recorder_is_opened_once_and_the_last_is_closed_first():
    runner = new_runner()
    programs, launch = runner.programs, runner.launch
    first, second = StepRecorder(runner), StepRecorder(runner)
    with first:
        with pytest.raises(RuntimeError, match="open already"):
            first.__enter__()
        with second, pytest.raises(RuntimeError, match="close that one first"):
            first.__exit__()
        second.__exit__()
        assert runner.launch != launch
    assert runner.programs is programs
    assert runner.launch == launch
    first.__exit__()
    assert runner.programs is programs
