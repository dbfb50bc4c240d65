"""The sweep of launch parameters: its logic with a made-up timer, its checks in interpret mode."""

import dataclasses
import json
from pathlib import Path

import pytest

from pallas_kernels import Backend, tuning
from tools.tune import (
    Outcome,
    best,
    candidates,
    check_results,
    merge,
    path_of,
    sweep,
    using,
    write,
)
from tools.tune_cases import OPS, Op

SMALL = {
    "decode": {"tile_tokens": 32, "num_warps": 2},
    "prefill": {"tile_rows": 64, "tile_tokens": 32},
    "write": {"chunk": 512},
    "copy": {"chunk": 512},
    "rope_write": {"tile_heads": 2},
}


def unchecked(op: Op, override) -> None:
    """All results are right."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPS])
def test_candidates_of_every_op_are_right_in_small(name: str):
    op = OPS[name](32, "float32")
    check_results(op, {}, Backend.INTERPRET)
    check_results(op, SMALL[name], Backend.INTERPRET)


@pytest.mark.parametrize("name", [*OPS])
def test_candidates_are_entries_that_tuning_can_read(name: str):
    op = OPS[name](128, "bfloat16")
    tried = candidates(op)
    assert len(tried) == len({json.dumps(c, sort_keys=True) for c in tried}) > 10
    facts = {"head_size": 128, "itemsize": 2, "device_kind": "some chip"}
    configs = {
        "decode": lambda: tuning.decode_config(batch=8, num_kv_heads=8, max_context=4096, **facts),
        "prefill": lambda: tuning.prefill_config(num_tokens=64, batch=8, group=4, **facts),
        "write": lambda: tuning.move_config("write", **facts),
        "copy": lambda: tuning.move_config("copy", **facts),
        "rope_write": lambda: tuning.rope_config(**facts),
    }
    for override in tried:
        with using(op, override):
            assert override.items() <= dataclasses.asdict(configs[name]()).items()


def test_a_wrong_candidate_is_rejected_before_it_is_timed():
    op, timed = OPS["write"](32, "float32"), []

    def check(op, override):
        if override["chunk"] == 1:
            raise ValueError("wrong results in 'a case': off by 1")

    def timer(op, case, override):
        timed.append(dict(override))
        return 1.0

    wrong, right = sweep(op, [{"chunk": 1}, {"chunk": 2}], timer, check)
    assert wrong.rejected.startswith("wrong results")
    assert not wrong.eligible
    assert not right.rejected
    assert {"chunk": 1} not in timed


def test_a_wrong_result_is_noticed():
    op = OPS["write"](32, "float32")
    case = op.checks[0]
    broken = dataclasses.replace(case, run=lambda kv, *rest, backend: (kv, ()))
    with pytest.raises(ValueError, match="wrong results in '5 tokens'"):
        check_results(dataclasses.replace(op, checks=[broken]), {}, Backend.INTERPRET)


def test_a_candidate_the_device_refuses_is_rejected():
    def timer(op, case, override):
        if override:
            raise RuntimeError("out of resource: shared memory\nand more")
        return 1.0

    (outcome,) = sweep(OPS["copy"](32, "float32"), [{"chunk": 2}], timer, unchecked)
    assert outcome.rejected == "out of resource: shared memory"


def test_the_fastest_that_harms_no_case_is_chosen():
    fast_but_uneven = Outcome({"chunk": 1}, {"a": 0.5, "b": 1.2})
    fast = Outcome({"chunk": 2}, {"a": 0.9, "b": 1.0})
    faster = Outcome({"chunk": 3}, {"a": 0.9, "b": 0.9})
    noise = Outcome({"chunk": 4}, {"a": 0.995, "b": 1.0})
    assert best([fast_but_uneven, fast, faster, noise]) == faster
    assert best([fast_but_uneven, noise, Outcome({"chunk": 5}, {}, "refused")]) is None


def test_a_table_keeps_other_entries_and_is_what_tuning_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    op = OPS["write"](128, "bfloat16")
    table = {"decode": {"head_size=64,itemsize=2": {"num_warps": 2}}}
    table = merge(table, op, Outcome({"chunk": 512}, {"a": 0.5}))
    write(path_of("Some GPU", tmp_path / "tuned"), table)
    monkeypatch.setattr(tuning.resources, "files", lambda _: tmp_path)
    facts = {"head_size": 128, "itemsize": 2, "device_kind": "Some GPU"}
    try:
        assert tuning.move_config("write", **facts).chunk == 512
        assert tuning.move_config("copy", **facts) == tuning.MoveConfig()
    finally:
        tuning._table.cache_clear()
    assert merge(table, op, None) == {"decode": table["decode"]}
