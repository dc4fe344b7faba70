"""Rules for operations that hold other programs: loops, branches, nested jit, remat, custom derivatives, shards.

Each rule rebuilds the operation around the rewritten inner program. Loops keep the declared dtypes of what they carry;
nested jit, remat, branches and custom_jvp let dtypes flow in and out; custom_vjp keeps the declared dtypes at its
border, since its backward rule is the user's own code, written for them. Called by `walk`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp_jax import compat
from polyamp_jax.precision.interpreter import lookahead
from polyamp_jax.precision.interpreter.products import neutral
from polyamp_jax.precision.interpreter.staging import staged
from polyamp_jax.precision.interpreter.values import CASTABLE, FLOAT32, Traits, Value
from polyamp_jax.precision.interpreter.walk import Interpreter, Structure, value_of


def _jit(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    closed: compat.ClosedJaxpr = eqn.params["jaxpr"]
    traced, traits = _rewritten(run, closed, operands)
    params = {**eqn.params, "jaxpr": traced}
    if "donated_invars" in params and _dtypes(traced) != _dtypes(closed):
        # a donated buffer may fit no result any more, and JAX would warn of it
        params["donated_invars"] = (False,) * len(operands)
    return _values(compat.bind(eqn, [v.array() for v in operands], params), closed.jaxpr, traits)


def _call(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    program = eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "fwd_jaxpr"]  # the latter in remat_opt
    jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, compat.ClosedJaxpr) else (program, ())
    return run.run(jaxpr, consts, operands, run.wanted)


def _remat(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    jaxpr = eqn.params["jaxpr"]
    traced, traits = _rewritten(run, compat.ClosedJaxpr(jaxpr, ()), operands)
    out = compat.bind(eqn, [v.array() for v in operands], {**eqn.params, "jaxpr": compat.closed(traced)})
    return _values(out, jaxpr, traits)


def _scan(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    params, closed = eqn.params, eqn.params["jaxpr"]
    first, split = params["num_consts"], params["num_consts"] + params["num_carry"]
    carried = [v.aval for v in closed.jaxpr.invars[first:split]]
    how = compat.scan_options(eqn)
    wanted = lookahead.loop_wanted(closed.jaxpr, run.wanted, first, len(carried), run.settings.logarithms)
    read = [n for n in lookahead.read_inputs(closed.jaxpr) if n < first and operands[n].narrow]

    def loop(*arrays: Any, read: Sequence[int] = ()) -> list[Any]:
        given = [v.inside(array) for v, array in zip(operands, arrays, strict=True)]
        wide = {n: given[n].array(FLOAT32) for n in read}
        consts, carry, xs = given[:first], given[first:split], given[split:]

        def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], list[Any]]:
            values = [v.widened(wide[n]) if n in wide else v.inside(v.array()) for n, v in enumerate(consts)]
            values += [value_of(array, aval) for array, aval in zip(carry, carried, strict=True)]
            values += [v.part(item) for v, item in zip(xs, items, strict=True)]
            out = run.run(closed.jaxpr, closed.consts, values, wanted)
            return _declared(out[: len(carried)], carried), [v.array() for v in out[len(carried) :]]

        final, stacked = jax.lax.scan(body, _declared(carry, carried), [v.array() for v in xs], **how)
        return [*final, *stacked]

    build = _summing(loop, functools.partial(loop, read=read)) if read else loop
    return _loop(run, eqn, operands, [closed], tuple(how.items()), build)


def _summing(function: Callable[..., list[Any]], wide: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`function`, with the derivative of `wide`: the same loop, which holds in float32 the 16-bit arrays that it reads
    at computed places, so that their gradient is summed over the iterations in float32. Undifferentiated it holds no
    second copy of them."""
    made = jax.custom_jvp(function)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        moving = [n for n, tangent in enumerate(tangents) if not compat.is_zero(tangent)]

        def moved(*arrays: Any) -> list[Any]:
            given = dict(zip(moving, arrays, strict=True))
            return wide(*[given.get(n, primal) for n, primal in enumerate(primals)])

        out: tuple[Any, Any] = jax.jvp(moved, [primals[n] for n in moving], [tangents[n] for n in moving])
        return out

    made.defjvp(rule, symbolic_zeros=True)
    return made


def _while(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    params = eqn.params
    test, step = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    avals = [v.aval for v in step.jaxpr.invars[params["body_nconsts"] :]]
    body_nconsts, logarithms = params["body_nconsts"], run.settings.logarithms
    wanted = lookahead.loop_wanted(step.jaxpr, run.wanted, body_nconsts, len(avals), logarithms)

    def loop(*arrays: Any) -> list[Any]:
        given = [v.inside(array) for v, array in zip(operands, arrays, strict=True)]

        def inner(program: Any, consts: list[Value], carry: Iterable[Any], wanted: Any = ()) -> list[Value]:
            values = [v.inside(v.array()) for v in consts]
            values += [value_of(array, aval) for array, aval in zip(carry, avals, strict=True)]
            return run.run(program.jaxpr, program.consts, values, wanted)

        def go(carry: Iterable[Any]) -> Any:
            return inner(test, given[:first], carry)[0].array()

        def body(carry: Iterable[Any]) -> list[Any]:
            new = _declared(inner(step, given[first:second], carry, wanted), avals)
            on = go(carry) if batched else None
            return new if on is None else [_chosen(on, *pair) for pair in zip(new, carry, strict=True)]

        # under vmap every example has its own end: the loop goes on while any does, and those that ended stay
        batched = bool(test.out_avals[0].shape)
        out: Iterable[Any] = jax.lax.while_loop(lambda c: jnp.any(go(c)), body, _declared(given[second:], avals))
        return list(out)

    return _loop(run, eqn, operands, [step, test], (first, second), loop)


def _cond(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    branches = eqn.params["branches"]

    def select(index: Any, *arrays: Any) -> list[Any]:
        given = [v.inside(array) for v, array in zip(operands[1:], arrays, strict=True)]
        traced = [_rewritten(run, branch, given)[0] for branch in branches]
        joined = [functools.reduce(_join, dtypes) for dtypes in zip(*[_dtypes(t) for t in traced], strict=True)]

        def branch(program: compat.ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *args: [
                array if dtype not in CASTABLE else jax.lax.convert_element_type(array, dtype)
                for array, dtype in zip(compat.jaxpr_as_fun(program)(*args), joined, strict=True)
            ]

        return list(jax.lax.switch(index, [branch(program) for program in traced], *arrays))

    return _loop(run, eqn, operands, branches, (), select)


def _custom_jvp(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    closed, count = eqn.params["call_jaxpr"], eqn.params["num_consts"]
    traced, traits = _rewritten(run, closed, operands)
    dtypes = _dtypes(traced)
    shells = [v.inside(None) for v in operands[count:]]  # JAX keeps the rule, which must not keep this trace's arrays

    def rule(*args: Any) -> list[Any]:
        half = len(args) // 2
        primals, tangents = args[count:half], args[half + count :]
        with neutral():
            jaxpr, consts, zeros = compat.jvp_rule(eqn, [compat.is_zero(t) for t in tangents])
        nonzero = [t for t in tangents if not compat.is_zero(t)]
        values = [v.inside(array) for v, array in zip(shells, primals, strict=True)]
        values += [value_of(t, var.aval) for t, var in zip(nonzero, jaxpr.invars[len(values) :], strict=True)]
        out = run.run(jaxpr, consts, values, run.wanted)
        made = [_as(v, dtype) for v, dtype in zip(out, dtypes, strict=False)]
        rest = iter(out[len(zeros) :])
        return made + [
            compat.tangent_zero(array) if zero else _as(next(rest), array.dtype)
            for array, zero in zip(made, zeros, strict=True)
        ]

    arrays = [v.array() for v in operands]
    return _values(compat.bind_custom(eqn, arrays, (compat.jaxpr_as_fun(traced), rule)), closed.jaxpr, traits)


def _custom_vjp(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    closed = eqn.params["call_jaxpr"]
    avals = [v.aval for v in closed.jaxpr.outvars]

    def primal(*args: Any) -> list[Any]:
        values = [value_of(array, v.aval) for array, v in zip(args, closed.jaxpr.invars, strict=True)]
        return _declared(run.run(closed.jaxpr, closed.consts, values, run.wanted), avals)

    def forward(*args: Any) -> list[Any]:
        arrays, nonzeros = args[::2], args[1::2]
        with neutral():
            jaxpr, consts = compat.vjp_forward(eqn, arrays, nonzeros)
        inputs = arrays[eqn.params["num_consts"] :]
        values = [value_of(array, v.aval) for array, v in zip(inputs, jaxpr.invars, strict=True)]
        return _declared(run.run(jaxpr, consts, values), [v.aval for v in jaxpr.outvars])

    def backward(*args: Any) -> list[Any]:
        program = staged(compat.vjp_backward(eqn), args, {}, opaque=compat.is_zero)
        values = [value_of(array, v.aval) for array, v in zip(program.arrays, program.jaxpr.invars, strict=True)]
        out = run.run(program.jaxpr, program.consts, values)
        return list(program.result(_declared(out, [v.aval for v in program.jaxpr.outvars])))

    declared = _declared(operands, [v.aval for v in closed.jaxpr.invars])
    out = compat.bind_custom(eqn, declared, (primal, forward, backward))
    return [value_of(array, aval) for array, aval in zip(out, avals, strict=True)]


def _shard_map(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    jaxpr = eqn.params["jaxpr"]

    def inner(*shards: Any) -> tuple[Any, ...]:
        values = [v.part(shard) for v, shard in zip(operands, shards, strict=True)]
        return tuple(v.array() for v in run.run(jaxpr, (), values, run.wanted))

    out = compat.shard_map(inner, eqn)(*[v.array() for v in operands])
    return [value_of(array, var.aval) for array, var in zip(out, eqn.outvars, strict=True)]


def _pmap(run: Interpreter, eqn: compat.JaxprEqn, operands: list[Value]) -> list[Value]:
    jaxpr = eqn.params["call_jaxpr"]
    shards = [compat.shaped(v, o.array().dtype) for v, o in zip(jaxpr.invars, operands, strict=True)]

    def inner(*arrays: Any) -> list[Any]:
        values = [v.part(array) for v, array in zip(operands, arrays, strict=True)]
        return [v.array() for v in run.run(jaxpr, (), values, run.wanted)]

    traced = jax.make_jaxpr(inner, axis_env=compat.map_axes(eqn))(*shards)
    out = compat.bind(eqn, [v.array() for v in operands], {**eqn.params, "call_jaxpr": compat.closed(traced)})
    return [value_of(array, var.aval) for array, var in zip(out, eqn.outvars, strict=True)]


RULES: Final[Mapping[str, Structure]] = {
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
"""Primitive name, as `compat.name_of` gives it -> rule."""


def _rewritten(
    run: Interpreter, closed: compat.ClosedJaxpr, operands: list[Value]
) -> tuple[compat.ClosedJaxpr, list[Traits]]:
    """An inner program under autocast, for operands such as these, and the traits of its outputs.

    It is kept: a function that is called many times is rewritten once, and JAX finds again what it compiled for it.
    """
    arrays = [v.array() for v in operands]
    key = (run.key, tuple((compat.aval(a), v.key()) for a, v in zip(arrays, operands, strict=True)))
    kept = run.settings.cache.setdefault(closed.jaxpr, {})
    if run.recorder is None and key in kept:
        found: tuple[compat.ClosedJaxpr, list[Traits]] = kept[key]
        return found
    traits: list[Traits] = []

    def inner(*args: Any) -> list[Any]:
        values = [v.inside(a) for v, a in zip(operands, args, strict=True)]
        out = run.run(closed.jaxpr, closed.consts, values, run.wanted)
        traits.extend(v.traits._replace(leaf=False) for v in out)
        return [v.array() for v in out]

    made = jax.make_jaxpr(inner)(*arrays), traits
    if run.recorder is None:
        kept[key] = made
    return made


def _loop(
    run: Interpreter,
    eqn: compat.JaxprEqn,
    operands: list[Value],
    programs: Sequence[compat.ClosedJaxpr],
    how: tuple[Any, ...],
    build: Callable[..., list[Any]],
) -> list[Value]:
    """A loop or branch, rebuilt by `build` from the operands' arrays.

    It is kept with its inner programs, so that an eager call finds what JAX compiled for the last one.
    """
    arrays = [v.array() for v in operands]
    kinds = tuple((compat.aval(a), v.key()) for a, v in zip(arrays, operands, strict=True))
    key = (compat.name_of(eqn), run.key, how, tuple(program.jaxpr for program in programs[1:]), kinds)
    kept = run.settings.cache.setdefault(programs[0].jaxpr, {})
    made = kept.get(key) if run.recorder is None else None
    if made is None:
        made = jax.make_jaxpr(build)(*arrays)
        if run.recorder is None:
            kept[key] = made
    out = compat.jaxpr_as_fun(made)(*arrays)
    return [value_of(array, var.aval) for array, var in zip(out, eqn.outvars, strict=True)]


def _chosen(on: Any, new: Any, old: Any) -> Any:
    """`new` for the examples that go on; the axes of `on` are the first of the arrays'."""
    return jax.lax.select(jax.lax.broadcast_in_dim(on, new.shape, tuple(range(on.ndim))), new, old)


def _values(out: Sequence[Any], jaxpr: compat.Jaxpr, traits: Sequence[Traits]) -> list[Value]:
    return [value_of(a, v.aval, t) for a, v, t in zip(out, jaxpr.outvars, traits, strict=True)]


def _as(value: Value, dtype: Any) -> Any:
    return value.array(dtype if value.castable else None)


def _declared(values: Sequence[Value], avals: Sequence[Any]) -> list[Any]:
    """The arrays in the dtypes that the program declares."""
    return [_as(v, aval.dtype if v.castable else None) for v, aval in zip(values, avals, strict=True)]


def _dtypes(traced: compat.ClosedJaxpr) -> list[Any]:
    return [getattr(aval, "dtype", None) for aval in traced.out_avals]


def _join(one: Any, other: Any) -> Any:
    return jnp.promote_types(one, other) if one in CASTABLE and other in CASTABLE else one
