"""The fused layer in Pallas Mosaic GPU for Hopper (compute capability 9.0), in one launch.

The kernel computes everything between two attentions of a decode step of at most 8 rows:

    attention_output -> output GEMM -> + hidden, norm -> gate and up GEMM -> silu(gate) * up
             -> down GEMM -> + hidden, norm -> qkv GEMM of the next layer

Grid (programs,), one program per SM. A GEMM is divided into units of 64 weight columns by 128
weight rows (gate and up: 64 columns of each by 64 rows). A program handles up to U consecutive
units of each of the four GEMMs, where units are ordered by column block. Program p starts at unit
p * U:

    loader        one warp; copies the units of all GEMMs, in order, into a ring of pipeline stages
                  in shared memory. Weights do not depend on earlier GEMMs, so the loader runs
                  ahead. At most `_MAX_COPIES_IN_FLIGHT` copies are in flight: more copies would
                  delay the exchanged words, whose latency bounds small models.
    consumers     four warpgroups; for each GEMM:
                    gather    load the unit's activations: each reader sums the partials of the
                              previous GEMM, in order, then adds the residual stream and
                              multiplies by the norm's weight, or applies the activation
                    multiply  out^T[64, 8] += weight^T . activations^T   (wgmma); two warpgroups per
                              unit, two units concurrently
                    flush     store the sums of the warpgroups in the exchange memory, one partial
                              per program and column block

The programs do not meet at barriers between GEMMs. The exchange memory is filled with `EMPTY_WORD`,
which no arithmetic produces, and a reader polls until it sees another word. Each launch fills the
exchange memory of the next launch. RMSNorm is a factor per row, so the kernel applies the factor
after the GEMM: programs exchange sums of squares, and 1 / rms multiplies the result of the GEMM.

All sums have a fixed order, so results do not depend on timing. Programs wait for each other, so
all must run concurrently. One program fits on an SM, because it uses most of the shared memory, and
the launch must be alone on the device: two such launches on two streams could deadlock.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.hopper_ops import Value, WordLoad
from pallas_kernels.tuning import MAX_SHARED_BYTES, is_hopper

ROWS = 8
_NUM_WARP_GROUPS = 4  # consumer warpgroups
_NUM_THREADS = 128 * _NUM_WARP_GROUPS
_NUM_WARPS = 4 * _NUM_WARP_GROUPS
# Two warpgroups together multiply one work unit (see `GemmPartition`).
_NUM_PAIRS = _NUM_WARP_GROUPS // 2
_MAX_COPIES_IN_FLIGHT = 3  # More copies in flight would delay the exchange between programs.
_PARTIAL_WORDS = ROWS * 64  # A split-K partial of 64 columns has `_PARTIAL_WORDS` words.
_OUTPUT, _GATE_UP, _DOWN, _QKV = range(4)
# Both numbers are indices of named barriers. Mosaic GPU itself uses the indices below 8.
_COMPUTE_BARRIER, _SCALES_BARRIER = 8, 9
_REF_TYPE = plgpu.RefType()


class LayerSizes(NamedTuple):
    """Widths of a layer.

    Attributes:
        hidden: Width of the residual stream.
        attention_output: Width of all query heads together.
        inner: Width of the feed-forward network.
        qkv: Width of the next layer's fused projection of queries, keys and values.
    """

    hidden: int
    attention_output: int
    inner: int
    qkv: int


@dataclass(frozen=True)
class GemmPartition:
    """Division of the work units of a GEMM among the programs.

    A work unit is the multiplication by one tile of the weight: one chunk of rows of one column
    block.

    Attributes:
        blocks: Number of column blocks of 64 columns.
        chunks: Number of chunks into which the weight rows are divided; a chunk has `depth` rows.
        depth: Number of weight rows of a chunk.
        programs: Number of programs.
    """

    blocks: int
    chunks: int
    depth: int
    programs: int

    @functools.cached_property
    def max_units(self) -> int:
        """Maximum number of work units of a program. The last programs may have fewer."""
        return -(-self.blocks * self.chunks // self.programs)

    @functools.cached_property
    def max_segments(self) -> int:
        """Maximum number of column blocks to which the work units of one program belong."""
        firsts = (p * self.max_units for p in range(self.programs))
        return max((f + self.max_units - 1) // self.chunks - f // self.chunks + 1 for f in firsts)

    @functools.cached_property
    def max_partials(self) -> int:
        """Maximum number of programs that compute parts of the same column block. Each of these
        programs stores one split-K partial."""
        return max(self.last_program(j) - self.first_program(j) + 1 for j in range(self.blocks))

    def first_program(self, block):
        """Return the index of the first program that computes a work unit (a chunk of weight rows)
        of the column block."""
        return (block * self.chunks) // self.max_units

    def last_program(self, block):
        """Return the index of the last program that computes a work unit (a chunk of weight rows)
        of the column block."""
        return (block * self.chunks + (self.chunks - 1)) // self.max_units


@dataclass(frozen=True)
class LayerPlan:
    """Division of the fused layer's work among programs, and layout of the exchange memory.

    Attributes:
        sizes: Widths of the layer.
        num_programs: Number of programs, one per SM.
        num_stages: Number of stages in the ring buffer for weights of each program; a stage holds
            16 KiB of weights.
    """

    sizes: LayerSizes
    num_programs: int
    num_stages: int

    @functools.cached_property
    def gemms(self) -> tuple[GemmPartition, ...]:
        """Partitions of the four GEMMs, in order: the output projection of the attention, the fused
        gate and up projection, the down projection, and the next layer's qkv projection."""
        s = self.sizes
        shapes = (
            (s.hidden, s.attention_output, 128),
            (s.inner, s.hidden, 64),
            (s.hidden, s.inner, 128),
            (s.qkv, s.hidden, 128),
        )
        return tuple(
            GemmPartition(width // 64, rows // depth, depth, self.num_programs)
            for width, rows, depth in shapes
        )

    @functools.cached_property
    def regions(self) -> dict[int | str, int]:
        """Offset in words of each region of the exchange memory.

        The first three regions hold the partials of the output, gate-up and down GEMMs. "stream" is
        the residual stream after the output GEMM, and "squares" holds its sums of squares. "last
        squares" holds the sums of squares of the stream after the down GEMM. "end" is the total
        size.
        """
        output, gate_up, down, qkv = self.gemms
        sizes = {
            _OUTPUT: self.num_programs * output.max_segments * _PARTIAL_WORDS,
            _GATE_UP: self.num_programs * gate_up.max_segments * 2 * _PARTIAL_WORDS,
            _DOWN: self.num_programs * down.max_segments * _PARTIAL_WORDS,
            "stream": ROWS * self.sizes.hidden // 2,
            "squares": gate_up.chunks * ROWS,
            "last squares": qkv.chunks * ROWS,
            "end": 0,
        }
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name], at = at, at + size
        return starts

    @property
    def num_words(self) -> int:
        """Size of the exchange memory in words."""
        return self.regions["end"]

    @functools.cached_property
    def activation_columns(self) -> int:
        """Number of columns of activations that a program keeps in shared memory."""
        return max(gemm.max_units * gemm.depth for gemm in self.gemms)


def layer_plan(
    sizes: LayerSizes, *, num_tokens: int, dtype: str, num_cores: int | None, device_kind: str = ""
) -> LayerPlan | None:
    """Return the plan of the fused kernel, or None if the separate ops should run.

    docs/kernels/layer.md lists measured times.

    Args:
        sizes: Widths of the layer.
        num_tokens: Number of rows of the step's bucket.
        dtype: Name of the dtype of activations and weights.
        num_cores: Number of SMs of the GPU; None if unknown.
        device_kind: Name of the GPU.
    """
    whole = all(size % 128 == 0 for size in sizes)
    # Each program sums all partials that it reads. With a large hidden size, these sums take more
    # time than the fusion saves.
    narrow = sizes.hidden < 2048
    fits = whole and narrow and num_tokens == ROWS and dtype == "bfloat16"
    if not (is_hopper(device_kind) and num_cores and fits):
        return None
    # maximum number of work units per program
    units = -(-sizes.hidden * max(sizes[1:]) // (num_cores * 8192))
    room = MAX_SHARED_BYTES - 8192 - (units + 1) * 128 * 8 * 2
    num_stages = min(12, room // 16384 // 2 * 2)
    return LayerPlan(sizes, num_cores, num_stages) if num_stages >= 4 else None


def fused_layer(attention_output, hidden, weights, num_rows, exchange, *, eps, plan: LayerPlan):
    """Run the public op `fused_layer` in one launch; all arrays have exactly 8 rows."""
    sizes, dtype = plan.sizes, hidden.dtype
    barriers = plgpu.Barrier(num_arrivals=2, num_barriers=plan.num_stages)
    call = plgpu.kernel(
        functools.partial(_kernel, plan=plan, eps=eps),
        out_type=(
            jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
            jax.ShapeDtypeStruct((plan.gemms[_QKV].max_partials, ROWS, sizes.qkv), jnp.float32),
            jax.ShapeDtypeStruct(exchange.shape, exchange.dtype),
        ),
        grid=(plan.num_programs,),
        grid_names=("program",),
        num_threads=_NUM_WARP_GROUPS + 1,
        thread_name="warp_group",
        scratch_types={
            "rows_smem": ops.swizzled_smem((ROWS, plan.activation_columns), dtype),
            "ring": ops.swizzled_smem((plan.num_stages, 2, 64, 64), dtype),
            "sums": plgpu.SMEM(((_NUM_WARP_GROUPS - 1) * _PARTIAL_WORDS,), jnp.float32),
            "scales": plgpu.SMEM((2 * ROWS,), jnp.float32),
            "full": barriers,
            "empty": barriers,
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="fused_layer",
    )
    output, norm, gate_up, down, next_norm, next_qkv = weights
    matrices = output, gate_up.reshape(sizes.hidden, -1), down, next_qkv
    # The kernel also stores into this exchange memory, so pass it as a mutable array.
    memory = jax.new_ref(exchange)
    return call(attention_output, hidden, norm, next_norm, *matrices, num_rows.reshape(1), memory)


def _kernel(
    attention_output,
    hidden,
    norm,
    next_norm,
    output,
    gate_up,
    down,
    qkv,
    num_rows,
    exchange,
    hidden_out,
    qkv_out,
    next_exchange,
    *,
    rows_smem,
    ring,
    sums,
    scales,
    full,
    empty,
    plan,
    eps,
):
    program, warp_group = lax.axis_index("program"), lax.axis_index("warp_group")
    num_stages, inner = plan.num_stages, plan.sizes.inner

    def stage_index(step):
        return lax.rem(step, jnp.int32(num_stages))

    def num_units(gemm):
        left = gemm.blocks * gemm.chunks - program * gemm.max_units
        return jnp.clip(left, 0, gemm.max_units)

    def load_unit(gemm_index, gemm, weight, index, step):
        unit = program * gemm.max_units + index
        block, chunk = (op(unit, jnp.int32(gemm.chunks)) for op in (lax.div, lax.rem))
        stage = stage_index(step)
        pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        waited = step - _MAX_COPIES_IN_FLIGHT
        pl.when(waited >= 0)(lambda: plgpu.barrier_wait(full.at[stage_index(waited)]))
        for half in range(2):
            row, column = chunk * gemm.depth, block * 64
            if gemm_index == _GATE_UP:
                column += half * inner
            else:
                row += half * 64
            source = weight.at[pl.ds(row, 64), pl.ds(column, 64)]
            plgpu.copy_gmem_to_smem(source, ring.at[stage, half], full.at[stage])
        return step + 1

    @pl.when(warp_group == _NUM_WARP_GROUPS)
    def _load():
        @plgpu.warp_map
        def _warp(warp):
            @pl.when(warp == 0)
            def _stream():
                step = jnp.int32(0)
                for gemm_index, weight in enumerate((output, gate_up, down, qkv)):
                    gemm = plan.gemms[gemm_index]
                    unit = functools.partial(load_unit, gemm_index, gemm, weight)
                    step = lax.fori_loop(0, num_units(gemm), unit, step)

            pl.when(warp == 1)(lambda: _compute_last_scales(plan, eps, num_rows, exchange, scales))

    def multiply(gemm, start, stop, step):
        """Multiply the weights of one column block by the activations.

        Args:
            gemm: The `GemmPartition`.
            start, stop: Range of this program's work units: tiles of the weight in the column
                block. A tile has 64 columns (gate and up: 64 of each) by `gemm.depth` rows.
            step: Number of work units of this program before `start`, over all GEMMs.

        Returns:
            The product [64, 8], summed over the half tiles that this warpgroup multiplies.
        """
        pair, half = lax.div(warp_group, 2), lax.rem(warp_group, 2)
        # Each use of a pipeline stage completes one phase of the stage's barrier, and a waiting
        # warpgroup must not miss a phase. So each stage belongs to one pair of warpgroups, which
        # handles every `_NUM_PAIRS`-th work unit.
        first = step + lax.rem(
            pair - lax.rem(step, jnp.int32(_NUM_PAIRS)) + _NUM_PAIRS, jnp.int32(_NUM_PAIRS)
        )
        count = lax.div(step + stop - start - first + (_NUM_PAIRS - 1), jnp.int32(_NUM_PAIRS))

        def run(acc):
            def unit(index, _):
                number = first + index * _NUM_PAIRS
                stage = stage_index(number)
                plgpu.barrier_wait(full.at[stage])
                column = (start + number - step) * gemm.depth
                if gemm.depth == 128:
                    column += half * 64
                rows = rows_smem.at[:, pl.ds(pl.multiple_of(column, 64), 64)]
                plgpu.wgmma(acc, ring.at[stage, half].transpose((1, 0)), rows.transpose((1, 0)))
                plgpu.wgmma_wait(1)
                before = stage_index(number - _NUM_PAIRS)
                pl.when(index > 0)(lambda: plgpu.barrier_arrive(empty.at[before]))
                return _

            lax.fori_loop(0, count, unit, jnp.int32(0))
            plgpu.wgmma_wait(0)
            last = stage_index(first + (count - 1) * _NUM_PAIRS)
            pl.when(count > 0)(lambda: plgpu.barrier_arrive(empty.at[last]))
            return acc[...]

        return pl.run_scoped(run, plgpu.ACC((64, ROWS), jnp.float32))

    @pl.when(warp_group < _NUM_WARP_GROUPS)
    def _compute():
        count, step = num_rows[0], jnp.int32(0)
        _clear_exchange(plan, next_exchange)
        gathers = (
            {"attention_output": attention_output},
            {"hidden": hidden, "norm": norm},
            {"scales": scales},
            {"norm": next_norm, "hidden_out": hidden_out},
        )
        for gemm_index, gemm in enumerate(plan.gemms):
            units, first = num_units(gemm), program * gemm.max_units
            _gather(plan, eps, gemm_index, count, units, exchange, rows_smem, gathers[gemm_index])
            block = lax.div(first, jnp.int32(gemm.chunks))
            for segment in range(gemm.max_segments):
                edges = ((block + segment + i) * gemm.chunks - first for i in range(2))
                start, stop = (jnp.clip(edge, 0, units) for edge in edges)
                acc = multiply(gemm, start, stop, step)
                step += stop - start
                if gemm_index == _QKV and segment == 0:
                    _wait_for_scales()

                @pl.when(stop > start)
                def _flush_segment(gemm_index=gemm_index, acc=acc, segment=segment):
                    target = qkv_out if gemm_index == _QKV else exchange
                    _flush(plan, gemm_index, acc, count, jnp.int32(segment), sums, scales, target)


def _wait_for_consumers():
    ops.barrier(_COMPUTE_BARRIER, _NUM_THREADS)


def _wait_for_scales():
    """Wait until `_compute_last_scales` has stored 1 / rms of each row."""
    ops.run_inline(lambda: ops.barrier(_SCALES_BARRIER, _NUM_THREADS + 32), arg_types=())


def _clear_exchange(plan, next_exchange):
    """Fill `next_exchange`, the exchange memory of the next launch, with `EMPTY_WORD`."""

    def body(memory):
        first = (ops.program_index() * _NUM_THREADS + ops.thread_index()) * 4
        stride = plan.num_programs * _NUM_THREADS * 4
        for start in range(0, plan.num_words, stride):
            at = first + start
            with ops.when(at < plan.num_words):
                empty = [first * 0 + ops.EMPTY_WORD] * 4
                ops.store("global", ops.offset(memory, at, 4), empty)

    ops.run_inline(body, next_exchange, arg_types=(_REF_TYPE,))


def _square_sum_loads(plan, memory, region, chunks, row):
    """Return the loads with which this lane (thread of a warp) reads sums of squares of a row.

    The row has one sum of squares per chunk. Lane i loads the sums of chunks i, i + 32, i + 64, ...
    """
    lane = ops.thread_index() % 32
    starts = range(0, chunks, 32)
    loads = ((lane + c) * ROWS + row + plan.regions[region] for c in starts)
    return [
        WordLoad(ops.offset(memory, load, 4), 1, lane + c < chunks)
        for load, c in zip(loads, starts, strict=True)
    ]


def _row_scale(plan, eps, words):
    """Return 1 / rms of a row, from the sums of squares that each lane has loaded."""
    squares = ops.warp_sum(ops.sum_values([ops.bitcast_to_float32(word)[0] for word in words]))
    return ops.rsqrt(squares * (1.0 / plan.sizes.hidden) + eps)


def _compute_last_scales(plan, eps, num_rows, exchange, scales):
    """Store 1 / rms of each row of the final residual stream.

    One warp of the loader's warpgroup runs this code, and waits for the sums of squares while the
    consumers multiply.
    """

    def body(num_rows, memory, scales):
        lane = ops.thread_index() % 32
        count = ops.load([WordLoad(num_rows, 1, lane >= 0)])[0][0]
        with ops.loop(lane * 0, count, 1) as row:
            chunks = plan.gemms[_QKV].chunks
            words = ops.poll(_square_sum_loads(plan, memory, "last squares", chunks, row))
            scale = _row_scale(plan, eps, words)
            with ops.when(lane.eq(0)):
                ops.store("shared", ops.offset(scales, row + ROWS, 4), [scale])
        ops.ptx(f"bar.arrive {_SCALES_BARRIER}, {_NUM_THREADS + 32};")

    ops.run_inline(body, num_rows, exchange, scales, arg_types=(_REF_TYPE,) * 3)


def _gather(plan, eps, gemm_index, count, units, exchange, rows_smem, argument_refs):
    """Compute the activations for a program's work units, and store them in shared memory.

    Only the first `count` rows are computed. A task computes one row for one work unit. A warp runs
    one or two tasks at a time, and issues all loads of these tasks together.
    """
    gemm = plan.gemms[gemm_index]
    columns_per_lane = gemm.depth // 32
    # Handling two work units at a time doubles the number of loads in flight.
    units_at_once = 2 if gemm.max_units > 8 else 1
    shared_scales = gemm_index == _DOWN and gemm.max_units > 8

    def body(count, units, memory, rows, *pointers):
        pointers_by_name = dict(zip(argument_refs, pointers, strict=True))
        warp, lane = ops.thread_index() // 32, ops.thread_index() % 32
        if shared_scales:
            with ops.when(warp < count):
                chunks = plan.gemms[_GATE_UP].chunks
                scale = _row_scale(
                    plan, eps, ops.poll(_square_sum_loads(plan, memory, "squares", chunks, warp))
                )
                with ops.when(lane.eq(0)):
                    ops.store("shared", ops.offset(pointers_by_name["scales"], warp, 4), [scale])
            _wait_for_consumers()
        task = functools.partial(
            _GatherTask,
            plan,
            gemm_index,
            columns_per_lane,
            memory,
            pointers_by_name,
            count,
            units,
            shared_scales,
        )
        with ops.loop(warp, count * gemm.max_units, _NUM_WARPS * units_at_once) as number:
            tasks = [task(number + i * _NUM_WARPS) for i in range(units_at_once)]
            get = ops.load if gemm_index == _OUTPUT else ops.poll
            words = get([load for t in tasks for load in t.loads])
            for t in tasks:
                mine, words = words[: len(t.loads)], words[len(t.loads) :]
                with ops.when(t.is_live):
                    t.finish(eps, mine, rows)
        # The fence makes the stores visible to the tensor cores.
        ops.ptx("fence.proxy.async.shared::cta;")
        _wait_for_consumers()

    arg_types = (
        ops.SCALAR_LAYOUT,
        ops.SCALAR_LAYOUT,
        _REF_TYPE,
        plgpu.RefType(ops.SWIZZLE_TRANSFORMS),
        *(_REF_TYPE for _ in argument_refs),
    )
    ops.run_inline(
        body, count, units, exchange, rows_smem, *argument_refs.values(), arg_types=arg_types
    )


class _GatherTask:
    """The task of a warp: compute the activations of one row for one work unit.

    The constructor collects the loads in `self.loads`, which the caller issues. `finish` computes
    the activations from the loaded words, and stores them in shared memory.
    """

    def __init__(
        self,
        plan,
        gemm_index,
        width,
        memory,
        pointers_by_name,
        count,
        units,
        shared_scales,
        number: Value,
    ):
        gemm = plan.gemms[gemm_index]
        self.plan, self.gemm_index, self.memory, self.pointers_by_name = (
            plan,
            gemm_index,
            memory,
            pointers_by_name,
        )
        self.shared_scales, self.width = shared_scales, width
        self.row, self.index = number // gemm.max_units, number % gemm.max_units
        self.is_live = (self.index < units) & (self.row < count)
        unit = ops.program_index() * gemm.max_units + self.index
        self.block, self.chunk = unit // gemm.chunks, unit % gemm.chunks
        self.column = self.chunk * gemm.depth + ops.thread_index() % 32 * width
        self.loads = []
        (
            self._add_attention_loads,
            self._add_stream_loads,
            self._add_activation_loads,
            self._add_stream_loads,
        )[gemm_index]()

    def _exchange_load(self, region, index, count, mask):
        """Return a `WordLoad` that loads `count` words from a region of the exchange memory."""
        address = ops.offset(self.memory, index + self.plan.regions[region], 4)
        return WordLoad(address, count, mask & self.is_live)

    def _argument_load(self, name, index, columns):
        """Return a `WordLoad` that loads `columns` numbers from the bfloat16 argument `name`."""
        address = ops.offset(self.pointers_by_name[name], index, 2)
        return WordLoad(address, columns // 2, self.is_live)

    def _add_partial_loads(self, gemm_index, sides):
        """Add the loads of the split-K partials that this task sums.

        A task needs all partials of one column block of the GEMM `gemm_index`.

        `sides` is 2 for the gate and up GEMM, else 1.
        """
        gemm = self.plan.gemms[gemm_index]
        block, within = self.column // 64, self.column % 64
        first, last = gemm.first_program(block), gemm.last_program(block)
        for program in (first + i for i in range(gemm.max_partials)):
            segment = block - (program * gemm.max_units) // gemm.chunks
            number = program * gemm.max_segments + segment
            at = number * (_PARTIAL_WORDS * sides) + self.row * 64 + within
            for side in range(sides):
                load = self._exchange_load(
                    gemm_index, at + side * _PARTIAL_WORDS, self.width, program <= last
                )
                self.loads.append(load)

    def _add_attention_loads(self):
        size = self.plan.sizes.attention_output
        self.loads.append(
            self._argument_load("attention_output", self.row * size + self.column, self.width)
        )

    def _add_stream_loads(self):
        at = self.row * self.plan.sizes.hidden + self.column
        argument_loads = [self._argument_load("norm", self.column, self.width)]
        self._add_partial_loads(_OUTPUT if self.gemm_index == _GATE_UP else _DOWN, 1)
        if self.gemm_index == _GATE_UP:
            argument_loads.append(self._argument_load("hidden", at, self.width))
        else:
            self.loads.append(self._exchange_load("stream", at // 2, self.width // 2, self.is_live))
        self.argument_words = ops.load(argument_loads)

    def _add_activation_loads(self):
        self._add_partial_loads(_GATE_UP, 2)
        self.num_partials = len(self.loads)
        if not self.shared_scales:
            chunks = self.plan.gemms[_GATE_UP].chunks
            loads = _square_sum_loads(self.plan, self.memory, "squares", chunks, self.row)
            self.loads += [load._replace(mask=load.mask & self.is_live) for load in loads]

    def finish(self, eps, words, rows):
        """Compute the row's activations from the loaded `words`; store them in shared memory.

        For the GEMMs after a norm, also store the new residual stream and its sums of squares for
        the other programs.
        """
        if self.gemm_index == _OUTPUT:
            packed = words[0]
        elif self.gemm_index == _DOWN:
            packed = self._finish_activations(eps, words)
        else:
            packed = self._finish_stream(words)
        gemm = self.plan.gemms[self.gemm_index]
        # The layout has tiles of 8 rows by 64 columns. The swizzle permutes the 16-byte vectors of
        # each row.
        column = ops.thread_index() % 32 * self.width
        swizzled_vector = ((column % 64) // 8) ^ self.row
        tile = self.index * (gemm.depth * ROWS * 2) + column // 64 * (64 * ROWS * 2)
        at = tile + self.row * 128 + swizzled_vector * 16 + column % 8 * 2
        ops.store("shared", ops.offset(rows, at, 1), packed)

    def _finish_activations(self, eps, words):
        partials, squares = words[: self.num_partials], words[self.num_partials :]
        if self.shared_scales:
            scale = ops.load_shared(ops.offset(self.pointers_by_name["scales"], self.row, 4))
        else:
            scale = _row_scale(self.plan, eps, squares)
        gate, up = (
            ops.round_to_bf16([total * scale for total in _sum_partials(partials[side::2])])
            for side in range(2)
        )
        return ops.pack_bf16([ops.silu(g) * u for g, u in zip(gate, up, strict=True)])

    def _finish_stream(self, words):
        norm = ops.unpack_bf16(self.argument_words[0])
        if self.gemm_index == _GATE_UP:
            partials, stream = words, self.argument_words[1]
        else:
            *partials, stream = words
        update = ops.round_to_bf16(_sum_partials(partials))
        packed = ops.pack_bf16(
            [a + b for a, b in zip(ops.unpack_bf16(stream), update, strict=True)]
        )
        stream = ops.unpack_bf16(packed)
        # Several programs compute the same chunk of the residual stream. Only the program whose
        # work unit belongs to column block 0 stores the chunk.
        with ops.when(self.block.eq(0)):
            self._publish(packed, stream)
        return ops.pack_bf16([a * b for a, b in zip(stream, norm, strict=True)])

    def _publish(self, packed, stream):
        at = self.row * self.plan.sizes.hidden + self.column
        if self.gemm_index == _GATE_UP:
            index, region = at // 2 + self.plan.regions["stream"], "squares"
            ops.store("global", ops.offset(self.memory, index, 4), packed)
        else:
            region = "last squares"
            ops.store("global", ops.offset(self.pointers_by_name["hidden_out"], at, 2), packed)
        squares = ops.warp_sum(ops.sum_values([x * x for x in stream]))
        with ops.when((ops.thread_index() % 32).eq(0)):
            index = self.chunk * ROWS + self.row + self.plan.regions[region]
            ops.store("global", ops.offset(self.memory, index, 4), [ops.canonicalize_nan(squares)])


def _sum_partials(partials):
    """Return the elementwise sum of the partials, added from first to last."""
    return [
        ops.sum_values(list(column))
        for column in zip(*map(ops.bitcast_to_float32, partials), strict=True)
    ]


def _flush(plan, gemm_index, acc, count, segment, sums, scales, target):
    """Store the partial that this program computed for a column block.

    The partial is the sum of `acc` over the warpgroups. Only its first `count` rows are stored.
    `target` is the output array for the qkv GEMM. For other GEMMs, `target` is the exchange memory:
    the array in GPU memory through which programs pass partials to each other.
    """
    gemm, sides = plan.gemms[gemm_index], 2 if gemm_index == _GATE_UP else 1

    def body(mine, count, segment, sums, scales, target):
        thread, program = ops.thread_index(), ops.program_index()
        warp_group, warp, lane = thread // 128, thread // 32 % 4, thread % 32
        column, row = warp * 16 + lane // 4, lane % 4 * 2
        positions = [(row + i % 2, column + 8 * (i // 2)) for i in range(4)]
        others = range(0, _NUM_WARP_GROUPS - sides, sides)
        with ops.when(warp_group >= sides):
            for (r, c), value in zip(positions, mine, strict=True):
                at = (warp_group - sides) * _PARTIAL_WORDS + r * 64 + c
                ops.store("shared", ops.offset(sums, at, 4), [value])
        _wait_for_consumers()
        for (r, c), value in zip(positions, mine, strict=True):
            with ops.when((warp_group < sides) & (r < count)):
                for other in others:
                    at = (warp_group + other) * _PARTIAL_WORDS + r * 64 + c
                    value = value + ops.load_shared(ops.offset(sums, at, 4))
                if gemm_index == _QKV:
                    block = (program * gemm.max_units) // gemm.chunks + segment
                    value = value * ops.load_shared(ops.offset(scales, r + ROWS, 4))
                    partial = program - gemm.first_program(block)
                    last = program.eq(gemm.last_program(block))
                    at = (partial * ROWS + r) * plan.sizes.qkv + block * 64 + c
                else:
                    number = program * gemm.max_segments + segment
                    at = (
                        number * (_PARTIAL_WORDS * sides) + warp_group * _PARTIAL_WORDS + r * 64 + c
                    )
                    at = at + plan.regions[gemm_index]
                ops.store("global", ops.offset(target, at, 4), [ops.canonicalize_nan(value)])
                # The output array has `max_partials` partials for each column block. Write zeros to
                # the partials of this column block that no program computes.
                if gemm_index == _QKV:
                    for extra in range(1, gemm.max_partials):
                        unused = (partial + extra < gemm.max_partials) & last
                        with ops.when(unused):
                            zero = ops.offset(target, at + extra * (ROWS * plan.sizes.qkv), 4)
                            ops.store("global", zero, [value * 0.0])
        if gemm.max_segments > 1:
            _wait_for_consumers()

    arg_types = (
        plgpu.Layout.WGMMA,
        ops.SCALAR_LAYOUT,
        ops.SCALAR_LAYOUT,
        _REF_TYPE,
        _REF_TYPE,
        _REF_TYPE,
    )
    ops.run_inline(body, acc, count, segment, sums, scales, target, arg_types=arg_types)
