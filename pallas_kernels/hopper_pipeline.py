"""The pipeline of the Hopper GEMM kernels in Pallas Mosaic GPU: a loader, a ring, and consumers.

A program computes one tile of the output, or several tiles in turn. It has one loader warpgroup,
and one or more consumer warpgroups. They share a ring of pipeline stages in shared memory. The
depth is the axis that a product sums over. A step covers a part of the depth, and uses one stage:

    loader      for tile in tiles of the program:
                    for step in depth:
                        wait until all consumers have read the stage
                        start to copy the tile's part of x and of the weight to the stage
    consumer    for tile in tiles of the program:
                    for step in depth:
                        wait until the stage is filled
                        sums += product of the stage's operands, on the tensor core
                        release the stage
                    store the sums

The loader fetches the next tile while the consumers store the current tile. `pipelined_kernel`
builds such a kernel. A kernel's body makes a `Pipeline` and passes functions to it: a function that
loads one step, and a function that computes one tile. This file also has what several kernels do
with the sums: activations, and stores through shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops

# Constants of the kernels for many rows. A consumer computes `CONSUMER_ROWS` rows of a tile, in one
# or two accumulators of `TILE_COLUMNS` columns.
CONSUMER_ROWS = 64
NUM_CONSUMERS = 2
TILE_ROWS = NUM_CONSUMERS * CONSUMER_ROWS
TILE_COLUMNS = 128
# Registers per thread of the loader and of a consumer, if the loader gives registers to two
# consumers.
MANY_ROWS_REGISTERS = 40, 232
# The rows of tiles are divided into bands of `_SNAKE_TILE_WIDTH` rows. Programs compute the tiles
# of a band column by column.
_SNAKE_TILE_WIDTH = 8


class Ring(NamedTuple):
    """The barriers of a program's pipeline stages, and the index of the current warpgroup.

    Attributes:
        full: Barriers on which the loader's copies arrive; one per stage.
        empty: Barriers on which the consumers arrive when they have read a stage; one per stage.
        warp_group: Index of the warpgroup. The loader's index is `num_consumers`.
        num_consumers: Number of consumers.
    """

    full: Any
    empty: Any
    warp_group: Any
    num_consumers: int


class Stage(NamedTuple):
    """The pipeline stage (a buffer in shared memory) that the loader fills in one step.

    Attributes:
        index: Index of the stage.
        number: Number of earlier steps of the loader, in all tiles of the program.
        full: Barrier of the stage.
    """

    index: Any
    number: Any
    full: Any

    def copy(self, source, smem, *index):
        """Start to copy `source` to `smem[stage, *index]`."""
        plgpu.copy_gmem_to_smem(source, smem.at[self.index, *index], self.full)


def pipelined_kernel(
    body, *, out_type, grid, num_consumers, num_stages, num_copies, scratch, name
) -> Callable:
    """Return a kernel with a loader, a ring and consumers.

    Args:
        body: Function that every warpgroup runs. Its positional arguments are references of the
            inputs and of the output. Its keyword arguments are the `Ring`, named `ring`, and a
            reference for each name in `scratch`.
        out_type: Shape and dtype of the output.
        grid: Names and sizes of the axes of the grid.
        num_consumers: Number of consumer warpgroups.
        num_stages: Number of stages; at least 2 if the loader fills a stage more than once.
        num_copies: Number of arrivals after which a stage is full: one per copy by the Tensor
            Memory Accelerator (TMA), and one for all rows that the loader's threads gather.
        scratch: Types of shared memory by name.
        name: Name of the kernel.
    """

    def run(*refs, full, empty, **scratch):
        ring = Ring(full, empty, lax.axis_index("warp_group"), num_consumers)
        body(*refs, ring=ring, **scratch)

    return plgpu.kernel(
        run,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_consumers + 1,
        thread_name="warp_group",
        scratch_types={
            **scratch,
            "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages),
            "empty": plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name=name,
    )


@dataclass(frozen=True)
class Pipeline:
    """The loops of the loader and of the consumers over the tiles of a program.

    Attributes:
        ring: Stages of the program.
        num_steps: Number of steps along the depth of a tile. Each step uses one stage.
        num_tiles: Number of tiles that the program computes in turn; None if it computes one tile.
        locate: Function that takes the index of one of these tiles, and returns the location of the
            tile, such as its first row and column.
        registers: Registers per thread of the loader and of a consumer; None if all are equal.
    """

    ring: Ring
    num_steps: int
    num_tiles: Any = None
    locate: Callable = lambda index: None
    registers: tuple[int, int] | None = None

    def loader(self, body):
        """Run `body` in the loader warpgroup."""

        @pl.when(self.ring.warp_group == self.ring.num_consumers)
        def _run():
            if self.registers:
                plgpu.set_max_registers(self.registers[0], action="decrease")
            body()

    def consumers(self, body):
        """Run `body` in each consumer warpgroup."""

        @pl.when(self.ring.warp_group < self.ring.num_consumers)
        def _run():
            if self.registers:
                plgpu.set_max_registers(self.registers[1], action="increase")
            body()

    def load_tiles(self, load):
        """Copy the operands of all tiles to shared memory, in the loader warpgroup.

        A tile is copied in `num_steps` steps. Each step waits until a pipeline stage (a buffer in
        shared memory) is free, and starts to fill the stage.

        Args:
            load: Function that starts the copies of one step. The arguments of `load` are the
                location of the tile, the index of the step, and the `Stage` to fill.
        """
        full, empty = self.ring.full, self.ring.empty

        def load_tile(steps):
            location = steps.locate()

            def load_step(step, _):
                index, number = steps.stage_index(step), steps.number(step)
                # Each stage is empty when the loader fills it for the first time.
                pl.when(number >= full.shape[0])(lambda: plgpu.barrier_wait(empty.at[index]))
                load(location, step, Stage(index, number, full.at[index]))

            lax.fori_loop(0, self.num_steps, load_step, None)

        self._for_each_tile(load_tile)

    def compute_tiles(self, compute):
        """Compute and store all tiles, and wait until the stores are complete.

        Args:
            compute: Function that takes the `Steps` of a tile, and starts to store the tile.
        """
        self._for_each_tile(compute)
        plgpu.wait_smem_to_gmem(0)

    def _for_each_tile(self, body):
        if self.num_tiles is None:
            body(Steps(self, None))
        else:
            lax.fori_loop(0, self.num_tiles, lambda index, _: body(Steps(self, index)), None)


@dataclass(frozen=True)
class Steps:
    """The steps along the depth of one tile.

    Attributes:
        pipeline: The pipeline.
        tile_index: Index of the tile among the program's tiles; None if the program has one tile.
    """

    pipeline: Pipeline
    tile_index: Any

    @property
    def count(self) -> int:
        """Number of steps."""
        return self.pipeline.num_steps

    def locate(self):
        """Return the location of this tile in the output, such as the first row and column."""
        return self.pipeline.locate(self.tile_index)

    def number(self, step):
        """Return how many steps of the program come before `step` of this tile, earlier tiles
        included."""
        return step if self.tile_index is None else self.tile_index * self.count + step

    def stage_index(self, step):
        """Return the index of the stage that a step uses."""
        return lax.rem(self.number(step), jnp.int32(self.pipeline.ring.full.shape[0]))

    def wait(self, stage):
        """Wait until the loader has filled a stage."""
        plgpu.barrier_wait(self.pipeline.ring.full.at[stage])

    def release(self, stage):
        """Let the loader fill a stage again."""
        plgpu.barrier_arrive(self.pipeline.ring.empty.at[stage])

    def accumulate(self, operands, shape, num_sums):
        """Return the sums of the products of all steps, added by the tensor core.

        A step releases the previous step's stage: the tensor core may still read the current stage.
        A program with one tile does not release its last stage, because the loader never fills it
        again.

        Args:
            operands: Function that takes the index of a stage, and returns for each array of sums
                the pair of tiles to multiply.
            shape: Shape of one array of sums.
            num_sums: Number of arrays of sums.
        """

        def add_all(*sums):
            def add(step, _):
                stage = self.stage_index(step)
                self.wait(stage)
                for accumulator, factors in zip(sums, operands(stage), strict=True):
                    plgpu.wgmma(accumulator, *factors)
                # Wait until the products of the previous step are complete. The products of this
                # step may still run.
                plgpu.wgmma_wait(num_sums)
                # Release the previous step's stage. Add (number of stages - 1) to the step instead
                # of subtracting 1, because `rem` needs a number that is not negative.
                previous = self.stage_index(step + (self.pipeline.ring.full.shape[0] - 1))
                pl.when(step > 0)(lambda: self.release(previous))

            lax.fori_loop(0, self.count, add, None)
            results = [accumulator[...] for accumulator in sums]
            if self.tile_index is not None:
                self.release(self.stage_index(self.count - 1))
            return results

        return pl.run_scoped(add_all, *[plgpu.ACC(shape, jnp.float32)] * num_sums)


def tiles_of_program(program, num_programs, num_tiles):
    """Return the number of tiles of a program that computes every `num_programs`-th tile, beginning
    with tile `program`."""
    return lax.div(num_tiles + (num_programs - 1) - program, jnp.int32(num_programs))


def snake_tile(grid, program, num_programs, index):
    """Return the tile row and the tile column of the `index`-th tile that a program computes.

    `grid` holds the number of tile rows and the number of tile columns of the output. Concurrent
    programs get neighbouring tiles, so that most reads hit the L2 cache.
    """
    tile = program + index * num_programs
    return plgpu.planar_snake(tile, grid, 0, _SNAKE_TILE_WIDTH)


def apply_activation(sums):
    """Return silu(gate) * up if `sums` holds gate and up; if it holds one array, return that array.

    Gate must be finite: for -inf, the formula gives NaN instead of 0.
    """
    gate, *up = sums
    return gate * (up[0] / (1 + jnp.exp(-gate))) if up else gate


def write_transposed(result, smem):
    """Convert the result of a consumer warpgroup to the dtype of `smem`, and write the transpose of
    the result to `smem`."""
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    smem.transpose((1, 0))[...] = result.astype(smem.dtype)
    plgpu.commit_smem()


def store_row_tiles(results, out_smem, out_ref, consumer, rows, column):
    """Convert the results of a consumer warpgroup to the output's dtype, and start to copy the
    results to the output.

    Args:
        results: Float32 blocks [rows, `TILE_COLUMNS`], which are neighbours in the output.
        out_smem: Shared memory [consumers, chunks, rows, columns per chunk]. The chunks of a block
            are copied one after another.
        out_ref: The output.
        consumer: Index of the consumer warpgroup.
        rows: Slice of the output's rows that the consumer warpgroup computes.
        column: First column of the tile in the output.
    """
    _, num_chunks, _, width = out_smem.shape
    for index, result in enumerate(results):
        # Wait until the previous copy has read `out_smem`.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        result = result.astype(out_ref.dtype)
        for chunk in range(num_chunks):
            chunk_smem = out_smem.at[consumer, chunk]
            chunk_smem[...] = result[:, chunk * width : (chunk + 1) * width]
            plgpu.commit_smem()
            columns = pl.ds(column + index * TILE_COLUMNS + chunk * width, width)
            plgpu.copy_smem_to_gmem(chunk_smem, out_ref.at[rows, columns])


def check_whole_tiles(sizes, tile, num_stages, reuses_stages):
    """Raise ValueError unless tiles divide the GEMM evenly and there are enough stages.

    If stages are reused, there must be at least two: a consumer releases a stage only after the
    product of the next stage has started, so a single stage would deadlock.

    Args:
        sizes: The number of rows, the depth and the width of the GEMM.
        tile: The sizes of a tile along the same axes.
        num_stages: The number of pipeline stages.
        reuses_stages: Whether the loader fills a stage more than once.
    """
    if any(size % unit for size, unit in zip(sizes, tile, strict=True)):
        raise ValueError(
            f"rows, depth and width are {sizes}; they must be multiples of {tile}: call the "
            "public op, which chooses a kernel that fits"
        )
    if num_stages < 2 and reuses_stages:
        raise ValueError(f"num_stages is {num_stages}: pass at least 2")
