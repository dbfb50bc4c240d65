"""Test the recording of launched steps, with programs that compute nothing."""

import pytest

from bench.null_device import Clock, make_engine, make_runner, runtime_of
from jpaged import SamplingParams
from jpaged.config import LoopMode
from jpaged.engine.step_recorder import StepRecorder

NUM_SEQS = 12


def test_step_recorder_lists_the_compiled_programs_of_each_step_until_closed():
    engine = make_engine(runtime_of(NUM_SEQS), Clock(), LoopMode.SYNCHRONOUS)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    sizes: list[int] = []
    with engine.record_steps(lambda plans: sizes.append(len(plans))) as steps:
        engine.generate([[1, 2, 3]] * NUM_SEQS, greedy)
    assert sizes == [1, 1, 1]
    assert [len(launch.plans[0].scheduled) for launch in steps.launches] == [NUM_SEQS] * 3
    kinds = [[kind for kind, _ in launch.programs] for launch in steps.launches]
    assert kinds == [["prefill", "sample"], ["decode", "sample"], ["decode", "sample"]]
    assert [launch.batch_size("decode") for launch in steps.launches] == [None, 16, 16]
    engine.generate([[1, 2, 3]] * NUM_SEQS, greedy)
    assert len(steps.launches) == 3


def test_nested_recorders_must_close_in_reverse_order():
    runner = make_runner(runtime_of(NUM_SEQS), Clock())
    programs, launch = runner.programs, runner.launch_layers
    first, second = StepRecorder(runner), StepRecorder(runner)
    with first:
        with pytest.raises(RuntimeError, match="open already"):
            first.__enter__()
        with second, pytest.raises(RuntimeError, match="close that one first"):
            first.__exit__()
        second.__exit__()
        assert runner.launch_layers != launch
    assert runner.programs is programs
    assert runner.launch_layers == launch
    first.__exit__()
    assert runner.programs is programs
