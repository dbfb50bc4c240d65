"""Products of few rows by a weight in Pallas Mosaic GPU, for Hopper (compute capability 9.0).

A program has `tile_rows` rows of x, `tile_columns` columns of the weight and a part of the depth:

    loader           a step of 64 of the depth at a time: a tile of x and one of the weight, by the
                     bulk copy engine, into a ring of places in shared memory
    computers        of 64 rows each: sums += x tile . weight tile, in float32
    sums -> out      through shared memory, where the places were

What few rows wait for is the L2: every program of the same rows reads the same x. So programs
side by side form a cluster, of which each reads a share of what they have in common and the copy
engine gives it to all.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tuning import HopperProductConfig

DEPTH = 64  # of a step: 128 bytes, the widest swizzle
HALF = 64  # rows of one computing warp group


def product_parts(x, weight, *, parts, config: HopperProductConfig):
    """See the public entry of the same name; the number of parts is given."""
    return _product(x, weight, parts=parts, config=config)


@functools.partial(jax.jit, static_argnames=("parts", "config"))
def _product(x, weight, *, parts, config):
    rows, depth = x.shape
    width = weight.shape[1]
    out_dtype = x.dtype if parts == 1 else jnp.float32
    num_computers = -(-config.tile_rows // HALF)
    row_tiles, column_tiles = rows // config.tile_rows, width // config.tile_columns
    places = min(config.num_stages, depth // parts // DEPTH)
    call = plgpu.kernel(
        functools.partial(_kernel, depth=depth // parts, places=places, config=config),
        out_type=jax.ShapeDtypeStruct((parts, rows, width), out_dtype),
        grid=(parts, row_tiles // config.cluster_rows, column_tiles // config.cluster_columns),
        grid_names=("part", "row_tile", "column_tile"),
        cluster=(config.cluster_rows, config.cluster_columns),
        cluster_names=("cluster_row", "cluster_column"),
        num_threads=num_computers + 1,
        thread_name="warp_group",
        scratch_types={
            "x_smem": _tiles((places, num_computers * HALF, DEPTH), x.dtype),
            "weight_smem": _tiles((places, DEPTH, config.tile_columns), x.dtype),
            "out_smem": _tiles((num_computers, HALF, config.tile_columns), out_dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=places),
            "read": plgpu.Barrier(num_arrivals=num_computers, num_barriers=places),
            "empty": plgpu.ClusterBarrier(
                collective_axes=("cluster_row", "cluster_column"), num_barriers=places
            ),
        },
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="product_hopper",
    )
    return call(x, weight)


def _tiles(shape, dtype):
    """Shared memory in the order in which products read it."""
    width = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = 128 if width % 128 == 0 else 64 if width % 64 == 0 else 32
    transforms = (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
    x_ref,
    weight_ref,
    out_ref,
    *,
    x_smem,
    weight_smem,
    out_smem,
    full,
    read,
    empty,
    depth,
    places,
    config,
):
    warp_group = lax.axis_index("warp_group")
    num_computers, part = out_smem.shape[0], lax.axis_index("part")
    tile_rows, tile_columns = config.tile_rows, config.tile_columns
    row_tile = lax.axis_index("row_tile") * config.cluster_rows + lax.axis_index("cluster_row")
    column_tile = lax.axis_index("column_tile") * config.cluster_columns
    column_tile += lax.axis_index("cluster_column")
    first_row, first_column = row_tile * tile_rows, column_tile * tile_columns
    columns, num_steps = pl.ds(first_column, tile_columns), depth // DEPTH
    has_cluster = config.cluster_rows * config.cluster_columns > 1

    @pl.when(warp_group == num_computers)
    def _load():
        for step in range(num_steps):
            place = step % places
            if step >= places:
                plgpu.barrier_wait(read.at[place])
                if has_cluster:
                    plgpu.barrier_arrive(empty.at[place])
                    plgpu.barrier_wait(empty.at[place])
            deep = pl.ds(part * depth + step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(
                x_ref.at[pl.ds(first_row, tile_rows), deep],
                x_smem.at[place, pl.ds(0, tile_rows)],
                full.at[place],
                collective_axes="cluster_column" if config.cluster_columns > 1 else None,
            )
            plgpu.copy_gmem_to_smem(
                weight_ref.at[deep, columns],
                weight_smem.at[place],
                full.at[place],
                collective_axes="cluster_row" if config.cluster_rows > 1 else None,
            )

    @pl.when(warp_group < num_computers)
    def _compute():
        own = pl.ds(pl.multiple_of(warp_group * HALF, HALF), HALF)

        def sums(acc):
            for step in range(num_steps):
                place = step % places
                plgpu.barrier_wait(full.at[place])
                plgpu.wgmma(acc, x_smem.at[place, own], weight_smem.at[place])
                plgpu.wgmma_wait(1)
                if 1 <= step and step - 1 + places < num_steps:
                    plgpu.barrier_arrive(read.at[(step - 1) % places])
            return acc[...]

        result = pl.run_scoped(sums, plgpu.ACC((HALF, tile_columns), jnp.float32))
        mine = out_smem.at[warp_group]
        mine[...] = result.astype(out_ref.dtype)
        plgpu.commit_smem()
        for computer in range(num_computers):
            size = min(HALF, tile_rows - computer * HALF)

            @pl.when(warp_group == computer)
            def _store(computer=computer, size=size):
                rows = pl.ds(first_row + computer * HALF, size)
                plgpu.copy_smem_to_gmem(mine.at[pl.ds(0, size)], out_ref.at[part, rows, columns])

        plgpu.wait_smem_to_gmem(0)
