"""Rules for operations with inner programs: loops, branches, nested jit, remat, custom derivatives, shards.

Each rule rebuilds the operation around the rewritten inner program.

- Loops keep the declared dtypes of their carry.
- Nested jit, remat, branches and custom_jvp accept and return any dtype.
- custom_vjp keeps the declared dtypes of its inputs and outputs: its backward rule is user code written for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp_jax import compat
from polyamp_jax.precision.interpreter import program_analysis
from polyamp_jax.precision.interpreter.interpreter import Interpreter, StructureRule, program_value
from polyamp_jax.precision.interpreter.matrix_products import neutral_precision
from polyamp_jax.precision.interpreter.program_value import CASTABLE_DTYPES, FLOAT32, ProgramValue, ValueTraits
from polyamp_jax.precision.interpreter.tracing import trace_function


def _jit(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    closed: compat.ClosedJaxpr = eqn.params["jaxpr"]
    traced, traits = _rewrite_program(run, closed, operands)
    params = {**eqn.params, "jaxpr": traced}
    if "donated_invars" in params and _output_dtypes(traced) != _output_dtypes(closed):
        # a donated buffer may no longer match any result, and JAX would warn
        params["donated_invars"] = (False,) * len(operands)
    return _output_values(compat.bind_equation(eqn, [v.array() for v in operands], params), closed.jaxpr, traits)


def _call(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    program = eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "fwd_jaxpr"]  # the latter in remat_opt
    jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, compat.ClosedJaxpr) else (program, ())
    return run.run(jaxpr, consts, operands, run.output_needs)


def _remat(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    jaxpr = eqn.params["jaxpr"]
    traced, traits = _rewrite_program(run, compat.ClosedJaxpr(jaxpr, ()), operands)
    out = compat.bind_equation(
        eqn, [v.array() for v in operands], {**eqn.params, "jaxpr": compat.jaxpr_without_constants(traced)}
    )
    return _output_values(out, jaxpr, traits)


def _scan(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    closed = eqn.params["jaxpr"]
    first, carry_count = compat.scan_counts(eqn)
    split = first + carry_count
    carried = [v.aval for v in closed.jaxpr.invars[first:split]]
    how = compat.scan_options(eqn)
    logarithms = run.settings.logarithms
    output_needs = program_analysis.loop_output_needs(closed.jaxpr, run.output_needs, first, len(carried), logarithms)
    read = [n for n in program_analysis.indexed_inputs(closed.jaxpr) if n < first and operands[n].narrow]

    def loop(*arrays: Any, read: Sequence[int] = ()) -> list[Any]:
        given = [v.with_array(array) for v, array in zip(operands, arrays, strict=True)]
        wide = {n: given[n].array(FLOAT32) for n in read}
        consts, carry, xs = given[:first], given[first:split], given[split:]

        def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
            values = [
                v.with_float32_array(wide[n]) if n in wide else v.with_array(v.array()) for n, v in enumerate(consts)
            ]
            values += [program_value(array, aval) for array, aval in zip(carry, carried, strict=True)]
            values += [v.part(item) for v, item in zip(xs, items, strict=True)]
            out = run.run(closed.jaxpr, closed.consts, values, output_needs)
            return _cast_to_declared(out[: len(carried)], carried), [v.array() for v in out[len(carried) :]]

        final, stacked = jax.lax.scan(body, _cast_to_declared(carry, carried), [v.array() for v in xs], **how)
        return [*final, *stacked]

    build = _sum_in_float32(loop, functools.partial(loop, read=read)) if read else loop
    return _rebuild_loop(run, eqn, operands, [closed], tuple(how.items()), build)


def _sum_in_float32(function: Callable[..., list[Any]], wide: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `function` with the derivative of `wide`, which sums gradients over the iterations in float32.

    `wide` is the same loop with float32 copies of the 16-bit arrays that it reads at computed indices. Without
    differentiation no such copies are made.
    """
    made = jax.custom_jvp(function)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = [n for n, tangent in enumerate(tangents) if not compat.is_symbolic_zero(tangent)]

        def moved(*arrays: Any) -> list[Any]:
            given = dict(zip(moving, arrays, strict=True))
            return wide(*[given.get(n, primal) for n, primal in enumerate(primals)])

        out: tuple[Any, Any] = jax.jvp(moved, [primals[n] for n in moving], [tangents[n] for n in moving])
        return out

    made.defjvp(rule, symbolic_zeros=True)
    return made


def _while(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    params = eqn.params
    test, step = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    avals = [v.aval for v in step.jaxpr.invars[params["body_nconsts"] :]]
    body_nconsts, logarithms = params["body_nconsts"], run.settings.logarithms
    output_needs = program_analysis.loop_output_needs(
        step.jaxpr, run.output_needs, body_nconsts, len(avals), logarithms
    )

    def loop(*arrays: Any) -> list[Any]:
        given = [v.with_array(array) for v, array in zip(operands, arrays, strict=True)]

        def inner(
            program: Any, consts: list[ProgramValue], carry: Iterable[Any], output_needs: Any = ()
        ) -> list[ProgramValue]:
            values = [v.with_array(v.array()) for v in consts]
            values += [program_value(array, aval) for array, aval in zip(carry, avals, strict=True)]
            return run.run(program.jaxpr, program.consts, values, output_needs)

        def go(carry: Iterable[Any]) -> Any:
            return inner(test, given[:first], carry)[0].array()

        def body(carry: Iterable[Any]) -> list[Any]:
            new = _cast_to_declared(inner(step, given[first:second], carry, output_needs), avals)
            on = go(carry) if batched else None
            return new if on is None else [_select_examples(on, *pair) for pair in zip(new, carry, strict=True)]

        # under vmap the loop runs until every example has ended, and examples that have ended keep their values
        batched = bool(test.out_avals[0].shape)
        out: Iterable[Any] = jax.lax.while_loop(
            lambda c: jnp.any(go(c)), body, _cast_to_declared(given[second:], avals)
        )
        return list(out)

    return _rebuild_loop(run, eqn, operands, [step, test], (first, second), loop)


def _cond(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    branches = eqn.params["branches"]

    def select(index: Any, *arrays: Any) -> list[Any]:
        given = [v.with_array(array) for v, array in zip(operands[1:], arrays, strict=True)]
        traced = [_rewrite_program(run, branch, given)[0] for branch in branches]
        joined = [
            functools.reduce(_join_traits, dtypes) for dtypes in zip(*[_output_dtypes(t) for t in traced], strict=True)
        ]

        def branch(program: compat.ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *args: [
                array if dtype not in CASTABLE_DTYPES else jax.lax.convert_element_type(array, dtype)
                for array, dtype in zip(compat.jaxpr_as_fun(program)(*args), joined, strict=True)
            ]

        return list(jax.lax.switch(index, [branch(program) for program in traced], *arrays))

    return _rebuild_loop(run, eqn, operands, branches, (), select)


def _custom_jvp(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    closed, count = eqn.params["call_jaxpr"], eqn.params["num_consts"]
    traced, traits = _rewrite_program(run, closed, operands)
    dtypes = _output_dtypes(traced)
    shells = [v.with_array(None) for v in operands[count:]]  # JAX caches `rule`: it must not keep this trace's arrays

    def rule(*args: Any) -> list[Any]:
        half = len(args) // 2
        primals, tangents = args[count:half], args[half + count :]
        with neutral_precision():
            jaxpr, consts, zeros = compat.jvp_rule(eqn, [compat.is_symbolic_zero(t) for t in tangents])
        nonzero = [t for t in tangents if not compat.is_symbolic_zero(t)]
        values = [v.with_array(array) for v, array in zip(shells, primals, strict=True)]
        values += [program_value(t, var.aval) for t, var in zip(nonzero, jaxpr.invars[len(values) :], strict=True)]
        out = run.run(jaxpr, consts, values, run.output_needs)
        made = [_array_in_dtype(v, dtype) for v, dtype in zip(out, dtypes, strict=False)]
        rest = iter(out[len(zeros) :])
        return made + [
            compat.tangent_zero(array) if zero else _array_in_dtype(next(rest), array.dtype)
            for array, zero in zip(made, zeros, strict=True)
        ]

    arrays = [v.array() for v in operands]
    return _output_values(compat.bind_custom(eqn, arrays, (compat.jaxpr_as_fun(traced), rule)), closed.jaxpr, traits)


def _custom_vjp(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    closed = eqn.params["call_jaxpr"]
    avals = [v.aval for v in closed.jaxpr.outvars]

    def primal(*args: Any) -> list[Any]:
        values = [program_value(array, v.aval) for array, v in zip(args, closed.jaxpr.invars, strict=True)]
        return _cast_to_declared(run.run(closed.jaxpr, closed.consts, values, run.output_needs), avals)

    def forward(*args: Any) -> list[Any]:
        arrays, nonzeros = args[::2], args[1::2]
        with neutral_precision():
            jaxpr, consts = compat.vjp_forward(eqn, arrays, nonzeros)
        inputs = arrays[eqn.params["num_consts"] :]
        values = [program_value(array, v.aval) for array, v in zip(inputs, jaxpr.invars, strict=True)]
        return _cast_to_declared(run.run(jaxpr, consts, values), [v.aval for v in jaxpr.outvars])

    def backward(*args: Any) -> list[Any]:
        program = trace_function(compat.vjp_backward(eqn), args, {}, opaque=compat.is_symbolic_zero)
        values = [program_value(array, v.aval) for array, v in zip(program.arrays, program.jaxpr.invars, strict=True)]
        out = run.run(program.jaxpr, program.consts, values)
        return list(program.result(_cast_to_declared(out, [v.aval for v in program.jaxpr.outvars])))

    declared = _cast_to_declared(operands, [v.aval for v in closed.jaxpr.invars])
    out = compat.bind_custom(eqn, declared, (primal, forward, backward))
    return [program_value(array, aval) for array, aval in zip(out, avals, strict=True)]


def _shard_map(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    jaxpr = eqn.params["jaxpr"]

    def inner(*shards: Any) -> tuple[Any, ...]:
        values = [v.part(shard) for v, shard in zip(operands, shards, strict=True)]
        return tuple(v.array() for v in run.run(jaxpr, (), values, run.output_needs))

    out = compat.shard_map(inner, eqn)(*[v.array() for v in operands])
    return [program_value(array, var.aval) for array, var in zip(out, eqn.outvars, strict=True)]


def _pmap(run: Interpreter, eqn: compat.JaxprEqn, operands: list[ProgramValue]) -> list[ProgramValue]:
    jaxpr = eqn.params["call_jaxpr"]
    shards = [compat.shape_with_dtype(v, o.array().dtype) for v, o in zip(jaxpr.invars, operands, strict=True)]

    def inner(*arrays: Any) -> list[Any]:
        values = [v.part(array) for v, array in zip(operands, arrays, strict=True)]
        return [v.array() for v in run.run(jaxpr, (), values, run.output_needs)]

    traced = jax.make_jaxpr(inner, axis_env=compat.map_axes(eqn))(*shards)
    out = compat.bind_equation(
        eqn, [v.array() for v in operands], {**eqn.params, "call_jaxpr": compat.jaxpr_without_constants(traced)}
    )
    return [program_value(array, var.aval) for array, var in zip(out, eqn.outvars, strict=True)]


STRUCTURE_RULES: Final[Mapping[str, StructureRule]] = {
    "call": _call,
    "closed_call": _call,
    "compute_on": _jit,
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "jit": _jit,
    "remat": _remat,
    "remat_opt": _call,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
    "xla_pmap": _pmap,
}
"""Primitive name, as returned by `compat.primitive_name` -> rule."""


def _rewrite_program(
    run: Interpreter, closed: compat.ClosedJaxpr, operands: list[ProgramValue]
) -> tuple[compat.ClosedJaxpr, list[ValueTraits]]:
    """Rewrite an inner program for autocast with such operands. Return it and the traits of its outputs.

    The result is cached: a function that is called many times is rewritten once, and JAX reuses its compiled code.
    """
    arrays = [v.array() for v in operands]
    key = (run.key, tuple((compat.aval(a), v.key()) for a, v in zip(arrays, operands, strict=True)))
    kept = run.settings.cache.setdefault(closed.jaxpr, {})
    if run.recorder is None and key in kept:
        found: tuple[compat.ClosedJaxpr, list[ValueTraits]] = kept[key]
        return found
    traits: list[ValueTraits] = []

    def inner(*args: Any) -> list[Any]:
        values = [v.with_array(a) for v, a in zip(operands, args, strict=True)]
        out = run.run(closed.jaxpr, closed.consts, values, run.output_needs)
        traits.extend(v.traits._replace(leaf=False) for v in out)
        return [v.array() for v in out]

    made = jax.make_jaxpr(inner)(*arrays), traits
    if run.recorder is None:
        kept[key] = made
    return made


def _rebuild_loop(
    run: Interpreter,
    eqn: compat.JaxprEqn,
    operands: list[ProgramValue],
    programs: Sequence[compat.ClosedJaxpr],
    how: tuple[Any, ...],
    build: Callable[..., list[Any]],
) -> list[ProgramValue]:
    """Rebuild a loop or branch with `build` from the operands' arrays.

    The result is cached with its inner programs, so that an eager call reuses the compiled code of the previous one.
    """
    arrays = [v.array() for v in operands]
    kinds = tuple((compat.aval(a), v.key()) for a, v in zip(arrays, operands, strict=True))
    key = (compat.primitive_name(eqn), run.key, how, tuple(program.jaxpr for program in programs[1:]), kinds)
    kept = run.settings.cache.setdefault(programs[0].jaxpr, {})
    made = kept.get(key) if run.recorder is None else None
    if made is None:
        made = jax.make_jaxpr(build)(*arrays)
        if run.recorder is None:
            kept[key] = made
    out = compat.jaxpr_as_fun(made)(*arrays)
    return [program_value(array, var.aval) for array, var in zip(out, eqn.outvars, strict=True)]


def _select_examples(on: Any, new: Any, old: Any) -> Any:
    """Return `new` for the examples that continue, else `old`. The axes of `on` are the leading axes of the arrays."""
    return jax.lax.select(jax.lax.broadcast_in_dim(on, new.shape, tuple(range(on.ndim))), new, old)


def _output_values(out: Sequence[Any], jaxpr: compat.Jaxpr, traits: Sequence[ValueTraits]) -> list[ProgramValue]:
    return [program_value(a, v.aval, t) for a, v, t in zip(out, jaxpr.outvars, traits, strict=True)]


def _array_in_dtype(value: ProgramValue, dtype: Any) -> Any:
    return value.array(dtype if value.castable else None)


def _cast_to_declared(values: Sequence[ProgramValue], avals: Sequence[Any]) -> list[Any]:
    """Cast values to the dtypes that the program declares. Return their arrays."""
    return [_array_in_dtype(v, aval.dtype if v.castable else None) for v, aval in zip(values, avals, strict=True)]


def _output_dtypes(traced: compat.ClosedJaxpr) -> list[Any]:
    return [getattr(aval, "dtype", None) for aval in traced.out_avals]


def _join_traits(one: Any, other: Any) -> Any:
    return jnp.promote_types(one, other) if one in CASTABLE_DTYPES and other in CASTABLE_DTYPES else one
