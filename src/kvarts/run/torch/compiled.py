"""Extensions of Numba for compiled functions: memory by address, bfloat16 as bits, an exponential, and threads.

A function that a team of threads runs has one argument: the address of a block of integers that describes its work.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any
from zlib import crc32

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["WORDS", "call", "exponential", "float32s", "like", "load", "near", "real", "store", "take",
           "team_size", "thread_number", "uint16s", "wait", "words"]  # fmt: skip

WORDS = crc32(Path(__file__).read_bytes()) or 1
"""A checksum of this file. Compiled code is cached on disk, keyed by the checksums it depends on."""

LN_2_HIGH = 355 / 512
"""ln(2) to so few bits that its product with a small integer is exact."""

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _pointer_to(number: Any) -> Any:
    return types.CPointer(number)


def _pointer_at(pointer: Any) -> Any:
    """Return an intrinsic that casts an address to a pointer of one type."""

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    return at


words = _pointer_at(_pointer_to(types.int64))
float32s = _pointer_at(_pointer_to(types.float32))
uint16s = _pointer_at(_pointer_to(types.uint16))


@intrinsic
def like(typing_context: Any, pointer: Any, address: Any) -> Any:
    """Return an address cast to the type of `pointer`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(pointer))

    return pointer(pointer, types.int64), generate


# Numbers ---------------------------------------------------------------------------------------------------


def _narrow(builder: Any, value: Any) -> Any:
    """Return the 32 bits of a float rounded to bfloat16, half to even."""
    bits = builder.bitcast(value, I32)
    last = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = builder.add(bits, builder.add(last, ir.Constant(I32, 0x7FFF)))
    rounded = builder.and_(rounded, ir.Constant(I32, 0xFFFF0000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.select(is_nan, ir.Constant(I32, 0x7FC00000), rounded)


@intrinsic
def load(typing_context: Any, pointer: Any, place: Any) -> Any:
    """Return a number as float32: a float32 unchanged, a bfloat16 (stored as its bits) as the upper half."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.load(builder.gep(arguments[0], [arguments[1]], inbounds=True))
        if pointer.dtype == types.float32:
            return number
        word = builder.shl(builder.zext(number, I32), ir.Constant(I32, 16))
        return builder.bitcast(word, F32)

    return types.float32(pointer, place), generate


@intrinsic
def store(typing_context: Any, pointer: Any, place: Any, value: Any) -> Any:
    """Write a number, rounded to the memory's format."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[2]
        if pointer.dtype == types.uint16:
            value = builder.trunc(builder.lshr(_narrow(builder, value), ir.Constant(I32, 16)), ir.IntType(16))
        builder.store(value, builder.gep(arguments[0], [arguments[1]], inbounds=True))
        return context.get_dummy_value()

    return types.void(pointer, place, types.float32), generate


@intrinsic
def near(typing_context: Any, pointer: Any, value: Any) -> Any:
    """Return a number rounded to the format of `pointer`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if pointer.dtype == types.float32:
            return arguments[1]
        return builder.bitcast(_narrow(builder, arguments[1]), F32)

    return types.float32(pointer, types.float32), generate


@intrinsic
def real(typing_context: Any, number: Any) -> Any:
    """Return the float in the lower 32 bits of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def exponential(typing_context: Any, number: Any) -> Any:
    """Return e to the power of a number, with an error of one or two ulps; 0 below -87, infinity above 88.

    Written so that loops with it are vectorized: e^x is 2^n times e^r with |r| <= ln(2) / 2, the latter by a Taylor
    series.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def constant(value: float) -> Any:
            return ir.Constant(F32, value)

        def fused(a: Any, b: Any, c: Any) -> Any:
            function = builder.module.declare_intrinsic("llvm.fma", [F32], ir.FunctionType(F32, [F32] * 3))
            return builder.call(function, [a, b, c])

        (value,) = arguments
        is_small = builder.fcmp_ordered("<", value, constant(-87.0))
        is_large = builder.fcmp_ordered(">", value, constant(88.0))
        bounded = builder.select(is_small, constant(-87.0), value)
        bounded = builder.select(is_large, constant(88.0), bounded)
        to_whole = builder.module.declare_intrinsic("llvm.rint", [F32])
        whole = builder.call(to_whole, [builder.fmul(bounded, constant(1 / log(2)))])
        rest = fused(whole, constant(-LN_2_HIGH), bounded)
        rest = fused(whole, constant(LN_2_HIGH - log(2)), rest)
        series = constant(1 / 5040)
        for factorial in (720, 120, 24, 6, 2, 1, 1):
            series = fused(series, rest, constant(1 / factorial))
        is_nan = builder.fcmp_unordered("uno", value, value)
        exponent = builder.fptosi(builder.select(is_nan, constant(0.0), whole), I32)
        power = builder.shl(builder.add(exponent, ir.Constant(I32, 127)), ir.Constant(I32, 23))
        result = builder.fmul(series, builder.bitcast(power, F32))
        result = builder.select(is_small, constant(0.0), result)
        return builder.select(is_large, constant(float("inf")), result)

    return types.float32(types.float32), generate


# Threads ---------------------------------------------------------------------------------------------------


@intrinsic
def take(typing_context: Any, counters: Any, place: Any) -> Any:
    """Return a counter and increment it atomically: no two threads get the same number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(counters, place), generate


def _function(result: Any, *arguments: Any) -> Any:
    """Return an intrinsic that calls a function at an address."""
    kinds: dict[Any, Any] = {types.void: ir.VoidType(), types.int32: I32}

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            function = builder.inttoptr(values[0], ir.FunctionType(kinds[result], []).as_pointer())
            out = builder.call(function, [])
            return context.get_dummy_value() if result == types.void else out

        return result(types.int64), generate

    return at


wait = _function(types.void)
thread_number = team_size = _function(types.int32)


@intrinsic
def call(typing_context: Any, address: Any, work: Any) -> Any:
    """Call the function at an address, with an address as its argument."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.FunctionType(ir.VoidType(), [I64]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], pointer), [arguments[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
