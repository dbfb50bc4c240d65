"""Products of token rows by the weights of their experts in Pallas Mosaic GPU, for Hopper.

The rows are sorted by expert. A tile is up to `tile_rows` rows of one expert. `triton.expert_tiles`
lists the tiles on the device, so experts without rows take no time. An item is the part of the
product for one tile and one block of columns. Each program, one per SM, computes every
`num_programs`-th item:

    one loader and one or two consumers, each computing 64 columns, or 64 columns of two factors:
        for item in items of the program:
            for stage in depth: sums += (rows of x @ weight tile).T
            out rows = activation(sums).T, stored through shared memory

The product is transposed, as in the few-rows kernel of `gemm/hopper.py`: the weight's columns take
the place of the rows of the tensor core, so a tile may have only 8 rows. The loader fetches the
next item while the consumers store the current item.

The copy engine copies the weights. In the gated GEMM, the rows of a tile are not adjacent in x, and
the copy engine of Hopper GPUs copies only ranges of rows. The loader's threads therefore gather
these rows with asynchronous copies of 16 bytes. In the down GEMM, a tile is a range of rows, which
the copy engine copies. Rows past the end of a tile may hold any numbers; they are multiplied but
not stored.

Each row of the product depends only on its own row of x, and the order of its sums depends only on
the depth. A row's bits are therefore the same for every number of rows and every tile size.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels import hopper_ops as ops
from pallas_kernels.experts import triton
from pallas_kernels.experts.triton import HEADER_SIZE, TILE_FIELDS
from pallas_kernels.experts.tuning import ExpertsConfig
from pallas_kernels.gemm.hopper import TILE, accumulate_steps, check_whole_tiles

_WARP_GROUP_SIZE = 128  # threads
_CHUNKS_PER_ROW = 8  # A stage has 128 bytes of each row, which are 8 chunks of 16 bytes.
_ROWS_PER_GATHER = _WARP_GROUP_SIZE // _CHUNKS_PER_ROW


def expert_gated_gemm(x, weight, routing, *, config: ExpertsConfig):
    """Run the public op `expert_gated_gemm` in Mosaic GPU."""
    num_choices = routing.experts.shape[1]
    return _expert_gemm(
        x,
        weight,
        expert_tiles(routing, config),
        routing.order,
        num_choices=num_choices,
        dtype=x.dtype,
        config=config,
    )


def expert_down_gemm(x, weight, routing, *, config: ExpertsConfig):
    """Run the public op `expert_down_gemm` in Mosaic GPU."""
    tiles = expert_tiles(routing, config)
    rows = _expert_gemm(x, weight, tiles, num_choices=None, dtype=x.dtype, config=config)
    return triton.combine_rows(rows, *triton.choices(routing), dtype=x.dtype)


def expert_tiles(routing, config: ExpertsConfig):
    """Return the list of tiles of a routing; both GEMMs of a layer use it."""
    return triton.expert_tiles(
        routing.offsets, num_rows=routing.order.shape[0], tile_rows=config.tile_rows
    )


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("num_choices", "dtype", "config"))
def _expert_gemm(x, weight, tiles, order=None, *, num_choices, dtype, config):
    """Return the rows [R, width] of the product, sorted by expert.

    Args:
        x: Rows of the tokens [T, D] if `order` is given, else rows [R, D] sorted by expert.
        weight: Weights of all experts [E, D, width], or [E, D, 2 width] if `order` is given.
        tiles: Result of `expert_tiles`. Rows of the product that are in no tile are undefined.
        order: Pair index of each row. If given, the product is gated.
        num_choices: Number of pairs per token; None without `order`.
        dtype: Dtype of the product.
        config: Launch parameters.
    """
    depth, num_experts, is_gated = x.shape[1], weight.shape[0], order is not None
    num_consumers, num_blocks, tile_rows = config.num_consumers, config.num_blocks, config.tile_rows
    width = weight.shape[2] // (1 + is_gated)
    tile_columns = num_consumers * TILE * (1 if is_gated else num_blocks)
    check_whole_tiles((tile_rows, depth, width), (8, TILE, tile_columns), config.num_stages, True)
    num_rows = x.shape[0] if order is None else order.shape[0]
    # The output has at least one whole tile, because a copy must not be larger than its array.
    num_padded_rows = max(tile_rows, num_rows)
    if order is None and num_rows < tile_rows:
        x = jnp.pad(x, ((0, tile_rows - num_rows), (0, 0)))
    x_shape = config.num_stages, tile_rows, TILE
    call = plgpu.kernel(
        functools.partial(_kernel, num_choices=num_choices, config=config),
        out_type=jax.ShapeDtypeStruct((num_padded_rows, width), dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warp_group",
        scratch_types={
            # `x_smem` has two views of the same memory. The tensor core reads swizzled tiles of 8
            # rows. The loader writes bytes (gated) or rows.
            "x_smem": plgpu.RefUnion(
                ops.swizzled_smem(x_shape, x.dtype),
                plgpu.SMEM(x_shape, x.dtype) if is_gated else row_smem(x_shape, x.dtype),
            ),
            "weight_smem": ops.swizzled_smem(
                (config.num_stages, num_blocks, num_consumers, TILE, TILE), x.dtype
            ),
            # `out_smem` has two views of the same memory. The consumers write tiles. The copy
            # engine reads rows, so that any number of rows can be copied.
            "out_smem": plgpu.RefUnion(
                tile_smem((num_consumers, tile_rows, TILE), dtype),
                row_smem((num_consumers, tile_rows, TILE), dtype),
            ),
            "full": plgpu.Barrier(
                num_arrivals=num_blocks * num_consumers + 1, num_barriers=config.num_stages
            ),
            "empty": plgpu.Barrier(num_arrivals=num_consumers, num_barriers=config.num_stages),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="expert_gated_gemm_hopper" if is_gated else "expert_gemm_hopper",
    )
    arguments = x, weight.reshape(num_experts * depth, -1), tiles
    return call(*arguments, *(() if order is None else (order,)))[:num_rows]


def tile_smem(shape, dtype):
    """Return the type of shared memory for tiles [count, rows, columns].

    A tile is stored as chunks of columns, each with 128 bytes of every row.
    """
    chunk = shape[1], 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform(chunk), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def row_smem(shape, dtype):
    """Return a type for the memory of `tile_smem` from which single rows can be copied.

    The shape is [count, chunks * rows, columns of a chunk]; a row of this type has 128 bytes.
    """
    count, rows, columns = shape
    chunk_columns = 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((1, chunk_columns)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(
        (count, columns // chunk_columns * rows, chunk_columns), dtype, transforms=transforms
    )


def _kernel(
    x_ref,
    weight_ref,
    tiles_ref,
    *refs,
    x_smem,
    weight_smem,
    out_smem,
    full,
    empty,
    num_choices,
    config,
):
    *order_refs, out_ref = refs
    gated, (x_tiles, x_rows) = num_choices is not None, x_smem
    warp_group, program = lax.axis_index("warp_group"), lax.axis_index("program")
    num_stages, num_blocks, num_consumers = weight_smem.shape[:3]
    depth, width, tile_rows = x_ref.shape[1], out_ref.shape[1], config.tile_rows
    num_steps, num_programs = depth // TILE, config.num_programs
    # The two blocks of a gated consumer are columns of gate and the same columns of up.
    block_stride = width if gated else num_consumers * TILE
    tile_columns = num_consumers * TILE * (1 if gated else num_blocks)
    num_columns = width // tile_columns
    num_items = tiles_ref[0] * num_columns
    num_rounds = lax.div(num_items + (num_programs - 1) - program, jnp.int32(num_programs))
    gathers_ahead = num_gathers_ahead(num_stages)
    # The loader gives registers to the consumers only if there are two consumers. With one
    # consumer, each thread already has the maximum of 255 registers.
    moves_registers = num_consumers > 1 and tile_rows * num_blocks > 128

    def item_fields(round_index):
        """Return the expert, first row, number of rows, and first column of the tile that this
        program computes in a round."""
        item = round_index * num_programs + program
        tile = HEADER_SIZE + lax.div(item, jnp.int32(num_columns)) * TILE_FIELDS
        column = lax.rem(item, jnp.int32(num_columns)) * tile_columns
        return *(tiles_ref[tile + field] for field in range(3)), column

    def stage_index(round_index, step):
        return lax.rem(round_index * num_steps + step, jnp.int32(num_stages))

    @pl.when(warp_group == num_consumers)
    def _load():
        if moves_registers:
            plgpu.set_max_registers(56, action="decrease")

        def load_item(round_index, _):
            expert, row, count, column = item_fields(round_index)

            def load(step, _):
                stage, total_steps = stage_index(round_index, step), round_index * num_steps + step

                @pl.when(total_steps >= num_stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[stage])

                depth_slice = pl.ds(expert * depth + step * TILE, TILE)
                for block, consumer in itertools.product(range(num_blocks), range(num_consumers)):
                    first = column + block * block_stride + consumer * TILE
                    source = weight_ref.at[depth_slice, pl.ds(first, TILE)]
                    target = weight_smem.at[stage, block, consumer]
                    plgpu.copy_gmem_to_smem(source, target, full.at[stage])
                if not gated:
                    source = x_ref.at[pl.ds(row, tile_rows), pl.ds(step * TILE, TILE)]
                    plgpu.copy_gmem_to_smem(source, x_rows.at[stage], full.at[stage])
                    return
                gather_rows(
                    order_refs[0], x_ref, x_rows, row, count, step, stage, num_choices=num_choices
                )

                @pl.when(total_steps >= gathers_ahead)
                def _publish():
                    wait_for_gathers(gathers_ahead)
                    earlier = lax.rem(total_steps - gathers_ahead, jnp.int32(num_stages))
                    plgpu.barrier_arrive(full.at[earlier])

            lax.fori_loop(0, num_steps, load, None)

        lax.fori_loop(0, num_rounds, load_item, None)
        if gated:
            wait_for_gathers(0)
            total_steps = num_rounds * num_steps

            def publish(step, _):
                plgpu.barrier_arrive(full.at[lax.rem(step, jnp.int32(num_stages))])

            first = jnp.maximum(total_steps - gathers_ahead, 0)
            lax.fori_loop(first, total_steps, publish, None)

    @pl.when(warp_group < num_consumers)
    def _compute():
        if moves_registers:
            plgpu.set_max_registers(224, action="increase")
        tile_out, row_out = (view.at[warp_group] for view in out_smem)

        def operands(stage):
            x_tile = x_tiles.at[stage].transpose((1, 0))
            weights = [weight_smem.at[stage, block, warp_group] for block in range(num_blocks)]
            return [(weight.transpose((1, 0)), x_tile) for weight in weights]

        def add_all(round_index, *sums):
            own_stage = functools.partial(stage_index, round_index)
            results = accumulate_steps(num_steps, own_stage, operands, full, empty, *sums)
            plgpu.barrier_arrive(empty.at[stage_index(round_index, num_steps - 1)])
            return results

        def compute_item(round_index, _):
            _, row, count, column = item_fields(round_index)
            accumulator = plgpu.ACC((TILE, tile_rows), jnp.float32)
            add_own = functools.partial(add_all, round_index)
            results = pl.run_scoped(add_own, *[accumulator] * num_blocks)
            if gated:
                # The next line computes silu(gate) * up. The gate must be finite.
                gate, up = results
                results = [gate * (up / (1 + jnp.exp(-gate)))]
            for block, result in enumerate(results):
                result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
                # Wait until the previous copy has read `out_smem`.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                tile_out.transpose((1, 0))[...] = result.astype(out_ref.dtype)
                plgpu.commit_smem()
                first = column + block * block_stride + warp_group * TILE
                store_rows(row_out, out_ref, row, count, first)

        lax.fori_loop(0, num_rounds, compute_item, None)
        plgpu.wait_smem_to_gmem(0)


def gather_rows(order_ref, x_ref, x_smem, row, count, step, stage, *, num_choices):
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


def num_gathers_ahead(num_stages):
    """Return the number of stages whose gathers may be pending when the loader fills a stage.

    A consumer releases a stage only after the next stage is filled, so it is at most
    `num_stages` - 2.
    """
    return num_stages - 2


def wait_for_gathers(num_pending):
    """Wait until all gathers of this thread except the last `num_pending` are complete.

    A thread waits only for its own copies, so all threads must then arrive at the stage's barrier.
    """

    def body():
        ops.ptx(f"cp.async.wait_group {num_pending};")
        # The fence makes the rows visible to the tensor cores.
        ops.ptx("fence.proxy.async.shared::cta;")

    ops.run_inline(body, arg_types=())


def store_rows(row_out, out_ref, row, count, column):
    """Copy the first `count` rows of a tile to `out_ref`, at the given row and column.

    The size of a copy must be known at compile time. The rows are therefore copied in parts whose
    sizes are the powers of 2 that add up to `count`.

    Args:
        row_out: The tile in shared memory, with the type that `row_smem` returns.
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
