"""Version-dependent and private API of JAX, flax and equinox: jaxpr equations, module classes.

Everything else in the backend uses documented names only. A test enforces this. Supported: jax 0.7 to 0.12
(`make test-jax-oldest`, `make test-jax-newest`).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as extend_core
from jax.extend import linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import add_p
from jax.interpreters import ad, batching, mlir

from polyamp.context_values import temporary_value

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "SymbolicZero", "Var", "jaxpr_as_fun"]

_ALIASES: Final = {
    "checkpoint": "remat",
    "core_call": "call",
    "eval_jaxpr": "call",
    "mosaic_gpu_p": "mosaic_gpu",
    "pjit": "jit",
    "reduced_vary_cast_p": "reduced_vary_cast",
    "remat2": "remat",
    "vary_unreduced_cast_p": "vary_unreduced_cast",
    **{f"scatter-{kind}": f"scatter_{kind}" for kind in ("add", "max", "min", "mul", "sub")},
}


def loaded_module(module: str) -> Any:
    """Return a library's module if the user's program has imported it, else None. polyamp imports none itself."""
    return sys.modules.get(module)


def is_a(value: Any, module: str, name: str) -> bool:
    """Check `isinstance` against a class of a library that is not imported here."""
    kind: Any = getattr(loaded_module(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def coordination_client() -> Any:
    """Return the client, which has no public API, of the service that `jax.distributed.initialize` starts, or None."""
    return importlib.import_module("jax._src.distributed").global_state.client


def is_flax_trace_error(error: BaseException) -> bool:
    """Return whether an error is flax's report that an nnx object of another trace was changed."""
    return is_a(error, "flax.errors", "TraceContextError")


def nnx_classes() -> tuple[type, ...]:
    """Return the classes of nnx's objects: modules, streams, metrics, variables. Empty if flax is not loaded."""
    nnx = loaded_module("flax.nnx")  # `Pytree` from flax 0.11, `Object` before
    return tuple(getattr(nnx, name) for name in ("Pytree", "Object", "Variable") if hasattr(nnx, name))


def nnx_container_classes() -> tuple[type, ...]:
    """Return the `nnx_classes` that contain variables: modules, streams, metrics."""
    variable = getattr(loaded_module("flax.nnx"), "Variable", None)
    return tuple(kind for kind in nnx_classes() if kind is not variable)


def nnx_stream_classes() -> tuple[type, ...]:
    """Return the class of the variables of nnx's random streams. Empty if flax is not loaded."""
    stream = getattr(loaded_module("flax.nnx"), "RngState", None)
    return () if stream is None else (stream,)


def equinox_module_classes() -> tuple[type, ...]:
    """Return equinox's module class. Empty if equinox is not loaded."""
    module = loaded_module("equinox")
    return () if module is None else (module.Module,)


def walk_nnx_modules(model: Any) -> Any:
    """Yield (keys, module) for an nnx model and every module in it, each once."""
    nnx = loaded_module("flax.nnx")
    return nnx.iter_modules(model) if hasattr(nnx, "iter_modules") else model.iter_modules()  # until flax 0.11


def canonical_primitive_name(name: str) -> str:
    """Return a primitive's name, the same for every version of JAX."""
    return _ALIASES.get(name, name)


def primitive_name(eqn: JaxprEqn) -> str:
    """Return the canonical name of an equation's primitive."""
    return canonical_primitive_name(eqn.primitive.name)


def linear_algebra_name(eqn: JaxprEqn) -> str | None:
    """Return the name of the `jnp.linalg` or `jax.scipy.linalg` function that a nested jit is, or None if it is none.

    Functions that consist only of matrix products or sums are excluded. The rules of their operations apply.
    """
    if primitive_name(eqn) != "jit" or eqn.params["name"] in ("matrix_power", "norm"):
        return None
    file = function_file(eqn.params["jaxpr"].jaxpr).replace("\\", "/")
    own = file.endswith(("/jax/_src/numpy/linalg.py", "/jax/_src/scipy/linalg.py"))
    return eqn.params["name"].lstrip("_") if own else None


def function_file(jaxpr: Jaxpr) -> str:
    """Return the file of the function that a jaxpr was traced from; "" where JAX does not know it."""
    return getattr(jaxpr.debug_info, "func_filename", None) or ""


def known_primitives() -> frozenset[str]:
    """Return the names of all primitives with a derivative, batching or lowering rule, user-defined ones included."""
    tables = (ad.primitive_jvps, ad.primitive_transposes, batching.primitive_batchers, getattr(mlir, "_lowerings", {}))
    return frozenset(primitive.name for table in tables if isinstance(table, dict) for primitive in table)


def named_scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the names of the `jax.named_scope`s that the equation was traced in, outermost first."""
    return tuple(entry.name for entry in eqn.source_info.name_stack.stack if type(entry).__name__ == "Scope")


def transforms(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the names of the transformations that made the equation, such as "transpose" of a backward pass."""
    return tuple(entry.name for entry in eqn.source_info.name_stack.stack if type(entry).__name__ == "Transform")


def equation_frames(eqn: JaxprEqn) -> list[tuple[str, int]]:
    """Return file and line of the Python stack in which the equation was traced, innermost first."""
    return [(frame.file_name, frame.line_num) for frame in getattr(eqn.source_info.traceback, "frames", ())]


def inner_programs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs among an equation's parameters."""
    params = (param if isinstance(param, tuple | list) else (param,) for param in eqn.params.values())
    for item in itertools.chain.from_iterable(params):
        if isinstance(item, ClosedJaxpr | Jaxpr):
            yield item.jaxpr if isinstance(item, ClosedJaxpr) else item


def output_sources(program: ClosedJaxpr) -> list[tuple[int, ...]]:
    """Return, for each output of a program, the numbers of the inputs that it depends on."""
    jaxpr: Jaxpr = program.jaxpr
    made: dict[Any, frozenset[int]] = {var: frozenset({number}) for number, var in enumerate(jaxpr.invars)}

    def of(atom: Any) -> frozenset[int]:
        return frozenset() if isinstance(atom, Literal) else made.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        together = frozenset[int]().union(*map(of, eqn.invars))
        made.update(dict.fromkeys(eqn.outvars, together))
    return [tuple(sorted(of(atom))) for atom in jaxpr.outvars]


def map_inner_equations(
    params: dict[str, Any], change: Callable[[JaxprEqn], dict[str, Any]], key: Any
) -> dict[str, Any]:
    """Apply `change` to every equation of the jaxprs in an equation's parameters. Return the new parameters.

    A changed jaxpr is cached under `key`, so that JAX reuses the code compiled for it.
    """

    def one(item: Any) -> Any:
        replaceable: Any = item  # JAX does not annotate `replace`
        if isinstance(item, Jaxpr):  # from jax 0.11, `ClosedJaxpr` is the same class
            kept = _changed_programs.setdefault(item, {})
            if key not in kept:
                eqns: list[Any] = list(item.eqns)
                kept[key] = replaceable.replace(eqns=[eqn.replace(params=change(eqn)) for eqn in eqns])
            return kept[key]
        if isinstance(item, ClosedJaxpr):
            return replaceable.replace(jaxpr=one(item.jaxpr))
        return item

    def every(param: Any) -> Any:
        return type(param)(map(one, param)) if type(param) in (tuple, list) else one(param)

    return {name: every(param) for name, param in params.items()}


_changed_programs: weakref.WeakKeyDictionary[Jaxpr, dict[Any, Jaxpr]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def equation_context(eqn: JaxprEqn) -> Iterator[None]:
    """Restore the context that the equation was traced in, so that profiles and errors name the user's own lines."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def aval(value: Any) -> Any:
    """Return the abstract value of an array or tracer, with sharding and varying axes. It is hashable."""
    return jax.typeof(value)


def atom_shape(atom: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal."""
    return tuple(atom.aval.shape)


def atom_dtype(atom: Any) -> Any:
    """Return the dtype that the program declares for a variable or literal."""
    return atom.aval.dtype


def shape_with_dtype(atom: Any, dtype: Any) -> Any:
    """Return the shape of a variable with another dtype, as input for a trace."""
    struct: Any = jax.ShapeDtypeStruct
    return struct(atom.aval.shape, dtype)


def jaxpr_without_constants(traced: ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr of a closed jaxpr that has no constants."""
    if traced.consts:
        raise AssertionError("an inner jaxpr closed over arrays; please report this with the function that did it.")
    jaxpr: Jaxpr = traced.jaxpr
    return jaxpr


def bind_equation(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind an equation's primitive to new arguments and return the results as a list."""
    functions, params = _subfunctions(eqn, params)
    return _bind_functions(eqn, functions, args, params)


def bind_scatter(eqn: JaxprEqn, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Bind a scatter equation on arrays of another dtype with the `jax.lax` function of that scatter."""
    options = {name: eqn.params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return function(*args, eqn.params["dimension_numbers"], **options)


def bind_custom(eqn: JaxprEqn, args: Sequence[Any], functions: Sequence[Callable[..., Any]]) -> list[Any]:
    """Bind a custom_jvp_call or custom_vjp_call with replaced functions, on flat arrays.

    Args:
        eqn: the equation.
        args: all its arguments, constants first.
        functions: the primal function, and the rule (custom_jvp) or both rules (custom_vjp), as JAX calls them.
    """
    old, params = _subfunctions(eqn, eqn.params)
    wrapped = [
        linear_util.wrap_init(new, debug_info=function.debug_info) for new, function in zip(functions, old, strict=True)
    ]
    return _bind_functions(eqn, wrapped, args, params)


def jvp_rule(eqn: JaxprEqn, zeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Any], Sequence[bool]]:
    """Return a custom_jvp_call's rule as (jaxpr, its constants, which output tangents are zero).

    The jaxpr maps primals and the nonzero tangents to output primals and nonzero output tangents. It does not take
    the first `num_consts` arguments of the call.
    """
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return ClosedJaxpr(jaxpr, consts).jaxpr, consts, out_zeros


def vjp_forward(eqn: JaxprEqn, values: Sequence[Any], nonzeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Any]]:
    """Return a custom_vjp_call's forward rule as (jaxpr, its constants): primals to residuals and outputs.

    It does not take the first `num_consts` values. JAX's own error is raised if one of them is differentiated.
    """
    count = eqn.params["num_consts"]
    if any(nonzeros[:count]):
        functions, _ = _subfunctions(eqn, eqn.params)
        functions[1].call_wrapped(*(item for pair in zip(values, nonzeros, strict=True) for item in pair))
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*nonzeros[count:])
    return ClosedJaxpr(jaxpr, consts).jaxpr, consts  # from jax 0.11, constants belong to the program


def vjp_backward(eqn: JaxprEqn) -> Callable[..., Sequence[Any]]:
    """Return a custom_vjp_call's backward rule: residuals and cotangents to cotangents, with its constants' zeros."""
    functions, _ = _subfunctions(eqn, eqn.params)
    backward: Callable[..., Sequence[Any]] = functions[2].call_wrapped
    return backward


def tangent_zero(primal: Any) -> SymbolicZero:
    """Return the symbolic zero tangent of a primal value."""
    return SymbolicZero(aval(primal).to_tangent_aval())


def is_symbolic_zero(value: Any) -> bool:
    """Return whether a value is a symbolic zero, as custom rules receive and return them."""
    return isinstance(value, SymbolicZero) or type(value).__name__ == "Zero"


def shard_map(function: Callable[..., Any], eqn: JaxprEqn) -> Callable[..., Any]:
    """Wrap `function` in `shard_map` with the mesh, specs and checks of a shard_map equation."""
    params = eqn.params
    manual = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
    mapped: Callable[..., Any] = jax.shard_map(
        function,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(manual),
        check_vma=params["check_vma"],
    )
    return mapped


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many operands of a scan equation are constants of its body, and how many the body carries."""
    if "ft_in" in eqn.params:  # from jax 0.11: the operands as a tree (constants, carry, items)
        constants, carry, _ = map(len, eqn.params["ft_in"].unpack())
        return constants, carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the keyword arguments with which `jax.lax.scan` made a scan equation."""
    extra = {"_split_transpose": True} if eqn.params.get("_split_transpose") else {}
    return {name: eqn.params[name] for name in ("length", "reverse", "unroll")} | extra


def make_identity_primitive(name: str, tangent: Callable[..., Any], batched: Callable[..., Any]) -> Any:
    """Create a primitive that returns its one operand unchanged.

    Args:
        name: its name.
        tangent: its JVP rule, with JAX's signature.
        batched: its batching rule. An operand that is not mapped has the dimension None.
    """
    made: Any = extend_core.Primitive(name)
    made.def_impl(lambda value, **_: value)
    made.def_abstract_eval(lambda value, **_: value)
    ad.primitive_jvps[made] = tangent
    batching.primitive_batchers[made] = batched
    mlir.register_lowering(made, lambda _, value, **__: [value])
    return made


@contextlib.contextmanager
def separate_trace_cache(name: str, *, strictly: bool = True) -> Iterator[None]:
    """Separate JAX's trace caches inside a context from those outside. Contexts with the same name share caches.

    An older jax has no separate caches. There `strictly` clears all caches on entry and on exit.
    """
    with temporary_value(_cache_block_names, (*_cache_block_names.get(), name)):
        if _user_context is not None:
            with _user_context("/".join(_cache_block_names.get())):
                yield
        else:
            clear: Any = jax.clear_caches if strictly else lambda: None  # JAX does not annotate it
            clear()
            try:
                yield
            finally:
                clear()


def enable_float64() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which JAX supports float64."""
    here: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")  # an older jax
    block: contextlib.AbstractContextManager[Any] = here.enable_x64(True)
    return block


def mapped_axes() -> tuple[Any, ...]:
    """Return the names of the `shard_map` and `pmap` axes around the current trace, without those of `vmap`.

    Before jax 0.8, where pmap is not based on shard_map, named axes of vmap are included: JAX mixes them.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes and not getattr(jax.config, "jax_pmap_shmap_merge", jax.__version_info__ >= (0, 8)):
        axes = tuple(getattr(jax.core, "unsafe_get_axis_names_DO_NOT_USE", tuple)())
    return axes


def varying_axes(value: Any) -> frozenset[Any]:
    """Return the `shard_map` axes over which a value varies. Always empty with `check_vma=False`."""
    kind: Any = jax.typeof(value)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def vary_over_axes(value: Any, axes: Sequence[Any]) -> Any:
    """Mark a value as varying over more axes of a `shard_map` with `check_vma=True`."""
    lax: Any = jax.lax
    return lax.pcast(value, tuple(axes), to="varying") if hasattr(lax, "pcast") else lax.pvary(value, tuple(axes))


def trace_state() -> Any:
    """Return an identifier of the current trace. It is equal for two calls in one trace."""
    module: Any = extend_core if hasattr(extend_core, "get_opaque_trace_state") else jax.core
    return module.get_opaque_trace_state(convention="flax")


def is_mapped(value: Any) -> bool:
    """Return whether a value belongs to one example of a `jax.vmap` in the current trace."""
    return type(value).__name__ == "BatchTracer"


def map_axes(eqn: JaxprEqn) -> list[tuple[Any, int]]:
    """Return the axis environment inside an xla_pmap equation (jax 0.7; later versions map by shard_map)."""
    return [(eqn.params["axis_name"], eqn.params["global_axis_size"])]


def _subfunctions(eqn: JaxprEqn, params: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    primitive: Any = eqn.primitive
    made = primitive.get_bind_params(params)
    if isinstance(made, tuple):  # until jax 0.9
        functions, params = made
        return list(functions), params
    params = dict(made)
    return list(params.pop("subfuns", ())), params


def _bind_functions(eqn: JaxprEqn, functions: Sequence[Any], args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    primitive: Any = eqn.primitive
    if _SUBFUNS_IN_PARAMS:
        out = primitive.bind(*args, **({"subfuns": tuple(functions)} if functions else {}), **params)
    else:
        out = primitive.bind(*functions, *args, **params)
    return list(out) if primitive.multiple_results else [out]


_add_primitive: Final[Any] = add_p  # JAX does not annotate its primitives' methods
_SUBFUNS_IN_PARAMS: Final = not isinstance(_add_primitive.get_bind_params({}), tuple)
"""Whether functions are passed in the parameters (from jax 0.10) or before the arguments."""
_make_context: Final[Any] = getattr(jax, "make_user_context", None)
_user_context: Final[Any] = None if _make_context is None else _make_context("")
"""User context: part of the keys of all JAX caches, including compiled programs."""
_cache_block_names: ContextVar[tuple[str, ...]] = ContextVar("polyamp_blocks", default=())
