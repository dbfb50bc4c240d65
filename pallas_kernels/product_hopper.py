"""Products of few rows by a weight in Pallas Mosaic GPU, for Hopper (compute capability 9.0).

A program has a tile of rows, 64 or 128 columns of the weight and a part of the depth:

    loader           64 of the depth at a time: a tile of x and one of the weight, by the bulk copy
                     engine into a ring of places in shared memory
    computers        one or two warp groups of 64 columns each; sums += (x tile . weight tile)
                     transposed, in float32: the unit multiplies 64 rows at least, and those are
                     the weight's columns, so x can have 8
    sums -> out      transposed on the way through shared memory, by the copy engine as well

Of a gated product it has the same columns of both factors, gate and up, each with sums of its own,
and the activation follows in registers. So few rows make few tiles: at most one program an SM, and
what counts is how much is on its way at once (tuning_hopper.py): enough for the memory, and no more
than that.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import check_whole_tiles
from pallas_kernels.tuning_hopper import HopperProductConfig

TILE = 64  # columns of a computer; depth of a step, the widest swizzle


def product_parts(x, weight, *, config: HopperProductConfig):
    """See the public entry of the same name; `config` says how many parts."""
    return _product(x, weight, gated=False, config=config)


def gated_product(x, weight, *, config: HopperProductConfig):
    """See the public entry of the same name; in one part."""
    rows = weight.reshape(weight.shape[0], -1)
    return _product(x, rows, gated=True, config=config)[0]


@functools.partial(jax.jit, static_argnames=("gated", "config"))
def _product(x, weight, *, gated, config):
    """In a jit of its own, so that a step's layers have it traced and lowered once."""
    (rows, depth), num_factors, num_computers = x.shape, 1 + gated, config.num_computers
    width = weight.shape[1] // num_factors
    out_dtype = x.dtype if config.num_parts == 1 else jnp.float32
    part_depth = depth // config.num_parts
    tile = config.tile_rows, config.num_parts * TILE, num_computers * TILE
    check_whole_tiles((rows, depth, width), tile)
    places = min(config.num_stages, part_depth // TILE)
    if places < 2 <= part_depth // TILE:  # a place is free once the next one's products are begun
        raise ValueError(f"num_stages is {config.num_stages}; it must be at least 2")
    call = plgpu.kernel(
        functools.partial(_kernel, part_depth=part_depth),
        out_type=jax.ShapeDtypeStruct((config.num_parts, rows, width), out_dtype),
        grid=(config.num_parts, rows // config.tile_rows, width // (num_computers * TILE)),
        grid_names=("part", "row_tile", "column_tile"),
        num_threads=num_computers + 1,
        thread_name="warp_group",
        scratch_types={
            "x_smem": _tiles((places, config.tile_rows, TILE), x.dtype),
            "weight_smem": _tiles((places, num_factors, num_computers, TILE, TILE), x.dtype),
            "out_smem": _tiles((num_computers, config.tile_rows, TILE), out_dtype),
            "full": plgpu.Barrier(
                num_arrivals=num_factors * num_computers + 1, num_barriers=places
            ),
            "empty": plgpu.Barrier(num_arrivals=num_computers, num_barriers=places),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="gated_product_hopper" if gated else "product_hopper",
    )
    return call(x, weight)


def _tiles(shape, dtype):
    """Shared memory in the order in which products and the copy engine want it."""
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(x_ref, weight_ref, out_ref, *, x_smem, weight_smem, out_smem, full, empty, part_depth):
    warp_group, part = lax.axis_index("warp_group"), lax.axis_index("part")
    (places, num_factors, num_computers), tile_rows = weight_smem.shape[:3], out_smem.shape[1]
    rows = pl.ds(lax.axis_index("row_tile") * tile_rows, tile_rows)
    num_steps, width = part_depth // TILE, out_ref.shape[2]

    def place_of(step):
        return lax.rem(step, jnp.int32(places))

    def columns_of(computer, factor=0):
        first = lax.axis_index("column_tile") * (num_computers * TILE) + computer * TILE
        return pl.ds(first + factor * width, TILE)

    @pl.when(warp_group == num_computers)
    def _load():
        def load(step, _):
            place = place_of(step)
            pl.when(step >= places)(lambda: plgpu.barrier_wait(empty.at[place]))
            deep = pl.ds(part * part_depth + step * TILE, TILE)
            for factor, computer in itertools.product(range(num_factors), range(num_computers)):
                source = weight_ref.at[deep, columns_of(computer, factor)]
                target = weight_smem.at[place, factor, computer]
                plgpu.copy_gmem_to_smem(source, target, full.at[place])
            plgpu.copy_gmem_to_smem(x_ref.at[rows, deep], x_smem.at[place], full.at[place])

        lax.fori_loop(0, num_steps, load, None)

    @pl.when(warp_group < num_computers)
    def _compute():
        def add_all(*sums):
            def add(step, _):
                place = place_of(step)
                plgpu.barrier_wait(full.at[place])
                x_tile = x_smem.at[place].transpose((1, 0))
                for factor, own_sums in enumerate(sums):
                    columns = weight_smem.at[place, factor, warp_group].transpose((1, 0))
                    plgpu.wgmma(own_sums, columns, x_tile)
                plgpu.wgmma_wait(num_factors)  # the step before is done
                previous = place_of(step + (places - 1))
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[previous]))

            lax.fori_loop(0, num_steps, add, None)
            return [own_sums[...] for own_sums in sums]

        accumulator = plgpu.ACC((TILE, tile_rows), jnp.float32)
        result, *up = pl.run_scoped(add_all, *[accumulator] * num_factors)
        if up:  # silu(gate) * up, the gate finite
            result *= up[0] / (1 + jnp.exp(-result))
        result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        own_out = out_smem.at[warp_group]
        own_out.transpose((1, 0))[...] = result.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_out, out_ref.at[part, rows, columns_of(warp_group)])
        plgpu.wait_smem_to_gmem(0)
