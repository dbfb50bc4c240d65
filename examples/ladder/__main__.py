"""Run all versions of attention (rungs) and jpaged's kernel; compare each with the previous one."""

from examples.ladder import (
    jpaged_kernels,
    rung_1_naive,
    rung_2_two_pass,
    rung_3_online,
    rung_4_block_tables,
    rung_5_ragged,
)
from examples.ladder.workload import main

RUNGS = (rung_1_naive, rung_2_two_pass, rung_3_online, rung_4_block_tables, rung_5_ragged)

if __name__ == "__main__":
    main(*RUNGS, *jpaged_kernels.rungs())
