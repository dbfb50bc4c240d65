"""Products of token rows by the weights of their experts in Pallas Mosaic GPU, for Hopper.

The rows are sorted by expert. A tile is up to `tile_rows` rows of one expert. `triton.expert_tiles`
lists the tiles on the device, so experts without rows take no time. A work item is the part of the
product for one tile and one block of columns. Each program, one per SM, computes every
`num_programs`-th work item:

    one loader and one or two consumers, each computing 64 columns, or 64 of gate and 64 of up:
        for item in work items of the program:
            for stage in depth: sums += (rows of x @ weight tile).T
            out rows = activation(sums).T, stored through shared memory

The product is transposed, as in the few-rows kernel of `gemm/hopper.py`: the weight's columns take
the place of the rows of the tensor core, so a tile may have only 8 rows.

The Tensor Memory Accelerator (TMA) copies the weights. In the gated GEMM, the rows of a tile are
not adjacent in x, and Hopper's TMA copies only ranges of rows. The loader's threads therefore
gather these rows with asynchronous copies of 16 bytes. In the down GEMM, a tile is a range of rows,
which the TMA copies. Rows past the end of a tile may hold any numbers; they are multiplied but
not stored. `hopper_pipeline.py` has the loops of the loader and of the consumers. The FP8 kernel
shares `multiply_rows` and `ProgramItems`.

Each row of the product depends only on its own row of x, and the order of its sums depends only on
the depth. A row's bits are therefore the same for every number of rows and every tile size.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import hopper_ops as ops
from pallas_kernels import hopper_pipeline as pipelines
from pallas_kernels.experts import triton
from pallas_kernels.experts.triton import HEADER_SIZE, TILE_FIELDS
from pallas_kernels.experts.tuning import ExpertsConfig
from pallas_kernels.gemm.hopper import TILE

_WARP_GROUP_SIZE = 128  # threads
_CHUNKS_PER_ROW = 8  # A stage has 128 bytes of each row, which are 8 chunks of 16 bytes.
_ROWS_PER_GATHER = _WARP_GROUP_SIZE // _CHUNKS_PER_ROW


def expert_gated_gemm(x, weight, routing, *, config: ExpertsConfig):
    """Run the public op `expert_gated_gemm` in Mosaic GPU."""
    return _multiply(x, weight, routing, gated=True, config=config)


def expert_down_gemm(x, weight, routing, *, config: ExpertsConfig):
    """Run the public op `expert_down_gemm` in Mosaic GPU."""
    rows = _multiply(x, weight, routing, gated=False, config=config)
    return triton.combine_rows(rows, *triton.choices(routing), dtype=x.dtype)


def _multiply(x, weight, routing, *, gated, config):
    weight_tiles = config.num_blocks, config.num_consumers, TILE, TILE
    options = {"gated": gated, "dtype": x.dtype, "config": config}
    return multiply_rows(_kernel, (x, weight), routing, weight_tiles=weight_tiles, **options)


def multiply_rows(body, operands, routing, *, gated, weight_tiles, dtype, config: ExpertsConfig):
    """Run an expert kernel, and return the rows [R, width] of the product, sorted by expert.

    Args:
        body: Function that the kernel runs: `_kernel` of this file or of fp8_hopper.py. The
            arguments are the `ProgramItems`, the references of the weights and of FP8 scales, and
            `weight_smem`.
        operands: x, the weights of all experts, and in FP8 the scales of x and of the weights. If
            `gated`, x has one row per token. Otherwise x has one row per pair, sorted by expert.
        routing: The `Routing`. Rows of the product that are in no tile are undefined.
        gated: Whether an expert has two weights, gate and up, and the result is silu(gate) * up.
        weight_tiles: Shape of the weight tiles of a pipeline stage. The last size is also the
            number of columns of x in the stage.
        dtype: Dtype of the product.
        config: Launch parameters.
    """
    num_rows = routing.order.shape[0]
    tiles = triton.expert_tiles(routing.offsets, num_rows=num_rows, tile_rows=config.tile_rows)
    order, num_choices = (routing.order, routing.experts.shape[1]) if gated else (None, None)
    options = {"num_choices": num_choices, "dtype": dtype, "config": config}
    return _expert_gemm(operands, tiles, order, body=body, weight_tiles=weight_tiles, **options)


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(
    jax.jit, static_argnames=("body", "weight_tiles", "num_choices", "dtype", "config")
)
def _expert_gemm(operands, tiles, order, *, body, weight_tiles, num_choices, dtype, config):
    """Run the kernel of `multiply_rows`; `order` and `num_choices` are None unless gated."""
    (x, weight, *scales), is_gated, name = operands, order is not None, "expert_gemm_hopper"
    num_stages, num_consumers, tile_rows = config.num_stages, config.num_consumers, config.tile_rows
    depth, stage_depth = x.shape[1], weight_tiles[-1]
    width = weight.shape[1] * weight.shape[2] // depth // (1 + is_gated)
    tile_columns = num_consumers * TILE * (1 if is_gated else config.num_blocks)
    sizes, tile = (tile_rows, depth, width), (8, stage_depth, tile_columns)
    pipelines.check_whole_tiles(sizes, tile, num_stages, True)
    num_rows = order.shape[0] if is_gated else x.shape[0]
    # Allocate at least one whole tile for the output, because a copy must not be larger than its
    # array.
    num_padded_rows = max(tile_rows, num_rows)
    if not is_gated and num_rows < tile_rows:
        x = jnp.pad(x, ((0, tile_rows - num_rows), (0, 0)))
    weight = weight.reshape(-1, weight.shape[2])
    if scales:
        scales, name = [scales[0].T, scales[1].reshape(-1)], "fp8_" + name
    x_shape, out_shape = (num_stages, tile_rows, stage_depth), (num_consumers, tile_rows, TILE)

    def kernel(x_ref, *refs, ring, x_smem, weight_smem, out_smem):
        num_weights = 1 + len(scales)
        tiles_ref, *order_refs, out_ref = refs[num_weights:]
        items = ProgramItems(
            ring=ring,
            x_ref=x_ref,
            tiles_ref=tiles_ref,
            order_ref=order_refs[0] if is_gated else None,
            out_ref=out_ref,
            x_views=x_smem,
            out_views=out_smem,
            num_choices=num_choices,
            tile_columns=tile_columns,
            config=config,
        )
        body(items, *refs[:num_weights], weight_smem=weight_smem)

    call = pipelines.pipelined_kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_padded_rows, width), dtype),
        grid={"program": config.num_programs},
        num_consumers=num_consumers,
        num_stages=num_stages,
        num_copies=math.prod(weight_tiles[:-2]) + 1,
        scratch={
            # `x_smem` has two views of the same memory. The tensor core reads swizzled tiles of 8
            # rows. The loader writes single 16-byte chunks in the gated GEMM, and whole rows in the
            # down GEMM.
            "x_smem": plgpu.RefUnion(
                ops.swizzled_smem(x_shape, x.dtype),
                plgpu.SMEM(x_shape, x.dtype) if is_gated else _row_smem(x_shape, x.dtype),
            ),
            "weight_smem": ops.swizzled_smem((num_stages, *weight_tiles), x.dtype),
            # `out_smem` has two views of the same memory. The consumers write tiles. The TMA
            # reads rows, so that any number of rows can be copied.
            "out_smem": plgpu.RefUnion(_tile_smem(out_shape, dtype), _row_smem(out_shape, dtype)),
        },
        name=name.replace("gemm", "gated_gemm") if is_gated else name,
    )
    return call(x, weight, *scales, tiles, *([order] if is_gated else []))[:num_rows]


def _kernel(items, weight_ref, *, weight_smem):
    (num_blocks, num_consumers), depth = weight_smem.shape[1:3], items.x_ref.shape[1]
    tile_rows, consumer = items.config.tile_rows, items.ring.warp_group
    # In a gated GEMM, the two blocks of a consumer are the same columns of gate and of up.
    block_stride = items.out_ref.shape[1] if items.is_gated else num_consumers * TILE
    # The loader gives registers to the consumers only if there are two consumers. With one
    # consumer, each thread already has the maximum of 255 registers.
    moves_registers = num_consumers > 1 and tile_rows * num_blocks > 128
    pipeline = items.pipeline(depth // TILE, moves_registers=moves_registers)

    def load_weights(item, step, stage):
        depth_slice = pl.ds(item.expert * depth + step * TILE, TILE)
        for block, consumer in itertools.product(range(num_blocks), range(num_consumers)):
            first = item.column + block * block_stride + consumer * TILE
            stage.copy(weight_ref.at[depth_slice, pl.ds(first, TILE)], weight_smem, block, consumer)

    def operands(stage):
        x_tile = items.x_views[0].at[stage].transpose((1, 0))
        weights = [weight_smem.at[stage, block, consumer] for block in range(num_blocks)]
        return [(weight.transpose((1, 0)), x_tile) for weight in weights]

    def compute(steps):
        item = steps.locate()
        results = steps.accumulate(operands, (TILE, tile_rows), num_blocks)
        results = [pipelines.apply_activation(results)] if items.is_gated else results
        items.store(
            results, item, lambda block: item.column + block * block_stride + consumer * TILE
        )

    items.run_loader(pipeline, load_weights)
    pipeline.consumers(lambda: pipeline.compute_tiles(compute))


class Item(NamedTuple):
    """A work item: the part of the product for one tile of rows and one block of columns.

    Attributes:
        expert: Index of the expert.
        row, count: First sorted row and number of rows of the tile.
        column: First column of the block.
    """

    expert: Any
    row: Any
    count: Any
    column: Any


@dataclass(frozen=True)
class ProgramItems:
    """The work items of one program of an expert kernel, and the arrays that the program uses.

    A work item is one tile of rows and one block of columns of the output (see `Item`).

    Attributes:
        ring: Pipeline stages of the program.
        x_ref: Rows of the tokens, or rows sorted by expert.
        tiles_ref: Result of `triton.expert_tiles`.
        order_ref: Pair index of each sorted row; None if x is sorted.
        out_ref: The output.
        x_views: Shared memory of the rows of all stages: for the tensor core, and for the loader.
        out_views: Shared memory of the output of all consumers: for the consumers, and for the copy
            engine.
        num_choices: Number of pairs per token; None if x is sorted.
        tile_columns: Number of output columns of a work item.
        config: Launch parameters.
    """

    ring: Any
    x_ref: Any
    tiles_ref: Any
    order_ref: Any
    out_ref: Any
    x_views: Any
    out_views: Any
    num_choices: int | None
    tile_columns: int
    config: ExpertsConfig

    @property
    def is_gated(self) -> bool:
        """Whether the kernel runs the gated GEMM, whose result is silu(gate) * up.

        The loader of the gated GEMM gathers the rows of x. The down GEMM is not gated.
        """
        return self.order_ref is not None

    @property
    def _gathers_ahead(self) -> int:
        """Number of stages whose gathers may be pending when the loader fills a stage.

        The number is at most `num_stages` - 2, because a consumer releases a stage only after the
        next stage is filled.
        """
        return self.config.num_stages - 2

    def pipeline(self, num_steps, *, moves_registers) -> pipelines.Pipeline:
        """Return the pipeline that computes the work items of the program.

        Args:
            num_steps: Number of pipeline steps per work item. Each step covers a part of the depth.
            moves_registers: Whether the loader gives registers to the consumers.
        """
        program, num_programs = lax.axis_index("program"), self.config.num_programs
        num_columns = self.out_ref.shape[1] // self.tile_columns
        num_items = self.tiles_ref[0] * num_columns

        def locate(index):
            item = index * num_programs + program
            tile = HEADER_SIZE + lax.div(item, jnp.int32(num_columns)) * TILE_FIELDS
            column = lax.rem(item, jnp.int32(num_columns)) * self.tile_columns
            expert, row, count = (self.tiles_ref[tile + field] for field in range(3))
            return Item(expert, row, count, column)

        num_tiles = pipelines.tiles_of_program(program, num_programs, num_items)
        registers = (56, 224) if moves_registers else None
        return pipelines.Pipeline(self.ring, num_steps, num_tiles, locate, registers)

    def run_loader(self, pipeline, load_weights):
        """Load the rows and the weights of all work items, in the loader warpgroup.

        Args:
            pipeline: Result of `self.pipeline`.
            load_weights: Function that starts to copy the weights of one step. See
                `Pipeline.load_tiles` for the arguments.
        """

        def load(item, step, stage):
            load_weights(item, step, stage)
            if self.is_gated:
                self._gather_rows(item, step, stage)
                return
            rows = pl.ds(item.row, self.config.tile_rows)
            stage_depth = self.x_ref.shape[1] // pipeline.num_steps
            depth_slice = pl.ds(step * stage_depth, stage_depth)
            stage.copy(self.x_ref.at[rows, depth_slice], self.x_views[1])

        @pipeline.loader
        def _load():
            pipeline.load_tiles(load)
            if self.is_gated:
                self._finish_gathers(pipeline)

    def _gather_rows(self, item, step, stage):
        """Start to gather the rows of a work item's tile from x, which is not sorted.

        Then signal to the consumers that the rows of an earlier step are in shared memory.
        """
        memory = self.order_ref, self.x_ref, self.x_views[1]
        rows = item.row, item.count
        _gather_rows(*memory, *rows, step, stage.index, num_choices=self.num_choices)

        @pl.when(stage.number >= self._gathers_ahead)
        def _publish():
            _wait_for_gathers(self._gathers_ahead)
            self._publish(stage.number - self._gathers_ahead)

    def _finish_gathers(self, pipeline):
        """Wait for the last gathers, and signal to the consumers that their rows are loaded."""
        _wait_for_gathers(0)
        total_steps = pipeline.num_tiles * pipeline.num_steps
        first = jnp.maximum(total_steps - self._gathers_ahead, 0)
        lax.fori_loop(first, total_steps, lambda number, _: self._publish(number), None)

    def _publish(self, number):
        """Signal to the consumers that the rows of step `number` are in shared memory."""
        stage = lax.rem(number, jnp.int32(self.config.num_stages))
        plgpu.barrier_arrive(self.ring.full.at[stage])

    def store(self, results, item, first_column):
        """Round the transposed sums of a consumer, and start to copy the sums to the output.

        Args:
            results: Sums of each block of columns.
            item: The work item whose sums the consumer computed.
            first_column: Function that takes the index of a block, and returns the block's first
                column in the output.
        """
        consumer = self.ring.warp_group
        tile_out, row_out = (view.at[consumer] for view in self.out_views)
        for block, result in enumerate(results):
            result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
            # Wait until the previous copy has read the shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tile_out.transpose((1, 0))[...] = result.astype(self.out_ref.dtype)
            plgpu.commit_smem()
            _store_rows(row_out, self.out_ref, item.row, item.count, first_column(block))


def _tile_smem(shape, dtype):
    """Return the type of shared memory for tiles [count, rows, columns].

    A tile is stored as chunks of columns, each with 128 bytes of every row.
    """
    chunk = shape[1], 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform(chunk), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _row_smem(shape, dtype):
    """Return the type of a view of the memory of `_tile_smem`, for copies of single rows.

    The view has the shape [count, chunks * rows, columns of a chunk]. A row has 128 bytes.
    """
    count, rows, columns = shape
    chunk_columns = 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((1, chunk_columns)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(
        (count, columns // chunk_columns * rows, chunk_columns), dtype, transforms=transforms
    )


def _gather_rows(order_ref, x_ref, x_smem, row, count, step, stage, *, num_choices):
    """Start to copy the rows of a tile to shared memory, for the columns of one step.

    Each thread copies 16 bytes of every 16th row. The rows are stored with the swizzle of
    `hopper_ops.SWIZZLE_TRANSFORMS`.

    Args:
        order_ref: Pair index of each sorted row.
        x_ref: Rows of the tokens.
        x_smem: Shared memory of all stages, [stages, rows, columns of a step].
        row, count: First sorted row and number of rows of the tile.
        step, stage: Index of the step along the depth, and index of its pipeline stage.
        num_choices: Number of pairs per token.
    """
    tile_rows = x_smem.shape[1]
    chunks_per_token = x_ref.shape[1] * x_ref.dtype.itemsize // 16

    def body(*values):
        order, x, smem, row, count, step, stage = values
        thread = ops.thread_index() % _WARP_GROUP_SIZE
        member, chunk = thread // _CHUNKS_PER_ROW, thread % _CHUNKS_PER_ROW
        members = [member + first for first in range(0, tile_rows, _ROWS_PER_GATHER)]
        pairs = [
            ops.load([ops.WordLoad(ops.offset(order, row + own, 4), 1, own < count)])[0][0]
            for own in members
        ]
        swizzled = ops.Value(arith.xori(chunk.ir, (member % 8).ir))
        for own, pair in zip(members, pairs, strict=True):
            source = (pair // num_choices) * chunks_per_token + step * _CHUNKS_PER_ROW + chunk
            target = (stage * tile_rows + own) * _CHUNKS_PER_ROW + swizzled
            with ops.when(own < count):
                ops.ptx(
                    "cp.async.cg.shared.global [$0], [$1], 16;",
                    ops.offset(smem, target, 16),
                    ops.offset(x, source, 16),
                )
        ops.ptx("cp.async.commit_group;")

    arguments = order_ref, x_ref, x_smem, row, count, step, stage
    types = (plgpu.RefType(),) * 3 + (ops.SCALAR_LAYOUT,) * 4
    ops.run_inline(body, *arguments, arg_types=types)


def _wait_for_gathers(num_pending):
    """Wait until all gathers of this thread except the last `num_pending` are complete.

    A thread waits only for its own copies, so all threads must then arrive at the stage's barrier.
    """

    def body():
        ops.ptx(f"cp.async.wait_group {num_pending};")
        # The fence makes the rows visible to the tensor cores.
        ops.ptx("fence.proxy.async.shared::cta;")

    ops.run_inline(body, arg_types=())


def _store_rows(row_out, out_ref, row, count, column):
    """Copy the first `count` rows of a tile to `out_ref`, at the given row and column.

    The size of a copy must be known at compile time. The rows are therefore copied in parts whose
    sizes are the powers of 2 that add up to `count`.

    Args:
        row_out: The tile in shared memory, with the type that `_row_smem` returns.
        out_ref: The output.
        row, count, column: First row, number of rows and first column of the tile in the output.
    """
    num_chunks, chunk_columns = TILE // row_out.shape[1], row_out.shape[1]
    tile_rows = row_out.shape[0] // num_chunks
    size = tile_rows
    while size:

        @pl.when(count & size != 0)
        def _copy(size=size):
            first = count & (-2 * size)
            for chunk in range(num_chunks):
                columns = pl.ds(column + chunk * chunk_columns, chunk_columns)
                plgpu.copy_smem_to_gmem(
                    row_out.at[pl.ds(chunk * tile_rows + first, size)],
                    out_ref.at[pl.ds(row + first, size), columns],
                )

        size //= 2
