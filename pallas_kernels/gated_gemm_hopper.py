"""Gated products of many rows in Pallas Mosaic GPU, for Hopper (compute capability 9.0).

As many programs as the GPU has SMs take the output's tiles in turn, neighbours at the same time, so
that what they read is mostly in the L2. A tile is 128 rows by 128 columns, and a program is three
warp groups:

    loader             for each of its tiles: 64 of the depth at a time, a tile of x and one of
                       each factor's weight (gate and up), by the bulk copy engine into a ring of
                       places in shared memory
    two computers      of 64 rows each; sums of gate and up, in float32
      activated          in registers
      -> out             64 columns at a time through shared memory, by the copy engine as well,
                         while the loader is busy with the next tile

So half as much is written as of a product by both weights, and the activation reads nothing. For
few rows there is product_hopper.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.checks import check_whole_tiles
from pallas_kernels.tuning_hopper import HopperGemmConfig

STEP = 64  # of the depth, the widest swizzle
ROWS = 64  # of a computer
NUM_COMPUTERS = 2
NUM_FACTORS = 2
COLUMNS = 128  # of a tile, of each factor
CHUNK = 64  # columns written at once, the widest swizzle again
TILES_ABREAST = 8  # rows of tiles taken column by column


def gated_product(x, weight, *, config: HopperGemmConfig):
    """See the public entry of the same name."""
    return _product(x, weight.reshape(weight.shape[0], -1), config=config)


@functools.partial(jax.jit, static_argnames="config")
def _product(x, weight, *, config):
    """In a jit of its own, so that a step's layers have it traced and lowered once."""
    places, (rows, depth), width = config.num_stages, x.shape, weight.shape[1] // NUM_FACTORS
    check_whole_tiles((rows, depth, width), (NUM_COMPUTERS * ROWS, STEP, COLUMNS))
    if places < 2:  # a place is free once the next one's products are begun
        raise ValueError(f"num_stages is {places}; it must be at least 2")
    call = plgpu.kernel(
        functools.partial(_kernel, num_programs=config.num_programs),
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=NUM_COMPUTERS + 1,
        thread_name="warp_group",
        scratch_types={
            "x_smem": _tiles((places, NUM_COMPUTERS * ROWS, STEP), x.dtype),
            "weight_smem": _tiles((places, NUM_FACTORS, STEP, COLUMNS), x.dtype),
            "out_smem": _tiles((NUM_COMPUTERS, COLUMNS // CHUNK, ROWS, CHUNK), x.dtype),
            "full": plgpu.Barrier(num_arrivals=1 + NUM_FACTORS, num_barriers=places),
            "empty": plgpu.Barrier(num_arrivals=NUM_COMPUTERS, num_barriers=places),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        kernel_name="gated_gemm_hopper",
    )
    return call(x, weight)


def _tiles(shape, dtype):
    """Shared memory in the order in which products and the copy engine want it."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
    x_ref, weight_ref, out_ref, *, x_smem, weight_smem, out_smem, full, empty, num_programs
):
    warp_group, program = lax.axis_index("warp_group"), lax.axis_index("program")
    (num_rows, depth), width = x_ref.shape, out_ref.shape[1]
    places, tile_rows, _ = x_smem.shape
    num_steps, grid = depth // STEP, (num_rows // tile_rows, width // COLUMNS)
    num_turns = lax.div(math.prod(grid) + (num_programs - 1) - program, jnp.int32(num_programs))

    def tile_of(turn):
        """Its first row and its first column."""
        row, column = plgpu.planar_snake(program + turn * num_programs, grid, 0, TILES_ABREAST)
        return row * tile_rows, column * COLUMNS

    def place_of(turn, step):
        return lax.rem(turn * num_steps + step, jnp.int32(places))

    @pl.when(warp_group == NUM_COMPUTERS)
    def _load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(turn, _):
            row, column = tile_of(turn)

            def load(step, _):
                place = place_of(turn, step)

                @pl.when(turn * num_steps + step >= places)
                def _wait():
                    plgpu.barrier_wait(empty.at[place])

                rows, deep = pl.ds(row, tile_rows), pl.ds(step * STEP, STEP)
                plgpu.copy_gmem_to_smem(x_ref.at[rows, deep], x_smem.at[place], full.at[place])
                for factor in range(NUM_FACTORS):
                    source = weight_ref.at[deep, pl.ds(column + factor * width, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, weight_smem.at[place, factor], full.at[place])

            lax.fori_loop(0, num_steps, load, None)

        lax.fori_loop(0, num_turns, load_tile, None)

    @pl.when(warp_group < NUM_COMPUTERS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")

        def add_all(turn, *sums):
            def add(step, _):
                place = place_of(turn, step)
                plgpu.barrier_wait(full.at[place])
                x_tile = x_smem.at[place, pl.ds(warp_group * ROWS, ROWS)]
                for factor, own_sums in enumerate(sums):
                    plgpu.wgmma(own_sums, x_tile, weight_smem.at[place, factor])
                plgpu.wgmma_wait(NUM_FACTORS)  # the step before is done
                previous = place_of(turn, step + (places - 1))
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[previous]))

            lax.fori_loop(0, num_steps, add, None)
            results = [own_sums[...] for own_sums in sums]
            plgpu.barrier_arrive(empty.at[place_of(turn, num_steps - 1)])
            return results

        def compute_tile(turn, _):
            accumulator = plgpu.ACC((ROWS, COLUMNS), jnp.float32)
            add_own = functools.partial(add_all, turn)
            gate, up = pl.run_scoped(add_own, *[accumulator] * NUM_FACTORS)
            activated = gate * (up / (1 + jnp.exp(-gate)))  # silu(gate) * up, the gate finite
            activated = activated.astype(out_ref.dtype)
            row, column = tile_of(turn)
            rows = pl.ds(row + warp_group * ROWS, ROWS)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
            for chunk in range(COLUMNS // CHUNK):
                own_out = out_smem.at[warp_group, chunk]
                own_out[...] = activated[:, chunk * CHUNK : (chunk + 1) * CHUNK]
                plgpu.commit_smem()
                target = out_ref.at[rows, pl.ds(column + chunk * CHUNK, CHUNK)]
                plgpu.copy_smem_to_gmem(own_out, target)

        lax.fori_loop(0, num_turns, compute_tile, None)
        plgpu.wait_smem_to_gmem(0)
