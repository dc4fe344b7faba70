"""Evaluates a jaxpr with each operation in the dtype that the op lists give it (S3, S4, S5).

`Interpreter.run` walks the equations; operations that hold other jaxprs are in `control_flow`. It runs under any JAX
transformation, so derivatives, batching and sharding apply to what it does. Called by `run`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import UnsupportedError
from polyamp.rules.plan import Plan
from polyamp_jax import compat
from polyamp_jax.precision.interpreter import lookahead, products, seen
from polyamp_jax.precision.interpreter.lookahead import Need
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.staging import KEEP
from polyamp_jax.precision.interpreter.values import CASTABLE, FLOAT32, NO_TRAITS, Constant, Traits, Value, literal
from polyamp_jax.precision.op_list import LOGARITHMS, MOVES, SCATTERS, STRUCTURES, SUMS, Rule, rules_for

Structure = Callable[["Interpreter", compat.JaxprEqn, list[Value]], list[Value]]
"""Rebuilds an operation that holds programs, given the interpreter for what is inside and the operands."""


class Settings:
    """A plan made ready for the interpreter, with the inner jaxprs that it has rewritten already.

    Attributes:
        plan: the policy, resolved for the program.
        base: dtype of the compute list outside overrides, or None where the policy mixes none.
        structures: name of a primitive that holds programs -> what rebuilds it; see `control_flow`.
        rules: primitive name -> rule.
        logarithms: the primitives whose operands are made in float32: those that the rules leave in float32.
        strict: an operation without a rule is an error.
        cache: inner jaxpr -> its rewritten forms.
    """

    def __init__(self, plan: Plan, structures: Mapping[str, Structure], *, strict: bool = False) -> None:
        self.plan = plan
        self.structures = structures
        self.base = np.dtype(plan.compute) if plan.root.mixes else None
        self.rules: Mapping[str, Rule] = rules_for(plan.op_rules)
        self.logarithms = frozenset(name for name in LOGARITHMS if self.rules[name] == "float32")
        self.strict = strict
        self.cache: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def value_of(array: Any, aval: Any, traits: Traits = NO_TRAITS) -> Value:
    """An array as the value of a variable."""
    if getattr(aval, "weak_type", False) and aval.shape == () and not traits.weak:
        traits = traits._replace(weak=True)
    return Value(array, getattr(aval, "dtype", None), traits)


def interprets(plan: Plan) -> bool:
    """Whether a plan takes the interpreter: mode "autocast", and some operation in another dtype than declared."""
    return not plan.cast and (plan.root.mixes or bool(plan.overridden))


class Interpreter:
    """One walk over a program.

    Args:
        settings: the plan.
        modules: paths of the model's modules; None for a plain function, whose every scope is a path segment.
        recorder: hears of every operation, or None.
        scopes: names of the scopes around the program.
        default: precision of the products that say none themselves.
        wanted: what is needed of the results of the equation that holds the program; see `lookahead`.
    """

    def __init__(
        self,
        settings: Settings,
        modules: frozenset[str] | None = None,
        recorder: Recorder | None = None,
        scopes: tuple[str, ...] = (),
        default: Any = None,
        wanted: tuple[Need, ...] = (),
    ) -> None:
        self.settings = settings
        self.modules = modules
        self.recorder = recorder
        self.scopes = scopes
        self.default = default
        self.wanted = wanted

    def within(self, eqn: compat.JaxprEqn, wanted: tuple[Need, ...]) -> Interpreter:
        """The interpreter of a program inside an equation, of whose results something is `wanted`."""
        scopes = self.scopes + compat.scopes_of(eqn)
        return Interpreter(self.settings, self.modules, self.recorder, scopes, self.default, wanted)

    @property
    def key(self) -> Any:
        """What a rewritten inner jaxpr depends on beside its arguments."""
        place = (self.scopes, self.modules) if self.settings.plan.overridden else ()
        return (*place, self.default, self.wanted)

    def run(
        self, jaxpr: compat.Jaxpr, consts: Sequence[Any], values: Sequence[Value], wanted: Sequence[Need] = ()
    ) -> list[Value]:
        """The values of a jaxpr's outputs.

        Args:
            jaxpr: the program.
            consts: arrays for its constants.
            values: values of its inputs.
            wanted: what is needed of its first outputs.
        """
        jaxpr, marked, marked_last = seen.without(jaxpr)
        known: dict[compat.Var, Value] = {}
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            known[var] = value_of(array, var.aval, Traits(leaf=True, rank=np.ndim(array)))
        known.update(zip(jaxpr.invars, values, strict=True))
        wanted = (*wanted, *lookahead.none(len(jaxpr.outvars) - len(wanted)))
        plan = lookahead.plan(jaxpr, wanted, self.settings.logarithms)

        def read(atom: Any) -> Value:
            if not isinstance(atom, compat.Literal):
                return known[atom]
            dtype = getattr(atom.aval, "dtype", None)
            if np.ndim(atom.val) == 0 and (dtype in CASTABLE or _python_number(atom.aval)):
                return literal(atom.val, dtype)
            return Value(atom.val, dtype)

        def show(index: int) -> None:
            for var, params in marked.get(index, ()):
                known[var] = known[var].shown(seen.SHOWN, params)

        show(-1)
        for index, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            with compat.context_of(eqn):
                results = self._equation(eqn, operands, plan.needs[index], sole=index in plan.soles)
            known.update(zip(eqn.outvars, results, strict=True))
            show(index)
            for var in plan.last[index]:
                if marked_last.get(var, -1) <= index:
                    known.pop(var, None)
        return [read(atom) for atom in jaxpr.outvars]

    def path(self, scopes: tuple[str, ...]) -> str:
        """The module path that scopes stand for; a scope that begins with "/" names its path from the root."""
        if self.modules is None:
            return "/".join(scopes)
        path = ""
        for scope in scopes:
            if scope.startswith("/"):
                path = scope[1:]
                continue
            inner = f"{path}/{scope}" if path else scope
            if inner in self.modules:
                path = inner
        return path

    def _equation(
        self, eqn: compat.JaxprEqn, operands: list[Value], needs: tuple[Need, ...], *, sole: bool
    ) -> list[Value]:
        name, scopes = compat.name_of(eqn), self.scopes + compat.scopes_of(eqn)
        rule = self.settings.rules.get(name)
        if KEEP in scopes:
            return self._operate(eqn, name, operands, "opaque", KEEP, scopes)
        if name in STRUCTURES and rule is None:
            whole = compat.linear_algebra(eqn)
            if whole is not None:  # its products too: expm multiplies numbers that float16 cannot hold
                return self._operate(eqn, whole, operands, "opaque", "float32 (linear algebra)", scopes)
            if name == "convert_element_type":
                return [self._convert(eqn, operands[0], sole=sole)]
            return self.settings.structures[name](self.within(eqn, needs), eqn, operands)
        if rule is None:
            if self.settings.strict:
                raise UnsupportedError(
                    f"strict=True: the operation {name!r} (at {self.path(scopes) or 'the top level'!r}) has no rule. "
                    f"Give it one with Policy(op_rules={{{name!r}: 'follow'}}), or 'compute', 'float32', 'promote', or "
                    "'opaque' to run it in the dtypes that the program declares."
                )
            return self._operate(eqn, name, operands, "opaque", "unknown", scopes)
        chosen, reason = self._chosen(eqn, name, rule, operands, scopes, needs)
        return self._operate(eqn, name, operands, chosen, reason, scopes)

    def _chosen(
        self,
        eqn: compat.JaxprEqn,
        name: str,
        rule: Rule,
        operands: list[Value],
        scopes: tuple[str, ...],
        needs: tuple[Need, ...],
    ) -> tuple[Any, str]:
        """What to do with an operation, and the reason for the report: "opaque", "promote", "follow", or a dtype."""
        if rule == "opaque" or name in MOVES:
            return rule, rule
        dtype, reason = self._dtype(operands, scopes)
        if dtype is None:
            return ("follow" if rule == "follow" else "promote"), "off"
        if dtype == FLOAT32:
            return FLOAT32, reason or rule
        if products.asks(eqn):
            return "opaque", "precision"
        if rule == "compute":
            if not products.may_compute(eqn, operands):
                return "opaque", "opaque"
            if products.is_outer(eqn):
                return "promote", "promote (outer product)"
            if products.is_inner(eqn):
                return FLOAT32, "float32 (inner product)"
            return dtype, reason or rule
        if rule == "float32":
            return FLOAT32, rule
        if name == "mul" and eqn.invars[0] is eqn.invars[1]:
            return FLOAT32, "float32 (square)"
        if name == "div" and operands[0].constant is not None:
            return FLOAT32, "float32 (reciprocal)"
        if name in ("add", "sub") and _is_bias(operands, either=name == "add"):
            return dtype, "compute (bias)"
        need = lookahead.float32_for(name, needs)
        return (FLOAT32, f"float32 ({need})") if need else (rule, rule)

    def _dtype(self, operands: list[Value], scopes: tuple[str, ...]) -> tuple[Any, str]:
        """The dtype of the compute list at a place, and the override that gave it ("" where none did)."""
        plan = self.settings.plan
        if plan.overridden:
            owners = (v.traits.owner for v in operands if v.traits.owner is not None)
            for path in (self.path(scopes), *owners):
                named = plan.at(path).named
                if named is not None:
                    return np.dtype(named), "override"
        return self.settings.base, ""

    def _operate(
        self, eqn: compat.JaxprEqn, name: str, operands: list[Value], chosen: Any, reason: str, scopes: tuple[str, ...]
    ) -> list[Value]:
        note = self.recorder.cast if self.recorder is not None else None
        constant = _moved(eqn, name, operands)
        if constant is not None:
            return [constant]
        if chosen == "promote":
            chosen = _widest(operands)
        if chosen == "opaque":
            arrays = [v.array(v.declared if v.castable else None, note) for v in operands]
        elif chosen == "follow":
            arrays = [v.array() for v in operands]
        else:
            arrays = [v.array(chosen if v.castable else None, note) for v in operands]
        out = self._bound(eqn, name, operands, arrays, chosen)
        if self.recorder is not None and name not in MOVES:
            self.recorder.operation(self.path(scopes), name, arrays, out, reason)
        traits = _traits(eqn, name, operands, product=self.settings.rules.get(name) == "compute")
        return [value_of(array, var.aval, traits) for var, array in zip(eqn.outvars, out, strict=True)]

    def _bound(
        self, eqn: compat.JaxprEqn, name: str, operands: list[Value], arrays: list[Any], chosen: Any
    ) -> list[Any]:
        """The results of an operation on arrays in the dtypes that were chosen."""
        if name in SCATTERS and arrays[0].dtype != compat.dtype(eqn.invars[0]):
            return [compat.scatter(eqn, SCATTERS[name], arrays)]
        if chosen == "follow" and self.settings.base is not None and operands[0].narrow and lookahead.reads(eqn):
            return [_read(eqn, operands[0], arrays)]
        return compat.bind(eqn, arrays, products.parameters(eqn, chosen, arrays, self.default))

    def _convert(self, eqn: compat.JaxprEqn, value: Value, *, sole: bool) -> Value:
        """`convert_element_type`: the program's own casts between float dtypes are obeyed, save two kinds.

        A cast that only makes a weakly typed value strong leaves the dtype that the value has; and JAX's own return to
        16 bits after a sum that it took in float32 is not made, or the sum would be rounded again (S4); `sole` says
        that nothing else uses the sum, as there.
        """
        new, old = np.dtype(eqn.params["new_dtype"]) if not _extended(eqn) else None, value.declared
        if value.constant is not None and new in CASTABLE:
            number = np.asarray(value.constant.number).astype(new)[()]
            return Value(None, new, value.traits, value.constant._replace(number=number))
        if new not in CASTABLE or old not in CASTABLE:
            (array,) = compat.bind(eqn, [value.array()], eqn.params)
            scalar = new in CASTABLE and compat.shape(eqn.outvars[0]) == ()
            # in x64 mode a Python float arrives as a float64
            weak = value.traits.weak and scalar and bool(jnp.issubdtype(old, np.floating))
            return value_of(array, eqn.outvars[0].aval, Traits(weak=weak))
        if new == old or (value.traits.sensitive and sole and new != FLOAT32):
            return Value(value.array(), new, value.traits)
        note = self.recorder.cast if self.recorder is not None else None
        traits = value.traits._replace(raised=new == FLOAT32, sensitive=False, product=False, layer=None)
        return Value(value.array(new, note), new, traits)


def _read(eqn: compat.JaxprEqn, operand: Value, arrays: Sequence[Any]) -> Any:
    """A read of 16-bit values at computed places. What is read may be read again, so that the gradient is a sum: it
    accumulates in float32. The values themselves are not copied, unless a float32 copy is there already."""

    def read(array: Any, *places: Any) -> Any:
        return compat.bind(eqn, [array, *places], eqn.params)[0]

    def tangent(tangent: Any, out: Any, array: Any, *places: Any) -> Any:
        return jax.lax.convert_element_type(read(jax.lax.convert_element_type(tangent, FLOAT32), *places), out.dtype)

    if operand.wide is not None:
        return jax.lax.convert_element_type(read(operand.wide, *arrays[1:]), arrays[0].dtype)
    made = jax.custom_jvp(read)
    made.defjvps(tangent, *[None] * (len(arrays) - 1))
    return made(*arrays)


def _is_bias(operands: list[Value], *, either: bool) -> bool:
    """Whether it is a product and its bias, in this order or in `either` one.

    A float32 parameter of the layer that made the 16-bit product it is added to, or where layers are not known, a
    vector added to a matrix: the bias of a linear layer or convolution, which torch adds in 16 bits within the layer.

    Not a mask, a position embedding or a residual: those promote, as in torch.
    """
    if len(operands) != 2 or not all(v.widens for v in operands):
        return False
    for product, bias in (operands, operands[::-1]) if either else (operands,):
        made, added = product.traits, bias.traits
        if not (made.product and product.dtype != FLOAT32 and added.leaf and bias.dtype == FLOAT32):
            continue
        if made.layer and added.owner == made.layer:
            return True
        known = made.layer and added.owner
        if made.layer is not None and not known and added.rank == 1 and product.array().ndim > 1:
            return True
    return False


def _widest(operands: list[Value]) -> Any:
    """The widest dtype among the operands, or "follow" where there is no choice.

    float16 and bfloat16 together give float32, as everywhere in JAX; so does a constant that the dtype cannot hold.
    """
    dtypes = [v.dtype for v in operands if v.widens]
    if not dtypes:
        return "opaque" if any(v.castable for v in operands) else "follow"
    widest = functools.reduce(jnp.promote_types, dtypes)
    if not all(v.constant.fits(widest) for v in operands if v.constant is not None and v.castable):
        return FLOAT32
    return np.dtype(widest)


def _moved(eqn: compat.JaxprEqn, name: str, operands: list[Value]) -> Value | None:
    """A moved constant is a constant still; None for everything else."""
    if name not in ("broadcast_in_dim", "reshape", "stop_gradient", "squeeze") or len(operands) != 1:
        return None
    constant = operands[0].constant
    if constant is None:
        return None

    def build(dtype: Any) -> Any:
        return compat.bind(eqn, [constant.build(dtype)], eqn.params)[0]

    shape = compat.shape(eqn.outvars[0])
    traits = Traits(weak=True)
    return Value(None, operands[0].declared, traits, Constant(constant.number, shape, build))


def _traits(eqn: compat.JaxprEqn, name: str, operands: list[Value], *, product: bool) -> Traits:
    floats = [v for v in operands if v.castable]
    if product:
        layers = {v.traits.owner or "" for v in floats if v.traits.leaf or v.traits.owner}
        return Traits(product=True, layer=max(layers, default=None))
    if not floats or not eqn.outvars:
        return NO_TRAITS
    first = floats[0].traits
    if name in MOVES and len(floats) == 1:
        leaf = first.leaf and name != "gather"  # rows of an embedding table are not a parameter
        rank = min(first.rank, len(compat.shape(eqn.outvars[0])))
        return first._replace(leaf=leaf, rank=rank)
    scalar = compat.shape(eqn.outvars[0]) == ()  # a count, say, beside an array says nothing of the array
    tensors = [v.traits for v in floats if v.constant is None and not v.traits.weak and (scalar or v.array().ndim)]
    raised = bool(tensors) and all(traits.raised for traits in tensors)
    sensitive = bool(tensors) and all(traits.sensitive for traits in tensors)
    return Traits(
        weak=not tensors and len(floats) == len(operands) and scalar,
        raised=raised,
        sensitive=sensitive or (raised and name in SUMS),
    )


def _python_number(aval: Any) -> bool:
    """A Python number in the program text, an integer or in x64 mode a float64: it takes the dtype of what it meets."""
    kinds = (np.integer, np.floating)
    return bool(getattr(aval, "weak_type", False)) and any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)


def _extended(eqn: compat.JaxprEqn) -> bool:
    return bool(jnp.issubdtype(eqn.params["new_dtype"], jax.dtypes.extended))
