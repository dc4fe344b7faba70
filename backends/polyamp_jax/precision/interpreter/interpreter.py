"""`Interpreter`: evaluates a jaxpr with each operation in its op-list dtype (S3, S4, S5).

`Interpreter.run` evaluates the equations in order. `control_flow` handles operations that contain other jaxprs. The
interpreter runs under any JAX transformation, so its operations can be differentiated, batched and sharded.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import UnsupportedError
from polyamp.recipe.resolved_policy import ModulePrecision, ResolvedPolicy
from polyamp_jax import compat
from polyamp_jax.precision.interpreter import float8_products, matrix_products, program_analysis, tag_primitive
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.program_analysis import PrecisionNeed
from polyamp_jax.precision.interpreter.program_value import (
    CASTABLE_DTYPES,
    FLOAT32,
    NO_TRAITS,
    DtypelessConstant,
    ProgramValue,
    ValueTraits,
    literal_value,
)
from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE, scope_path
from polyamp_jax.precision.op_list import (
    LINEAR_ALGEBRA_RULE,
    LOGARITHMS,
    MOVES,
    REDUCTIONS,
    SCATTERS,
    SHAPE_CHANGES,
    STRUCTURES,
    OpRule,
    rules_for,
)

StructureRule = Callable[["Interpreter", compat.JaxprEqn, list[ProgramValue]], list[ProgramValue]]
"""Function that rebuilds an operation with inner programs, given the interpreter for these and the operands."""


class InterpreterSettings:
    """A plan prepared for the interpreter, with a cache of rewritten inner jaxprs.

    Attributes:
        plan: the policy, resolved for the program.
        base: dtype of the compute list outside overrides, or None if the policy mixes no dtypes.
        structures: name of a primitive with inner programs -> function that rebuilds it. See `control_flow`.
        rules: primitive name -> rule.
        logarithms: the logarithm primitives that run in float32. Their operands are computed in float32 too.
        strict: raise for an operation without a rule.
        cache: inner jaxpr -> its rewritten forms.
    """

    def __init__(self, plan: ResolvedPolicy, structures: Mapping[str, StructureRule], *, strict: bool = False) -> None:
        self.plan = plan
        self.structures = structures
        self.base = np.dtype(plan.compute) if plan.root.mixes else None
        self.rules: Mapping[str, OpRule] = rules_for(plan.op_rules)
        self.logarithms = frozenset(name for name in LOGARITHMS if self.rules[name] == "float32")
        self.strict = strict
        self.cache: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def program_value(array: Any, aval: Any, traits: ValueTraits = NO_TRAITS) -> ProgramValue:
    """Return the `ProgramValue` of an array."""
    if getattr(aval, "weak_type", False) and aval.shape == () and not traits.weak:
        traits = traits._replace(weak=True)
    return ProgramValue(array, getattr(aval, "dtype", None), traits)


def has_interpreted_operations(plan: ResolvedPolicy) -> bool:
    """Return whether a plan needs the interpreter: mode "autocast", with some operation not in its declared dtype."""
    return not plan.cast and (plan.root.mixes or bool(plan.overridden))


class Interpreter:
    """Evaluator of one program.

    Args:
        settings: the plan.
        modules: paths of the model's modules. None for a plain function, whose every scope is a path segment.
        recorder: records every operation, or None.
        scopes: names of the scopes around the program.
        default: precision of products that specify none.
        output_needs: precision needs of the results of the equation that contains the program. See `program_analysis`.
    """

    def __init__(
        self,
        settings: InterpreterSettings,
        modules: frozenset[str] | None = None,
        recorder: Recorder | None = None,
        scopes: tuple[str, ...] = (),
        default: Any = None,
        output_needs: tuple[PrecisionNeed, ...] = (),
    ) -> None:
        self.settings = settings
        self.modules = modules
        self.recorder = recorder
        self.scopes = scopes
        self.default = default
        self.output_needs = output_needs

    def inner_interpreter(self, eqn: compat.JaxprEqn, output_needs: tuple[PrecisionNeed, ...]) -> Interpreter:
        """Return the interpreter of a program inside an equation, whose results have the needs `output_needs`."""
        scopes = self.scopes + compat.named_scopes(eqn)
        return Interpreter(self.settings, self.modules, self.recorder, scopes, self.default, output_needs)

    @property
    def key(self) -> Any:
        """Cache key of a rewritten inner jaxpr, in addition to its arguments."""
        place = (self.scopes, self.modules) if self.settings.plan.overridden else ()
        return (*place, float8_products.measures_products.get(), self.default, self.output_needs)

    def run(
        self,
        jaxpr: compat.Jaxpr,
        consts: Sequence[Any],
        values: Sequence[ProgramValue],
        output_needs: Sequence[PrecisionNeed] = (),
    ) -> list[ProgramValue]:
        """Return the values of a jaxpr's outputs.

        Args:
            jaxpr: the program.
            consts: arrays for its constants.
            values: values of its inputs.
            output_needs: precision needs of its first outputs.
        """
        jaxpr, marked, marked_last = tag_primitive.strip_tags(jaxpr)
        known: dict[compat.Var, ProgramValue] = {}
        for var, array in zip(jaxpr.constvars, consts, strict=True):
            known[var] = program_value(array, var.aval, ValueTraits(leaf=True, rank=np.ndim(array)))
        known.update(zip(jaxpr.invars, values, strict=True))
        output_needs = (*output_needs, *program_analysis.no_needs(len(jaxpr.outvars) - len(output_needs)))
        plan = program_analysis.analyze_program(jaxpr, output_needs, self.settings.logarithms)

        def read(atom: Any) -> ProgramValue:
            if not isinstance(atom, compat.Literal):
                return known[atom]
            dtype = getattr(atom.aval, "dtype", None)
            if np.ndim(atom.val) == 0 and (dtype in CASTABLE_DTYPES or _is_python_number(atom.aval)):
                return literal_value(atom.val, dtype)
            return ProgramValue(atom.val, dtype)

        def show(index: int) -> None:
            for var, params in marked.get(index, ()):
                known[var] = known[var].tag(tag_primitive.TAG_PRIMITIVE, params)

        show(-1)
        for index, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            with compat.equation_context(eqn):
                results = self._equation(eqn, operands, plan.needs[index], is_single_use=index in plan.single_uses)
            known.update(zip(eqn.outvars, results, strict=True))
            show(index)
            for var in plan.last_uses[index]:
                if marked_last.get(var, -1) <= index:
                    known.pop(var, None)
        return [read(atom) for atom in jaxpr.outvars]

    def path(self, scopes: tuple[str, ...]) -> str:
        """Return the module path of some scopes."""
        return scope_path(scopes, self.modules)

    def _equation(
        self,
        eqn: compat.JaxprEqn,
        operands: list[ProgramValue],
        needs: tuple[PrecisionNeed, ...],
        *,
        is_single_use: bool,
    ) -> list[ProgramValue]:
        name, scopes = compat.primitive_name(eqn), self.scopes + compat.named_scopes(eqn)
        rule = self.settings.rules.get(name)
        if KEEP_SCOPE in scopes:
            return self._operate(eqn, name, operands, "opaque", KEEP_SCOPE, scopes)
        if name in STRUCTURES and rule is None:
            whole = compat.linear_algebra_name(eqn)
            if whole is not None:  # its products too: expm multiplies numbers outside float16's range
                return self._operate(eqn, whole, operands, "opaque", LINEAR_ALGEBRA_RULE, scopes)
            if name == "convert_element_type":
                return [self._convert(eqn, operands[0], is_single_use=is_single_use)]
            return self.settings.structures[name](self.inner_interpreter(eqn, needs), eqn, operands)
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
        rule: OpRule,
        operands: list[ProgramValue],
        scopes: tuple[str, ...],
        needs: tuple[PrecisionNeed, ...],
    ) -> tuple[Any, str]:
        """Return "opaque", "promote", "follow" or a dtype for an operation, and the reason for the report."""
        if rule == "opaque" or name in MOVES:
            return rule, rule
        dtype, reason = self._dtype(operands, scopes)
        if dtype is None:
            return ("follow" if rule == "follow" else "promote"), "off"
        if dtype == FLOAT32:
            return FLOAT32, reason or rule
        if matrix_products.has_explicit_precision(eqn):
            return "opaque", "precision"
        if rule == "compute":
            if not matrix_products.can_run_narrow(eqn, operands):
                return "opaque", "opaque"
            if matrix_products.is_multiplication(eqn):
                return "promote", "promote (outer product)"
            if matrix_products.is_inner_product(eqn):
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
        need = program_analysis.float32_reason(name, needs)
        return (FLOAT32, f"float32 ({need})") if need else (rule, rule)

    def _dtype(self, operands: list[ProgramValue], scopes: tuple[str, ...]) -> tuple[Any, str]:
        """Return the compute list's dtype in some scopes, and the override that set it ("" if none did)."""
        place = self._place(operands, scopes)
        return (self.settings.base, "") if place.named is None else (np.dtype(place.dtype), "override")

    def _place(self, operands: list[ProgramValue], scopes: tuple[str, ...]) -> ModulePrecision:
        """Return the precision of the module in whose scopes an operation runs, or whose parameter is an operand."""
        plan = self.settings.plan
        if plan.overridden:
            owners = (v.traits.owner for v in operands if v.traits.owner is not None)
            for path in (self.path(scopes), *owners):
                place = plan.at(path)
                if place.named is not None:
                    return place
        return plan.root

    def _operate(
        self,
        eqn: compat.JaxprEqn,
        name: str,
        operands: list[ProgramValue],
        chosen: Any,
        reason: str,
        scopes: tuple[str, ...],
    ) -> list[ProgramValue]:
        note = self.recorder.cast if self.recorder is not None else None
        constant = _move_constant(eqn, name, operands)
        if constant is not None:
            return [constant]
        if chosen == "promote":
            chosen = _widest_dtype(operands)
        if chosen == "opaque":
            arrays = [v.array(v.declared if v.castable else None, note) for v in operands]
        elif chosen == "follow":
            arrays = [v.array() for v in operands]
        else:
            arrays = [v.array(chosen if v.castable else None, note) for v in operands]
        product = None
        if self.settings.plan.policy.float8 is not None and name == "dot_general" and chosen == self.settings.base:
            product, reason = float8_products.find_product(eqn, operands, self._place(operands, scopes), reason)
        bound = None if product is None else [float8_products.multiply(product, arrays)]
        out = self._bind(eqn, name, operands, arrays, chosen) if bound is None else bound
        if self.recorder is not None and name not in MOVES:
            self.recorder.operation(self.path(scopes), name, arrays, out, reason, product=product)
        traits = _result_traits(eqn, name, operands, product=self.settings.rules.get(name) == "compute")
        if traits.leaf and _keeps_every_element(eqn, name):
            return [ProgramValue(out[0], operands[0].declared, traits, recast=_recast_before(eqn, operands[0]))]
        return [program_value(array, var.aval, traits) for var, array in zip(eqn.outvars, out, strict=True)]

    def _bind(
        self, eqn: compat.JaxprEqn, name: str, operands: list[ProgramValue], arrays: list[Any], chosen: Any
    ) -> list[Any]:
        """Return the results of an operation on arrays in the chosen dtypes."""
        if name in SCATTERS and arrays[0].dtype != compat.atom_dtype(eqn.invars[0]):
            return [compat.bind_scatter(eqn, SCATTERS[name], arrays)]
        if (
            chosen == "follow"
            and self.settings.base is not None
            and operands[0].narrow
            and program_analysis.is_indexed_read(eqn)
        ):
            return [_read_indexed(eqn, operands[0], arrays)]
        return compat.bind_equation(eqn, arrays, matrix_products.equation_parameters(eqn, chosen, arrays, self.default))

    def _convert(self, eqn: compat.JaxprEqn, value: ProgramValue, *, is_single_use: bool) -> ProgramValue:
        """Evaluate `convert_element_type`. The program's own casts between float dtypes are kept, with two exceptions.

        - A cast that only makes a weakly typed value strong keeps the value's current dtype.
        - JAX's own cast back to 16 bits after a float32 sum is dropped, since it would round the sum again (S4).
          `is_single_use` is True if nothing else uses the sum, as in this pattern.
        """
        new, old = np.dtype(eqn.params["new_dtype"]) if not _is_extended(eqn) else None, value.declared
        if value.constant is not None and new in CASTABLE_DTYPES:
            number = np.asarray(value.constant.number).astype(new)[()]
            return ProgramValue(None, new, value.traits, value.constant._replace(number=number))
        if new not in CASTABLE_DTYPES or old not in CASTABLE_DTYPES:
            (array,) = compat.bind_equation(eqn, [value.array()], eqn.params)
            scalar = new in CASTABLE_DTYPES and compat.atom_shape(eqn.outvars[0]) == ()
            # in x64 mode a Python float is a float64
            weak = value.traits.weak and scalar and bool(jnp.issubdtype(old, np.floating))
            return program_value(array, eqn.outvars[0].aval, ValueTraits(weak=weak))
        if new == old or (value.traits.sensitive and is_single_use and new != FLOAT32):
            return ProgramValue(value.array(), new, value.traits)
        note = self.recorder.cast if self.recorder is not None else None
        traits = value.traits._replace(is_upcast=new == FLOAT32, sensitive=False, product=False, layer=None)
        return ProgramValue(value.array(new, note), new, traits)


def _read_indexed(eqn: compat.JaxprEqn, operand: ProgramValue, arrays: Sequence[Any]) -> Any:
    """Read 16-bit values at computed indices, which may repeat. The gradient is a sum and accumulates in float32.

    The values are not copied to float32. An existing float32 copy is used.
    """

    def read(array: Any, *places: Any) -> Any:
        return compat.bind_equation(eqn, [array, *places], eqn.params)[0]

    def tangent(tangent: Any, out: Any, array: Any, *places: Any) -> Any:
        return jax.lax.convert_element_type(read(jax.lax.convert_element_type(tangent, FLOAT32), *places), out.dtype)

    if operand.wide is not None:
        return jax.lax.convert_element_type(read(operand.wide, *arrays[1:]), arrays[0].dtype)
    made = jax.custom_jvp(read)
    made.defjvps(tangent, *[None] * (len(arrays) - 1))
    return made(*arrays)


def _is_bias(operands: list[ProgramValue], *, either: bool) -> bool:
    """Return whether the operands are a product and its bias, in this order or, with `either`, in any order.

    A bias is a float32 parameter of the layer that computed the 16-bit product. If layers are not known, it is a vector
    added to a matrix. torch adds the bias of a linear layer or convolution in 16 bits within the layer.

    A mask, a position embedding or a residual is not a bias. Those promote, as in torch.
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


def _widest_dtype(operands: list[ProgramValue]) -> Any:
    """Return the widest dtype among the operands, or "follow" if there is no choice.

    float16 together with bfloat16 gives float32, as everywhere in JAX. So does a constant outside the dtype's range.
    """
    dtypes = [v.dtype for v in operands if v.widens]
    if not dtypes:
        return "opaque" if any(v.castable for v in operands) else "follow"
    widest = functools.reduce(jnp.promote_types, dtypes)
    if not all(v.constant.fits(widest) for v in operands if v.constant is not None and v.castable):
        return FLOAT32
    return np.dtype(widest)


def _move_constant(eqn: compat.JaxprEqn, name: str, operands: list[ProgramValue]) -> ProgramValue | None:
    """Return the constant that a move of a constant yields, or None for any other operation."""
    if name not in ("broadcast_in_dim", "reshape", "stop_gradient", "squeeze") or len(operands) != 1:
        return None
    constant = operands[0].constant
    if constant is None:
        return None

    def build(dtype: Any) -> Any:
        return compat.bind_equation(eqn, [constant.build(dtype)], eqn.params)[0]

    shape = compat.atom_shape(eqn.outvars[0])
    traits = ValueTraits(weak=True)
    return ProgramValue(None, operands[0].declared, traits, DtypelessConstant(constant.number, shape, build))


def _result_traits(eqn: compat.JaxprEqn, name: str, operands: list[ProgramValue], *, product: bool) -> ValueTraits:
    floats = [v for v in operands if v.castable]
    if product:
        layers = {v.traits.owner or "" for v in floats if v.traits.leaf}
        layers = layers or {v.traits.owner for v in floats if v.traits.owner}  # a table's rows times an activation
        return ValueTraits(product=True, layer=max(layers, default=None))
    if not floats or not eqn.outvars:
        return NO_TRAITS
    first = floats[0].traits
    if name in MOVES and len(floats) == 1:
        leaf = first.leaf and name != "gather"  # rows of an embedding table do not count as a parameter
        rank = min(first.rank, len(compat.atom_shape(eqn.outvars[0])))
        return first._replace(leaf=leaf, rank=rank)
    scalar = compat.atom_shape(eqn.outvars[0]) == ()  # a scalar next to an array, such as a count, is ignored
    tensors = [v.traits for v in floats if v.constant is None and not v.traits.weak and (scalar or v.array().ndim)]
    is_upcast = bool(tensors) and all(traits.is_upcast for traits in tensors)
    sensitive = bool(tensors) and all(traits.sensitive for traits in tensors)
    return ValueTraits(
        weak=not tensors and len(floats) == len(operands) and scalar,
        is_upcast=is_upcast,
        sensitive=sensitive or (is_upcast and name in REDUCTIONS),
    )


def _keeps_every_element(eqn: compat.JaxprEqn, name: str) -> bool:
    """Return whether an operation changes the shape of its operand only: no element is dropped or repeated."""
    if name not in SHAPE_CHANGES or len(eqn.invars) != 1:
        return False
    before, after = compat.atom_shape(eqn.invars[0]), compat.atom_shape(eqn.outvars[0])
    return math.prod(before) == math.prod(after)


def _recast_before(eqn: compat.JaxprEqn, operand: ProgramValue) -> Callable[[Any], Any]:
    """Return the function from a dtype to the operation's result on the operand cast to that dtype."""
    return lambda dtype: compat.bind_equation(eqn, [operand.array(dtype)], eqn.params)[0]


def _is_python_number(aval: Any) -> bool:
    """Return whether an operand is a Python number in the program text: an integer, or in x64 mode a float64.

    It takes the dtype of the other operand.
    """
    kinds = (np.integer, np.floating)
    return bool(getattr(aval, "weak_type", False)) and any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)


def _is_extended(eqn: compat.JaxprEqn) -> bool:
    return bool(jnp.issubdtype(eqn.params["new_dtype"], jax.dtypes.extended))
