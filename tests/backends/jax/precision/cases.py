"""Programs written once, for float32, for autocast and for casting by hand, and the check that compares the three.

Used by the tests of autocast's structure, transformations and programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import polyamp

Build = Callable[[Any], Callable[..., Any]]

_rng = np.random.default_rng(0)
W, X = (jnp.asarray(_rng.normal(size=(4, 4)) / 2, jnp.float32) for _ in range(2))
XS = jnp.asarray(_rng.normal(size=(5, 4, 4)) / 2, jnp.float32)
LOW, BOTH = {"dot_general": "compute"}, {"dot_general": "compute", "exp": "float32"}


class Table:
    """Programs by name: the instance, as a decorator, adds one with its arguments and the options of `check`."""

    def __init__(self) -> None:
        self.programs: dict[str, Callable[[str], None]] = {}

    def __call__(
        self, args: tuple[Any, ...], inside: dict[str, str] = BOTH, **options: Any
    ) -> Callable[[Build], Build]:
        def add(build: Build) -> Build:
            self.programs[build.__name__] = lambda dtype: check(build, args, inside, dtype, **options)
            return build

        return add

    def parameters(self, *, every: int = 6) -> list[tuple[str, str]]:
        """(name, dtype): every program in float16, and some in bfloat16."""
        names = [*self.programs]
        return [(name, DTYPES[0]) for name in names] + [(name, DTYPES[1]) for name in names[::every]]


def layer(ops: Any) -> Callable[..., Any]:
    """The simplest program with a product and a sensitive operation."""
    return lambda w, x: ops.exp(ops.dot(x, w))


class Plain:
    """Operations as a user writes them; `By` is the same with autocast's casts written out."""

    def dot(self, a: Any, b: Any) -> Any:
        return a @ b

    def exp(self, x: Any) -> Any:
        return jnp.exp(x)

    def sum(self, x: Any, axis: Any = None) -> Any:
        return jnp.sum(x, axis)

    def keep(self, x: Any) -> Any:
        """What a loop carries and what a custom_vjp returns has its declared dtype."""
        return x

    def cast(self, x: Any) -> Any:
        """A bias, or another operand that runs with a product."""
        return x


class By(Plain):
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def dot(self, a: Any, b: Any) -> Any:
        return a.astype(self.dtype) @ b.astype(self.dtype)

    def exp(self, x: Any) -> Any:
        return jnp.exp(self.keep(x))

    def sum(self, x: Any, axis: Any = None) -> Any:
        return jnp.sum(self.keep(x), axis)

    def keep(self, x: Any) -> Any:
        return x.astype("float32")

    def cast(self, x: Any) -> Any:
        return x.astype(self.dtype)


DTYPES = ("float16", "bfloat16")
TOLERANCES = {"float16": 4e-3, "bfloat16": 4e-2}
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def equations(function: Callable[..., Any], *args: Any) -> list[Any]:
    """All equations that a function traces, inner programs included."""
    return list(_walk(jax.make_jaxpr(function)(*args).jaxpr))


def _walk(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under jit, compiled fast, without XLA's licence to leave out a rounding to 16 bits."""
    options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    return jax.jit(function, compiler_options=options)


def floats(atoms: Any) -> set[str]:
    """The floating dtypes among the operands or results of an equation."""
    return {name for name in (str(getattr(v.aval, "dtype", "")) for v in atoms) if "float" in name}


def check(
    build: Build,
    args: tuple[Any, ...],
    inside: dict[str, str],
    dtype: str,
    *,
    grad: tuple[int, ...] = (0,),
    hand: float | None = 1e-6,
    tolerance: float = 1.0,
    lost: tuple[str, ...] = (),
    wide: int = 0,
    under: Callable[[polyamp.Policy, Callable[..., Any]], Callable[..., Any]] = polyamp.Policy.autocast,
) -> None:
    """Run a program under autocast and compare it with float32 and with casting by hand.

    Args:
        build: returns the program, written with the operations that it is given (`Plain`, `By`).
        args: its arguments.
        inside: name of an operation -> dtype of its floating operands; "compute" stands for `dtype`.
        dtype: the compute dtype.
        grad: the arguments to differentiate by.
        hand: relative distance allowed from casting by hand; None leaves that out.
        tolerance: factor on the distance allowed from float32.
        wide: number of products in float32 that JAX's own rules add, in solvers and in derivatives of linear algebra.
        lost: operations that need not be in the program under autocast.
        under: puts the program under a policy.
    """
    plain = build(Plain())
    run = under(polyamp.Policy(compute=dtype, output="float32"), plain)
    forward, original = equations(run, *args), equations(plain, *args)
    names = {e.primitive.name for e in forward}
    missing = {e.primitive.name for e in original} - {"convert_element_type", *lost} - names
    assert not missing, "an operation was lost"
    for name, expected in inside.items():
        found = [floats(e.invars[:2] if name in PRODUCTS else e.invars) for e in forward if e.primitive.name == name]
        assert any(found), f"no {name} among {sorted(names)}"
        if name in PRODUCTS:
            assert len(found) == sum(e.primitive.name == name for e in original), name
        else:
            assert all(f <= {dtype if expected == "compute" else expected} for f in found), (name, found)

    def both(function: Callable[..., Any]) -> Callable[..., Any]:
        def total(*given: Any) -> Any:
            leaves = [x for x in jax.tree.leaves(function(*given)) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.cos(jnp.arange(x.size)) * x.astype("float32").ravel()) for x in leaves)

        return lambda *given: (function(*given), jax.grad(total, grad)(*given) if grad else ())

    both_run = compiled(both(run))
    everything = list(_walk(both_run.trace(*args).jaxpr.jaxpr))  # jit keeps the trace for the call below
    for name in PRODUCTS:
        if inside.get(name) == "compute":
            found = [floats(e.invars[:2]) for e in everything if e.primitive.name == name]
            others = [f for f in found if f != {dtype}]
            assert others == [{"float32"}] * wide, (name, found)
            assert len(found) > wide, name
    got, want = both_run(*args), compiled(both(plain))(*args)
    close(got, want, tolerance * TOLERANCES[dtype])
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]
    close(run(*args), got[0], tolerance * TOLERANCES[dtype])
    if hand is not None:
        close(got, compiled(both(build(By(dtype))))(*args), hand)


def close(got: Any, want: Any, tolerance: float) -> None:
    """Assert two pytrees close, relative to the largest number in each leaf."""
    ours, theirs = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        a, b = (jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v for v in (one, other))
        a, b = (np.asarray(v, np.complex128 if jnp.iscomplexobj(v) else np.float64) for v in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-3, np.max(np.abs(b), initial=0)))
