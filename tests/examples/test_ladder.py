"""Test that all versions of attention in examples/ladder/ give the same output at their stated
cost."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from examples.ladder import jpaged_kernels, rung_1_naive, rung_4_block_tables, rung_5_ragged
from examples.ladder import workload as ladder
from examples.ladder.__main__ import RUNGS
from pallas_kernels import Backend

JPAGED = [jpaged_kernels.rung_of(backend) for backend in (Backend.XLA, Backend.INTERPRET)]
TITLES = [rung.TITLE for rung in RUNGS]


@pytest.fixture(scope="module")
def work() -> ladder.Workload:
    return ladder.make_workload()


@pytest.fixture(scope="module")
def table(work) -> list[str]:
    """Return the lines that `python -m examples.ladder` prints. Raise if two versions of
    attention give different results."""
    return ladder.climb(*RUNGS, *JPAGED, work=work)


def test_all_attention_versions_agree_and_print_their_numbers(table):
    assert table[0] == ladder.HEADER
    assert [line[: len(title)] for line, title in zip(table[1:], TITLES, strict=False)] == TITLES
    backends = [line.split("  ")[0] for line in table[1 + len(RUNGS) :]]
    assert backends == ["jpaged's kernel, xla", "jpaged's kernel, interpret"]


def test_naive_attention_equals_the_attention_formula(work):
    out = np.asarray(rung_1_naive.attend(*rung_1_naive.prepare(work)))
    q, k, v = (np.asarray(x, np.float64) for x in (work.q, work.k, work.v))
    start = 0
    for length in work.lengths:
        for row in range(start, start + length):
            scores = np.einsum("nh,knh->nk", q[row], k[start : row + 1]) / ladder.HEAD_SIZE**0.5
            weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            expected = np.einsum("nk,knh->nh", weights, v[start : row + 1])
            np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-5)
        start += length


def test_attention_version_with_a_different_result_is_detected(work):
    def attend(*arguments):
        return rung_1_naive.attend(*arguments).at[-1, 0, 0].add(1e-3)

    wrong = SimpleNamespace(TITLE="wrong", attend=attend, prepare=rung_1_naive.prepare)
    message = r"wrong: differs from the previous version of attention by 0\.001"
    with pytest.raises(RuntimeError, match=message):
        ladder.climb(rung_1_naive, wrong, work=work)


@pytest.mark.parametrize("rung", [*RUNGS, *JPAGED], ids=lambda rung: rung.TITLE)
def test_empty_slots_do_not_change_results(work, rung: Any, monkeypatch):
    with jax.default_matmul_precision("highest"):  # the programs that `table` compiled
        out = rung.attend(*rung.prepare(work))
        monkeypatch.setattr(ladder, "GARBAGE", -77.0)
        np.testing.assert_array_equal(out, rung.attend(*rung.prepare(work)))


def test_padding_takes_two_thirds_of_the_multiplications_of_naive_attention(work):
    cost = rung_1_naive.cost(work)
    assert f"{cost.waste:.0%}" == "67%"
    assert cost.num_slots == 512
    # Padding also takes 67% of the (query, key) pairs that the causal mask allows.
    seen = sum(n * (n + 1) // 2 for n in work.lengths)
    assert f"{1 - seen / (4 * 128 * 129 // 2):.0%}" == "67%"


@pytest.mark.parametrize("rung", [RUNGS[0], *RUNGS[3:4]], ids=lambda rung: rung.TITLE)
def test_stated_number_of_flops_equals_that_of_the_program(work, rung: ModuleType):
    closed = jax.make_jaxpr(rung.attend)(*rung.prepare(work))
    assert sum(flops(closed.jaxpr)) == rung.cost(work).num_flops


def test_two_pass_attention_reads_keys_twice(work):
    two, one = (RUNGS[i].cost(work) for i in (1, 2))
    assert two.num_flops * 2 == one.num_flops * 3
    assert two.bytes_read * 2 == one.bytes_read * 3
    assert (two.calls, one.calls) == (30, 15)
    # The last sequence has 8 tokens in a block of 16 slots. Each of the 8 queries is multiplied by
    # 16 keys, of which 8 are padding. This gives 8 x 8 = 64 padding pairs of a query and a key.
    assert two.waste == one.waste == 64 / 21632


def test_cost_of_ragged_attention_follows_from_its_tiles(work):
    *_, tiles = rung_5_ragged.prepare(work)
    steps = sum(-(-(int(at) + int(rows)) // ladder.BLOCK_SIZE) for _, _, at, rows in tiles)
    assert rung_5_ragged.cost(work).num_pairs == steps * rung_5_ragged.TILE * ladder.BLOCK_SIZE
    tile = jpaged_kernels.tile_of(rung_5_ragged.attend, rung_5_ragged.prepare(work))
    assert tile == (rung_5_ragged.TILE, ladder.BLOCK_SIZE)


def test_ragged_tile_writes_only_its_rows():
    # If a tile also wrote the rows after its last row, the next tile would overwrite these rows. If
    # the tiles run in reverse order, such wrong rows remain.
    *arrays, tiles = rung_5_ragged.prepare(ladder.make_workload((9, 8, 20)))
    in_order, reverse = (rung_5_ragged.attend(*arrays, each) for each in (tiles, tiles[::-1]))
    np.testing.assert_array_equal(in_order, reverse)


def test_ragged_attention_kernel_lowers_for_a_gpu(work, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        function = jax.jit(inspect.unwrap(rung_5_ragged.attend))
        traced = function.trace(*rung_5_ragged.prepare(work))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1


def test_each_block_belongs_to_one_sequence_and_the_blocks_are_in_random_order(work):
    tables = work.block_tables()
    blocks = [block for table in tables for block in table]
    assert sorted(blocks) == list(range(1, 16))
    assert blocks != sorted(blocks)
    *_, tables, _, _ = rung_4_block_tables.prepare(work)
    assert tables.shape == (4, 8)
    assert [(row == 0).sum() for row in tables] == [0, 4, 6, 7]


@pytest.mark.parametrize("lengths", [(), (8, 0), (-1,)])
def test_missing_or_nonpositive_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match=r"lengths=.* must be positive"):
        ladder.make_workload(lengths)


def test_command_line_error_names_the_option(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ladder", "--lengths", "12,x"])
    with pytest.raises(SystemExit):
        ladder.main(rung_1_naive)
    assert "--lengths 12,x: pass positive integers, such as 128,64,32,8" in capsys.readouterr().err


def test_selected_attention_versions_can_be_run_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ladder", "--lengths", "128,64,32,8"])
    ladder.main(rung_1_naive, rung_4_block_tables)
    header, first, second = capsys.readouterr().out.splitlines()
    assert header == ladder.HEADER
    assert first.startswith(rung_1_naive.TITLE)
    assert second.startswith(rung_4_block_tables.TITLE)


@pytest.mark.parametrize("rung", RUNGS, ids=TITLES)
def test_each_attention_version_is_a_short_file(rung: ModuleType):
    assert len(Path(str(rung.__file__)).read_text(encoding="utf-8").splitlines()) <= 80


def flops(jaxpr: Any, times: int = 1) -> Iterator[int]:
    """Yield the number of FLOPs of each matrix multiplication of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            yield times * 2 * int(depth) * equation.outvars[0].aval.size
        inner = equation.params.get("jaxpr")
        if inner is not None:
            repeats = equation.params.get("length", 1)  # a scan's
            yield from flops(getattr(inner, "jaxpr", inner), times * repeats)


def test_flops_in_loops_are_counted_per_iteration():
    def function(x):
        return jax.lax.scan(lambda carry, _: (carry @ x, None), x, length=3)[0]

    closed = jax.make_jaxpr(function)(jnp.ones((4, 4)))
    assert sum(flops(closed.jaxpr)) == 3 * 2 * 4 * 4 * 4
