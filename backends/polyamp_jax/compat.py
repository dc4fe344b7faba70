"""All that depends on the version of JAX or of a library over it: equations read and bound, and names that are private
or that differ (flax's modules, what optax's functions close over).

Everything else in the backend uses documented names only, which a test holds it to. Supported: jax 0.7 to 0.10
(`make test-jax-oldest`, `make test-jax-newest`).
"""

from __future__ import annotations

import contextlib
import importlib
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

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "SymbolicZero", "Var", "jaxpr_as_fun"]

_ALIASES: Final = {
    "checkpoint": "remat",
    "core_call": "call",
    "mosaic_gpu_p": "mosaic_gpu",
    "pjit": "jit",
    "reduced_vary_cast_p": "reduced_vary_cast",
    "remat2": "remat",
    "vary_unreduced_cast_p": "vary_unreduced_cast",
    **{f"scatter-{kind}": f"scatter_{kind}" for kind in ("add", "max", "min", "mul", "sub")},
}


def loaded(module: str) -> Any:
    """A module of a library that the user's program may have imported, or None: polyamp imports none by itself."""
    return sys.modules.get(module)


def is_a(value: Any, module: str, name: str) -> bool:
    """`isinstance` against a class of a library that is not imported here."""
    kind: Any = getattr(loaded(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def coordination_client() -> Any:
    """The client of the service that `jax.distributed.initialize` starts, which keeps small values for all processes;
    None without it. There is no public way to ask for it."""
    return importlib.import_module("jax._src.distributed").global_state.client


def flax_refused_a_change(error: BaseException) -> bool:
    """Whether flax says that an nnx object of another trace was changed."""
    return is_a(error, "flax.errors", "TraceContextError")


def is_layer_stack(module: str) -> bool:
    """Whether a name is what `hk.experimental.layer_stack` gives to its module by itself."""
    return module.startswith("__layer_stack")


def haiku_dropout() -> list[tuple[Any, str]]:
    """(module, name) of the function behind `hk.dropout`, which haiku keeps apart so that it can be replaced."""
    module = loaded("haiku._src.basic")
    return [(module, name) for name in ("dropout_impl",) if hasattr(module, name)]


def nnx_kinds() -> tuple[type, ...]:
    """The classes of nnx's objects: modules, streams, metrics, variables. Empty where flax is not loaded."""
    nnx = loaded("flax.nnx")  # `Pytree` from flax 0.11, `Object` before
    return tuple(getattr(nnx, name) for name in ("Pytree", "Object", "Variable") if hasattr(nnx, name))


def nnx_objects() -> tuple[type, ...]:
    """Those of `nnx_kinds` that hold variables: modules, streams, metrics."""
    variable = getattr(loaded("flax.nnx"), "Variable", None)
    return tuple(kind for kind in nnx_kinds() if kind is not variable)


def equinox_modules() -> tuple[type, ...]:
    """equinox's class of modules; empty where equinox is not loaded."""
    module = loaded("equinox")
    return () if module is None else (module.Module,)


def nnx_modules(model: Any) -> Any:
    """(keys, module) of an nnx model and of every module in it, each once."""
    nnx = loaded("flax.nnx")
    if hasattr(nnx, "iter_modules"):
        return nnx.iter_modules(model)
    return model.iter_modules()  # until flax 0.11, and deprecated later


def nnx_attributes(node: Any) -> dict[str, Any]:
    """The attributes of an nnx object in the order in which they were set, less flax's own bookkeeping."""
    own = ("_pytree__", "_object__", "_length")  # `_object__` until flax 0.11, `_length` of an nnx.List
    return {name: value for name, value in vars(node).items() if not name.startswith(own)}


ORBAX_TREE: Final = "_METADATA"
"""The file that lies in each folder in which orbax keeps a tree of arrays."""


def optax_setting(path: str) -> str | None:
    """A path through what an optax transformation closes over, less what its wrappers add; None for what makes the
    state and says nothing more than what makes the update."""
    if ".tx[0]" in path or "chain.init_fns[" in path:
        return None
    return path.replace("with_extra_args_support.tx[1].", "").replace("chain.update_fns[", "chain[")


def optax_hyperparameter(name: str) -> str:
    """How the path ends, under which `optax.inject_hyperparams` keeps a hyperparameter as it was given."""
    return f"inject_hyperparams.numeric_hps.{name}"


def canonical(name: str) -> str:
    """A primitive's name, the same in every version where it was renamed."""
    return _ALIASES.get(name, name)


def name_of(eqn: JaxprEqn) -> str:
    """The canonical name of an equation's primitive."""
    return canonical(eqn.primitive.name)


def linear_algebra(eqn: JaxprEqn) -> str | None:
    """Name of the function of `jnp.linalg` or `jax.scipy.linalg` that a nested jit is, or None for any other program.

    Those that are nothing but matrix products or sums do not count: the rules of their operations do.
    """
    if name_of(eqn) != "jit" or eqn.params["name"] in ("matrix_power", "norm"):
        return None
    file = str(getattr(eqn.params["jaxpr"].jaxpr.debug_info, "func_filename", None)).replace("\\", "/")
    own = file.endswith(("/jax/_src/numpy/linalg.py", "/jax/_src/scipy/linalg.py"))
    return eqn.params["name"].lstrip("_") if own else None


def operations() -> frozenset[str]:
    """Names of the primitives that JAX knows a derivative, a batching rule or a lowering of, those of users too."""
    tables = (ad.primitive_jvps, ad.primitive_transposes, batching.primitive_batchers, getattr(mlir, "_lowerings", {}))
    return frozenset(primitive.name for table in tables if isinstance(table, dict) for primitive in table)


def scopes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of the `jax.named_scope`s that the equation was traced in, outermost first."""
    return tuple(entry.name for entry in eqn.source_info.name_stack.stack if type(entry).__name__ == "Scope")


def programs_of(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item.jaxpr if isinstance(item, ClosedJaxpr) else item


def sources(program: ClosedJaxpr) -> list[tuple[int, ...]]:
    """Numbers of the inputs that each output of a program is made of."""
    jaxpr: Jaxpr = program.jaxpr
    made: dict[Any, frozenset[int]] = {var: frozenset({number}) for number, var in enumerate(jaxpr.invars)}

    def of(atom: Any) -> frozenset[int]:
        return frozenset() if isinstance(atom, Literal) else made.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        together = frozenset[int]().union(*map(of, eqn.invars))
        made.update(dict.fromkeys(eqn.outvars, together))
    return [tuple(sorted(of(atom))) for atom in jaxpr.outvars]


def with_programs(params: dict[str, Any], change: Callable[[JaxprEqn], dict[str, Any]], key: Any) -> dict[str, Any]:
    """An equation's parameters, each equation of the jaxprs among them with the parameters that `change` gives it.

    A changed jaxpr is kept under `key`, so that JAX finds again what it compiled for it.
    """

    def one(item: Any) -> Any:
        replaceable: Any = item  # JAX does not annotate `replace`
        if isinstance(item, ClosedJaxpr):
            return replaceable.replace(jaxpr=one(item.jaxpr))
        if isinstance(item, Jaxpr):
            kept = _changed.setdefault(item, {})
            if key not in kept:
                eqns: list[Any] = list(item.eqns)
                kept[key] = replaceable.replace(eqns=[eqn.replace(params=change(eqn)) for eqn in eqns])
            return kept[key]
        return item

    def every(param: Any) -> Any:
        return type(param)(map(one, param)) if type(param) in (tuple, list) else one(param)

    return {name: every(param) for name, param in params.items()}


_changed: weakref.WeakKeyDictionary[Jaxpr, dict[Any, Jaxpr]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def context_of(eqn: JaxprEqn) -> Iterator[None]:
    """The context that the equation was traced in, so that profiles and errors name the user's own lines."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def aval(value: Any) -> Any:
    """The abstract value of an array or tracer, sharding and varying axes included; hashable."""
    return jax.typeof(value)


def shape(atom: Any) -> tuple[int, ...]:
    """Shape of a variable or literal."""
    return tuple(atom.aval.shape)


def dtype(atom: Any) -> Any:
    """Dtype that the program declares for a variable or literal."""
    return atom.aval.dtype


def shaped(atom: Any, dtype: Any) -> Any:
    """The shape of a variable with a dtype, to trace a function with."""
    struct: Any = jax.ShapeDtypeStruct
    return struct(atom.aval.shape, dtype)


def closed(traced: ClosedJaxpr) -> Jaxpr:
    """The jaxpr of a closed one that has no constants."""
    if traced.consts:
        raise AssertionError("an inner jaxpr closed over arrays; please report this with the function that did it.")
    jaxpr: Jaxpr = traced.jaxpr
    return jaxpr


def bind(eqn: JaxprEqn, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Bind an equation's primitive to new arguments; the results as a list."""
    functions, params = _functions(eqn, params)
    return _bound(eqn, functions, args, params)


def scatter(eqn: JaxprEqn, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """A scatter equation on arrays of another dtype, by the function of `jax.lax` that makes such equations."""
    options = {name: eqn.params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return function(*args, eqn.params["dimension_numbers"], **options)


def bind_custom(eqn: JaxprEqn, args: Sequence[Any], functions: Sequence[Callable[..., Any]]) -> list[Any]:
    """Bind a custom_jvp_call or custom_vjp_call with other functions in place of its own, on flat arrays.

    Args:
        eqn: the equation.
        args: all its arguments, constants first.
        functions: the primal function, and the rule (custom_jvp) or the forward and backward rules (custom_vjp), in
            JAX's own calling convention.
    """
    old, params = _functions(eqn, eqn.params)
    wrapped = [
        linear_util.wrap_init(new, debug_info=function.debug_info) for new, function in zip(functions, old, strict=True)
    ]
    return _bound(eqn, wrapped, args, params)


def jvp_rule(eqn: JaxprEqn, zeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Any], Sequence[bool]]:
    """A custom_jvp_call's rule as (jaxpr, its constants, which output tangents are zero).

    The jaxpr maps primals and the nonzero tangents to output primals and nonzero output tangents. The first
    `num_consts` arguments of the call do not take part.
    """
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return jaxpr, consts, out_zeros


def vjp_forward(eqn: JaxprEqn, values: Sequence[Any], nonzeros: Sequence[bool]) -> tuple[Jaxpr, Sequence[Any]]:
    """A custom_vjp_call's forward rule as (jaxpr, its constants): primals to residuals and outputs.

    The first `num_consts` values do not take part; JAX's own error is raised where one of them is differentiated.
    """
    count = eqn.params["num_consts"]
    if any(nonzeros[:count]):
        functions, _ = _functions(eqn, eqn.params)
        functions[1].call_wrapped(*(item for pair in zip(values, nonzeros, strict=True) for item in pair))
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*nonzeros[count:])
    return jaxpr, consts


def vjp_backward(eqn: JaxprEqn) -> Callable[..., Sequence[Any]]:
    """A custom_vjp_call's backward rule: residuals and cotangents to cotangents, its constants' zeros included."""
    functions, _ = _functions(eqn, eqn.params)
    backward: Callable[..., Sequence[Any]] = functions[2].call_wrapped
    return backward


def tangent_zero(primal: Any) -> SymbolicZero:
    """The symbolic zero tangent of a primal value."""
    return SymbolicZero(aval(primal).to_tangent_aval())


def is_zero(value: Any) -> bool:
    """True for the symbolic zeros that custom rules receive and return."""
    return isinstance(value, SymbolicZero) or type(value).__name__ == "Zero"


def shard_map(function: Callable[..., Any], eqn: JaxprEqn) -> Callable[..., Any]:
    """`function` under the mesh, specs and checks of a shard_map equation."""
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


def scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    """The keyword arguments with which `jax.lax.scan` made a scan equation."""
    params = eqn.params
    extra = {"_split_transpose": True} if params.get("_split_transpose") else {}
    return {name: params[name] for name in ("length", "reverse", "unroll")} | extra


def identity(name: str, tangent: Callable[..., Any], batched: Callable[..., Any]) -> Any:
    """A primitive that gives its one operand as it is.

    Args:
        name: its name.
        tangent: its rule of differentiation, as JAX calls one.
        batched: its rule of batching; an operand that is not mapped has the dimension None.
    """
    made: Any = extend_core.Primitive(name)
    made.def_impl(lambda value, **_: value)
    made.def_abstract_eval(lambda value, **_: value)
    ad.primitive_jvps[made] = tangent
    batching.primitive_batchers[made] = batched
    mlir.register_lowering(made, lambda _, value, **__: [value])
    return made


@contextlib.contextmanager
def apart(name: str, *, strictly: bool = True) -> Iterator[None]:
    """A block whose programs JAX keeps by themselves: none that was traced outside is used again inside, nor the other
    way round, but where the names of the blocks are the same.

    An older jax has no such blocks: there all programs are forgotten at both ends of one that is to be so strictly.
    """
    token = _blocks.set((*_blocks.get(), name))
    try:
        if _user_context is not None:
            with _user_context("/".join(_blocks.get())):
                yield
        else:
            clear: Any = jax.clear_caches if strictly else lambda: None  # JAX does not annotate it
            clear()
            try:
                yield
            finally:
                clear()
    finally:
        _blocks.reset(token)


def float64() -> contextlib.AbstractContextManager[Any]:
    """A block in which JAX has float64."""
    here: Any = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")  # an older jax
    block: contextlib.AbstractContextManager[Any] = here.enable_x64(True)
    return block


def mapped_axes() -> tuple[Any, ...]:
    """Names of the axes of `shard_map` and `pmap` around what is being traced; those of `vmap` are none.

    Before jax 0.8, where pmap is not made of shard_map, the named axes of vmap are among them: JAX tells no difference.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes and not getattr(jax.config, "jax_pmap_shmap_merge", jax.__version_info__ >= (0, 8)):
        axes = tuple(getattr(jax.core, "unsafe_get_axis_names_DO_NOT_USE", tuple)())
    return axes


def varying(value: Any) -> frozenset[Any]:
    """Axes of a `shard_map` over which a value varies; always none where it does not check that (`check_vma=False`)."""
    kind: Any = jax.typeof(value)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", ()))


def vary(value: Any, axes: Sequence[Any]) -> Any:
    """A value as one that varies over more axes of a `shard_map` that checks it."""
    lax: Any = jax.lax
    return lax.pcast(value, tuple(axes), to="varying") if hasattr(lax, "pcast") else lax.pvary(value, tuple(axes))


def trace_state() -> Any:
    """What is being traced now; equal for two calls in one trace."""
    module: Any = extend_core if hasattr(extend_core, "get_opaque_trace_state") else jax.core
    return module.get_opaque_trace_state(convention="flax")


def is_mapped(value: Any) -> bool:
    """Whether a value is that of one example under a `jax.vmap` which is being traced now."""
    return type(value).__name__ == "BatchTracer"


def map_axes(eqn: JaxprEqn) -> list[tuple[Any, int]]:
    """The axis environment inside an xla_pmap equation (jax 0.7; later versions map by shard_map)."""
    return [(eqn.params["axis_name"], eqn.params["global_axis_size"])]


def _functions(eqn: JaxprEqn, params: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    primitive: Any = eqn.primitive
    made = primitive.get_bind_params(params)
    if isinstance(made, tuple):  # until jax 0.9
        functions, params = made
        return list(functions), params
    params = dict(made)
    return list(params.pop("subfuns", ())), params


def _bound(eqn: JaxprEqn, functions: Sequence[Any], args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    primitive: Any = eqn.primitive
    if _SUBFUNS_IN_PARAMS:
        out = primitive.bind(*args, **({"subfuns": tuple(functions)} if functions else {}), **params)
    else:
        out = primitive.bind(*functions, *args, **params)
    return list(out) if primitive.multiple_results else [out]


_add: Final[Any] = add_p  # JAX does not annotate its primitives' methods
_SUBFUNS_IN_PARAMS: Final = not isinstance(_add.get_bind_params({}), tuple)
"""Whether functions travel in the parameters (from jax 0.10), or come before the arguments."""
_make_context: Final[Any] = getattr(jax, "make_user_context", None)
_user_context: Final[Any] = None if _make_context is None else _make_context("")
"""Part of the keys of JAX's caches, of programs too."""
_blocks: ContextVar[tuple[str, ...]] = ContextVar("polyamp_blocks", default=())
