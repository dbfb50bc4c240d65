"""Test the tables that the tuning tool writes, and its cases at small sizes."""

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import Backend, tuning
from pallas_kernels.attention import tuning as attention_tuning
from pallas_kernels.kv_cache import triton as kv_cache_triton
from tools.tune import best, candidates, merge, path_of, write
from tools.tune_cases import OPS, Op
from tools.tune_programs import Override, using
from tools.tune_sweep import Outcome, Sweep, seconds_a_call

DAY = datetime.date(2026, 11, 21)
SIZES = "head_size=128,itemsize=2"
SMALL = {
    "decode": {"tile_tokens": 32, "num_warps": 2},
    "prefill": {"tile_rows": 128, "tile_tokens": 16},
    "write": {"chunk": 64},
    "copy": {"chunk": 512},
    "rope_write": {"tile_rows": 2},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "decode")) for name in OPS]
)
def test_tuning_candidates_give_correct_results_on_small_inputs(name: str):
    op = dataclasses.replace(OPS[name](32, "float32"), cases=[])
    work = Sweep(op, [SMALL[name]], Backend.INTERPRET, seconds_a_call)
    for phase in (work.lower, work.compile, work.check):
        phase()
    assert [trial.override for trial in work.candidates] == [SMALL[name]]
    assert work.faults == {}


@pytest.mark.parametrize("name", [*OPS])
def test_tuning_candidates_are_valid_table_entries(name: str):
    op = OPS[name](128, "bfloat16")
    tried = candidates(op)
    assert len(tried) == len({json.dumps(c, sort_keys=True) for c in tried}) > 10
    facts = {"head_size": 128, "itemsize": 2, "device_kind": "some chip"}
    configs = {
        "decode": lambda: attention_tuning.decode_config(
            batch=8, num_kv_heads=8, max_context=4096, **facts
        ),
        "prefill": lambda: attention_tuning.prefill_config(
            num_tokens=64, batch=8, group=4, **facts
        ),
        "write": lambda: kv_cache_triton.move_config("write", **facts),
        "copy": lambda: kv_cache_triton.move_config("copy", **facts),
        "rope_write": lambda: kv_cache_triton.rope_write_config(**facts),
    }
    for override in tried:
        with using(op, override) as chosen:
            config = configs[name]()
        assert override.items() <= dataclasses.asdict(config).items()
        assert chosen == [config]


def test_tuned_entry_applies_only_to_one_op_and_its_sizes():
    with using(OPS["write"](128, "bfloat16"), {"chunk": 512}) as chosen:
        for op, head_size in (("copy", 128), ("write", 64)):
            config = kv_cache_triton.move_config(op, head_size=head_size, itemsize=2)
            assert config == kv_cache_triton.MoveConfig()
        assert chosen == []


def test_candidates_with_equal_programs_are_tried_once():
    # A token has 1,024 elements, so a larger chunk changes nothing. Interpreted programs do not
    # depend on the number of warps.
    tried = [{"chunk": 512}, {"chunk": 1024}, {"chunk": 512, "num_warps": 8}, {"chunk": 8192}]
    work = Sweep(OPS["write"](128, "bfloat16"), tried, Backend.INTERPRET, seconds_a_call)
    work.lower()
    assert [trial.override for trial in work.candidates] == tried[:1]


def lowered_for_h200(op: Op, tried: Sequence[Override], monkeypatch: pytest.MonkeyPatch) -> Sweep:
    original = jax.stages.Traced.lower

    def lower(traced: jax.stages.Traced, **options) -> jax.stages.Lowered:
        return original(traced, **{**options, "lowering_platforms": ("cuda",)})

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    work = Sweep(op, tried, Backend.TRITON, seconds_a_call)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        work.lower()
    return work


def test_launch_parameters_change_the_gpu_program(monkeypatch: pytest.MonkeyPatch):
    op = OPS["decode"](128, "bfloat16")
    fields = {"tile_tokens": 64, "num_warps": 4, "num_stages": 2}
    tried = [fields, *({**fields, name: 2 * value} for name, value in fields.items())]
    few = [case for case in op.cases if case.name == "8 x 1024"]
    work = lowered_for_h200(dataclasses.replace(op, cases=few), tried, monkeypatch)
    assert [trial.override for trial in work.candidates] == tried[1:]
    assert work.faults == {}


def test_ops_without_parameters_are_not_tuned(monkeypatch: pytest.MonkeyPatch):
    op = OPS["prefill"](128, "bfloat16")
    # These cases run another kernel, which has no tuned parameters.
    short = dataclasses.replace(op, cases=op.cases[2:], checks=[])
    work = lowered_for_h200(short, candidates(op), monkeypatch)
    assert (work.candidates, work.faults) == ([], {})
    plain = Sweep(op, candidates(op), Backend.XLA, seconds_a_call)
    plain.lower()
    assert plain.candidates == []


def test_fastest_candidate_that_slows_no_case_is_chosen():
    fast_but_uneven = Outcome({"chunk": 1}, {"a": 0.5, "b": 1.2})
    fast = Outcome({"chunk": 2}, {"a": 0.9, "b": 1.0})
    faster = Outcome({"chunk": 3}, {"a": 0.9, "b": 0.9})
    noise = Outcome({"chunk": 4}, {"a": 0.995, "b": 1.0})
    assert best([fast_but_uneven, fast, faster, noise]) == faster
    assert best([fast_but_uneven, noise, Outcome({"chunk": 5}, {}, "refused")]) is None


def test_writing_a_table_keeps_other_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Tables are cached by the name of the GPU, so use a new name.
    op, gpu = OPS["write"](128, "bfloat16"), tmp_path.name
    others = {"head_size=64,itemsize=2": {"num_warps": 2}}
    table = merge({"decode": others}, op, [Outcome({"chunk": 512}, {"a": 0.5})], DAY)
    assert table["decode"] == others
    write(path_of(gpu, tmp_path / "tuned"), table)
    monkeypatch.setattr(tuning.resources, "files", lambda _: tmp_path)
    facts = {"head_size": 128, "itemsize": 2, "device_kind": gpu}
    assert kv_cache_triton.move_config("write", **facts).chunk == 512
    assert kv_cache_triton.move_config("copy", **facts) == kv_cache_triton.MoveConfig()


def test_sweep_without_a_faster_candidate_is_recorded_with_an_empty_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    op, gpu = OPS["write"](128, "bfloat16"), tmp_path.name
    slow, refused = Outcome({"chunk": 512}, {"a": 2.0}), Outcome({"chunk": 8}, {}, "refused")
    before = {"write": {SIZES: {"chunk": 512}}, "swept": {"copy": {SIZES: "2025-01-01"}}}
    table = merge(before, op, [slow, refused], DAY)
    assert table["write"] == {SIZES: {}}
    assert table["swept"]["copy"] == {SIZES: "2025-01-01"}
    note = table["swept"]["write"][SIZES]
    assert note.startswith("2026-11-21, JAX ")
    assert note.endswith(": 2 candidates, 1 rejected")
    write(path_of(gpu, tmp_path / "tuned"), table)
    monkeypatch.setattr(tuning.resources, "files", lambda _: tmp_path)
    facts = {"head_size": 128, "itemsize": 2, "device_kind": gpu}
    assert kv_cache_triton.move_config("write", **facts) == kv_cache_triton.MoveConfig()
