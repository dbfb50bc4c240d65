"""What the Mosaic GPU kernels for Hopper share: swizzled tiles, and what one thread does in bodies
of `inline_mgpu`: numbers with operators, loads, stores, polls and warp sums.

Pallas' arrays have a layout over a warpgroup; the exchange between the programs of the fused layer
needs single words, loads that another program's store ends, and warps that take turns at rows.
A `Value` is an int32, a float32 or a pointer of one thread. Masked words read as zeros.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)

# The word that is never stored: as float32 or as bfloat16 a NaN that arithmetic never makes.
EMPTY_WORD = -1
_WARP_SIZE = 32
_POLLS_PER_STOP_CHECK = 4096  # a power of two
_DYNAMIC_INDEX = -(1 << 31)  # "the index is an operand", in LLVM's address computation


# Tiles of 8 rows of 128 bytes, as tensor cores and the copy engine want them; here of 2-byte types.
SWIZZLE_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def swizzled_smem(shape, dtype):
    """Shared memory in swizzled tiles of 8 rows of 128 bytes."""
    tiles = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiles, SWIZZLE_TRANSFORMS[1]))


def load_with_layout(ref, layout, *, optimized=True):
    """What a reference has, in a layout; `optimized` refuses loads that take many instructions."""
    options: dict[str, Any] = {"layout": layout, "optimized": optimized}
    if jax.__version_info__ < (0, 11):  # whose `load` wants an index, which later ones warn of
        return plgpu.load(ref, (), **options)
    return plgpu.load(ref, **options)


def _make_operator(int_operation: Any, float_operation: Any = None):
    """A method of `Value`."""

    def apply(self, other):
        operation = float_operation if self.is_float else int_operation
        return Value(operation(self.ir, self.as_operand(other)))

    return apply


class Value:
    """A thread's number or pointer; the other operand may be a Python number."""

    def __init__(self, value: Any):
        self.ir = value

    @property
    def is_float(self):
        """Whether it is a float32, not an int32."""
        return isinstance(self.ir.type, ir.FloatType)

    def as_operand(self, other):
        """The other operand as MLIR has it, a Python number in this one's type."""
        if isinstance(other, Value):
            return other.ir
        return arith.constant(self.ir.type, float(other) if self.is_float else int(other))

    __add__ = _make_operator(arith.addi, arith.addf)
    __sub__ = _make_operator(arith.subi, arith.subf)
    __mul__ = _make_operator(arith.muli, arith.mulf)
    __floordiv__ = _make_operator(arith.divui)  # of numbers that are not negative, as the next
    __mod__ = _make_operator(arith.remui)
    __and__ = _make_operator(arith.andi)
    __or__ = _make_operator(arith.ori)
    __xor__ = _make_operator(arith.xori)
    __lt__ = _make_operator(functools.partial(arith.cmpi, arith.CmpIPredicate.slt))
    __le__ = _make_operator(functools.partial(arith.cmpi, arith.CmpIPredicate.sle))
    __ge__ = _make_operator(functools.partial(arith.cmpi, arith.CmpIPredicate.sge))
    eq = _make_operator(
        functools.partial(arith.cmpi, arith.CmpIPredicate.eq)
    )  # `==` answers at once
    ne = _make_operator(functools.partial(arith.cmpi, arith.CmpIPredicate.ne))
    maximum = _make_operator(None, arith.maxnumf)  # of two float32; of one, if the other is NaN


class WordLoad(NamedTuple):
    """Where to load from: a pointer, how many words of 4 bytes (1, 2 or 4), and whether at all."""

    pointer: Value
    count: int
    mask: Value


def int32() -> ir.Type:
    """The type; it exists only while a kernel is lowered."""
    return ir.IntegerType.get_signless(32)


def float32() -> ir.Type:
    """As `int32`."""
    return ir.F32Type.get()


def thread_index() -> Value:
    """In the program, from 0."""
    return Value(arith.index_cast(int32(), gpu.thread_id(gpu.Dimension.x)))


def program_index() -> Value:
    """In the grid's first axis."""
    return Value(arith.index_cast(int32(), gpu.block_id(gpu.Dimension.x)))


def scalar(array: Any) -> Value:
    """The number in a scalar argument of an `inline_mgpu` body."""
    value = array.registers.item()
    if isinstance(value.type, ir.VectorType):
        value = vector.extract(value, [], [0])
    return Value(value)


def thread_elements(array: Any) -> list[Value]:
    """A thread's elements of an array argument, in the order of its registers."""
    return [
        Value(vector.extract(register, [], [i]))
        for register in array.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def pointer(ref: Any) -> Value:
    """To the first element of a reference argument."""
    return Value(utils.memref_ptr(ref))


def offset(base: Value, elements: Value, size: int) -> Value:
    """`elements` of `size` bytes further."""
    steps = [(elements * size).ir]
    byte, flags = ir.IntegerType.get_signless(8), llvm.GEPNoWrapFlags.none
    return Value(llvm.getelementptr(base.ir.type, base.ir, steps, [_DYNAMIC_INDEX], byte, flags))


@contextlib.contextmanager
def when(condition: Value):
    """Emits the block for threads where the condition holds."""
    with utils.when(condition.ir):
        yield


@contextlib.contextmanager
def loop(start: Value, stop: Value, step: int):
    """Emits the block once, run for start, start + step ... below stop."""
    operation = scf.ForOp(start.ir, stop.ir, arith.constant(int32(), step), [])
    with ir.InsertionPoint(operation.body):
        yield Value(operation.induction_variable)
        scf.YieldOp([])


def _register_constraint(ir_type):
    if isinstance(ir_type, ir.FloatType):
        return "f"
    if isinstance(ir_type, ir.IntegerType):
        return "r"
    return "r" if ir_type == ir.Type.parse("!llvm.ptr<3>") else "l"  # shared memory is 32 bits wide


def ptx(text: str, *arguments: Value, out: list[ir.Type] | None = None, pure: bool = False):
    """PTX; `$0` ... are the outputs, then the arguments. Outputs share no register with those."""
    out, values = out or [], [argument.ir for argument in arguments]
    names = ["=&" + _register_constraint(ir_type) for ir_type in out] + [
        _register_constraint(v.type) for v in values
    ]
    result = ir.Type.parse("!llvm.void")
    if out:
        result = out[0] if len(out) == 1 else llvm.StructType.get_literal(out)
    options: dict[str, Any] = {"has_side_effects": not pure}
    if not pure and hasattr(llvm.InlineAsmOp, "convergent"):  # from jaxlib 0.11.2 on
        options["convergent"] = True
    value: Any = llvm.inline_asm(result, values, text, ",".join(names), **options)
    if len(out) < 2:
        return [Value(value)] * len(out)
    return [Value(llvm.extractvalue(ir_type, value, [i])) for i, ir_type in enumerate(out)]


def barrier(index: int, num_threads: int):
    """Waits for `num_threads` threads of the program to get to barrier `index`."""
    ptx(f"bar.sync {index}, {num_threads};")


def _vector_operand(first, count):
    names = ",".join(f"${first + i}" for i in range(count))
    return ("{" + names + "}", f".v{count}") if count > 1 else (names, "")


def _load_all(loads, instruction, tail="", extra_arguments=()):
    """One block of PTX that loads all words, so that none waits for another.

    `tail` is text behind the loads, in which "$more" is the number of the first of the arguments
    `extra_arguments`. If there are any, one word more comes out, which the tail sets.
    """
    total = sum(word_load.count for word_load in loads)
    num_out = total + bool(extra_arguments)
    lines, arguments, first = [], [], 0
    for word_load in loads:
        names, suffix = _vector_operand(first, word_load.count)
        zeros = " ".join(f"mov.b32 ${first + i}, 0;" for i in range(word_load.count))
        at = num_out + len(arguments)
        load = f"@p {instruction}{suffix}.b32 {names}, [${at}];"
        lines.append(f"{zeros} setp.ne.b32 p, ${at + 1}, 0; {load}")
        arguments += [word_load.pointer, Value(arith.extui(int32(), word_load.mask.ir))]
        first += word_load.count
    for i in range(len(extra_arguments)):
        tail = tail.replace(f"$more{i}", f"${num_out + len(arguments) + i}")
    head = "{ .reg .pred p, q; .reg .b32 n, s; mov.b32 n, 0;\nAGAIN${:uid}:\n"
    text = head + "\n".join(lines) + tail + " }"
    words = ptx(text, *arguments, *extra_arguments, out=[int32()] * num_out)
    starts = [sum(word_load.count for word_load in loads[:i]) for i in range(len(loads))]
    found = [words[start : start + p.count] for start, p in zip(starts, loads, strict=True)]
    return [*found, words[total:]] if extra_arguments else found


def _empty_test_ptx(count):
    """PTX that sets q: one of the first `count` words is `EMPTY_WORD`."""
    return "\nsetp.eq.b32 q, $0, -1;" + "".join(
        f" setp.eq.or.b32 q, ${i}, -1, q;" for i in range(1, count)
    )


def load(loads: list[WordLoad]) -> list[list[Value]]:
    """Words of memory that the kernel does not write."""
    return _load_all(loads, "ld.global")


def poll(loads: list[WordLoad]) -> list[list[Value]]:
    """Words that other programs store, read again until none of them is `EMPTY_WORD`.

    A word is its own signal: no fence and no counter is needed, for each is stored once.
    """
    tests = _empty_test_ptx(sum(word_load.count for word_load in loads))
    return _load_all(loads, "ld.relaxed.gpu.global", tests + "\n@q bra AGAIN${:uid};")


def poll_with_limit(
    max_polls: Value, stop_pointer: Value, loads: list[WordLoad]
) -> tuple[list[list[Value]], Value]:
    """Words that other devices store, and whether (1 or 0) one of them is `EMPTY_WORD` to the end.

    Args:
        limit: How often they are read again at most.
        stop: Pointer to a word; where that is not 0, which is looked at now and then, the end has
            come.
        loads: Where from.
    """
    total = sum(word_load.count for word_load in loads)
    tail = (
        f"{_empty_test_ptx(total)} selp.b32 ${total}, 1, 0, q;\n"
        "add.u32 n, n, 1; setp.lt.and.u32 q, n, $more0, q; @!q bra DONE${:uid};\n"
        f"and.b32 s, n, {_POLLS_PER_STOP_CHECK - 1}; setp.ne.b32 q, s, 0; @q bra AGAIN${{:uid}};\n"
        "ld.relaxed.gpu.global.b32 s, [$more1]; setp.eq.b32 q, s, 0; @q bra AGAIN${:uid};\n"
        "DONE${:uid}:\n"
    )
    *words, (is_empty,) = _load_all(loads, "ld.relaxed.sys.global", tail, (max_polls, stop_pointer))
    return words, is_empty


def store(space: str, address: Value, words: list[Value]):
    """Words of 4 bytes, side by side (1, 2 or 4 of them), to "global" or "shared" memory, or as
    another thread anywhere may read them meanwhile ("relaxed.sys.global")."""
    names, suffix = _vector_operand(1, len(words))
    ptx(f"st.{space}{suffix}.b32 [$0], {names};", address, *map(bitcast_to_int32, words))


def load_shared(address: Value) -> Value:
    """A float32 of shared memory."""
    return ptx("ld.shared.f32 $0, [$1];", address, out=[float32()])[0]


def bitcast_to_int32(value: Value) -> Value:
    """The same bits."""
    return Value(arith.bitcast(int32(), value.ir)) if value.is_float else value


def bitcast_to_float32(words: list[Value]) -> list[Value]:
    """The same bits."""
    return [Value(arith.bitcast(float32(), word.ir)) for word in words]


def unpack_bf16(words: list[Value]) -> list[Value]:
    """Two bfloat16 numbers a word, as float32."""
    low = [word * (1 << 16) for word in words]
    high = [word & -(1 << 16) for word in words]
    return bitcast_to_float32([half for pair in zip(low, high, strict=True) for half in pair])


def pack_bf16(floats: list[Value]) -> list[Value]:
    """The inverse of `unpack_bf16`, rounding to nearest; NaN gives 0x7fff."""
    pairs = zip(floats[::2], floats[1::2], strict=True)
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return [ptx(text, low, high, out=[int32()], pure=True)[0] for low, high in pairs]


def round_to_bf16(floats: list[Value]) -> list[Value]:
    """To bfloat16 and back."""
    return unpack_bf16(pack_bf16(floats))


def sum_values(values: list[Value]) -> Value:
    """The sum, from the first to the last."""
    return functools.reduce(Value.__add__, values)


def warp_sum(value: Value) -> Value:
    """Over the 32 threads of a warp, all of which get it."""
    distance = _WARP_SIZE // 2
    while distance:
        value, distance = value + Value(utils.shfl_bfly(value.ir, distance)), distance // 2
    return value


def rsqrt(value: Value) -> Value:
    """Approximate, to 2 units in the last one."""
    return ptx("rsqrt.approx.f32 $0, $1;", value, out=[float32()], pure=True)[0]


def silu(value: Value) -> Value:
    """value / (1 + exp(-value))."""
    power = ptx("ex2.approx.f32 $0, $1;", value * -1.4426950408889634, out=[float32()], pure=True)
    return value * ptx("rcp.rn.f32 $0, $1;", power[0] + 1.0, out=[float32()], pure=True)[0]


def select(condition: Value, first: Value, second: Value) -> Value:
    """The first where the condition holds, else the second."""
    return Value(arith.select(condition.ir, first.ir, second.ir))


def make_pointer(low: Value, high: Value) -> Value:
    """The pointer to global memory whose address has these halves."""
    wide = ir.IntegerType.get_signless(64)
    halves = [arith.extui(wide, half.ir) for half in (low, high)]
    shifted = arith.shli(halves[1], arith.constant(wide, 32))
    return Value(llvm.inttoptr(ir.Type.parse("!llvm.ptr"), arith.ori(halves[0], shifted)))


def canonicalize_nan(value: Value) -> Value:
    """The same number, never the bits of `EMPTY_WORD`: an addition gives the one usual NaN."""
    return ptx("add.f32 $0, $1, 0f00000000;", value, out=[float32()], pure=True)[0]
