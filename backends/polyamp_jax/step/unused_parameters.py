"""Detection of parameters that the loss does not depend on, from the program of the backward pass (S23).

JAX returns zeros for such parameters, as an array like any gradient. This module analyses the backward program. An
output computed from its one input, the cotangent of the loss, is a gradient, even if its values are zero. An output
computed only from zeros in the program text is not. The program already contains the effects of `stop_gradient`,
integers, rounding and custom rules. Operations that this module does not know count as gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from polyamp_jax import compat

_ZERO: Final = 0
"""Zeros for any loss: computed from zeros in the program text."""
_FIXED: Final = 1
"""Not computed from the cotangent and not known to be zeros, such as values saved by the forward pass."""
_GRADIENT: Final = 2
"""Computed from the cotangent of the loss."""

_LINEAR_PRIMITIVES: Final = frozenset(
    (
        "add", "add_any", "all_gather", "all_to_all", "broadcast_in_dim", "concatenate", "conj", "convert_element_type",
        "copy", "copy_p", "cumsum", "device_put", "dynamic_slice", "dynamic_update_slice", "expand_dims", "fft",
        "gather", "imag", "neg", "pad", "pbroadcast", "pcast", "ppermute", "psum", "psum2", "psum_invariant", "pvary",
        "real", "reduce_precision", "reduce_scatter", "reduce_sum", "reduce_window_sum", "reshape", "reshard", "rev",
        "scatter", "scatter_add", "select_and_scatter_add", "select_n", "sharding_constraint", "slice", "split",
        "squeeze", "sub", "transpose",
    )
)  # fmt: skip
"""Operations that return zeros for zero operands. Operands that are not floats only select or index."""
_PRODUCT_PRIMITIVES: Final = frozenset(("conv_general_dilated", "dot_general", "mul"))
"""Operations that return zeros if one operand is zeros."""
_TRANSPARENT_PRIMITIVES: Final = frozenset(
    ("add_any", "convert_element_type", "copy", "div", "mul", "reshape", "squeeze", "expand_dims", "transpose")
)
"""Operations that change only the form or a factor of an array, or add it to another."""
_REF_READS: Final = frozenset(("get", "ref_get", "freeze", "ref_freeze"))
_REF_WRITES: Final = frozenset(("swap", "ref_swap", "addupdate", "ref_addupdate"))


def gradient_mask(backward: compat.ClosedJaxpr) -> list[bool]:
    """Return for each output of a backward pass whether it is a gradient of the loss.

    Args:
        backward: the program of the backward pass; its one input is the cotangent of the loss.
    """
    kinds = _DependenceFlow().run(backward.jaxpr, [_FIXED] * len(backward.jaxpr.constvars), [_GRADIENT])[0]
    return [kind != _ZERO for kind in kinds]


def reduce_scatter_mask(backward: compat.ClosedJaxpr) -> list[bool]:
    """Return for each output of a backward pass whether it is the gradient of an array that was gathered from shards.

    Such a gradient is the result of a `psum_scatter`, up to casts, shapes and factors.

    Args:
        backward: the program of the backward pass.
    """
    made = {var: eqn for eqn in backward.jaxpr.eqns for var in eqn.outvars}

    @functools.cache
    def of(var: Any) -> bool:
        eqn = made.get(var)
        if eqn is None:
            return False
        name = compat.primitive_name(eqn)
        if name == "reduce_scatter":
            return True
        if name == "jit":
            inner: Any = eqn.params["jaxpr"]
            return reduce_scatter_mask(inner)[eqn.outvars.index(var)] or any(map(found, eqn.invars))
        return name in _TRANSPARENT_PRIMITIVES and any(map(found, eqn.invars))

    def found(atom: Any) -> bool:
        return not isinstance(atom, compat.Literal) and of(atom)

    return [found(atom) for atom in backward.jaxpr.outvars]


class _DependenceFlow:
    """Dataflow analysis of programs. Analyses each program once per combination of input kinds."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[list[int], list[int]]] = {}

    def run(self, jaxpr: compat.Jaxpr, consts: Sequence[int], inputs: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the kinds of a program's outputs, and of its inputs afterwards. Reference inputs may be written."""
        key = (jaxpr, tuple(consts), tuple(inputs))
        if key not in self._kept:
            self._kept[key] = self._walk_program(jaxpr, consts, inputs)
        return self._kept[key]

    def _walk_program(
        self, jaxpr: compat.Jaxpr, consts: Sequence[int], inputs: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        known: dict[Any, int] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            if not isinstance(atom, compat.Literal):
                return known[atom]
            return _FIXED if np.any(np.asarray(atom.val)) else _ZERO

        for eqn in jaxpr.eqns:
            kinds = [read(atom) for atom in eqn.invars]
            out, after = self._equation(eqn, kinds)
            for atom, kind in zip(eqn.invars, after, strict=True):
                if not isinstance(atom, compat.Literal):
                    known[atom] = max(known[atom], kind)
            known.update(zip(eqn.outvars, out, strict=True))
        return [read(atom) for atom in jaxpr.outvars], [known[var] for var in jaxpr.invars]

    def _equation(self, eqn: compat.JaxprEqn, kinds: list[int]) -> tuple[list[int], list[int]]:
        name = compat.primitive_name(eqn)
        structure = _FLOW_RULES.get(name)
        if structure is not None:
            return structure(self, eqn, kinds)
        if name in _REF_READS:
            return [kinds[0]] * len(eqn.outvars), kinds
        if name in _REF_WRITES:
            return [kinds[0]] * len(eqn.outvars), [max(kinds[:2]), *kinds[1:]]
        programs = [p for p in compat.inner_programs(eqn) if len(p.invars) == len(kinds)]
        if len(programs) == 1 and len(programs[0].outvars) == len(eqn.outvars):
            return self.run(programs[0], [_FIXED] * len(programs[0].constvars), kinds)
        if name == "optimization_barrier":
            return kinds, kinds
        return [_operation(eqn, name, kinds)] * len(eqn.outvars), kinds

    def loop(
        self, jaxpr: compat.Jaxpr, fixed: Sequence[int], carry: Sequence[int], each: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Iterate a loop's body to a fixed point. Return the kinds of its constants, carry and other outputs."""
        fixed, carry = list(fixed), list(carry)
        while True:
            out, after = self.run(jaxpr, [_FIXED] * len(jaxpr.constvars), [*fixed, *carry, *each])
            new_fixed = [max(pair) for pair in zip(fixed, after[: len(fixed)], strict=True)]
            new_carry = [max(pair) for pair in zip(carry, out[: len(carry)], strict=True)]
            if (new_fixed, new_carry) == (fixed, carry):
                return fixed, carry, out[len(carry) :]
            fixed, carry = new_fixed, new_carry


def _operation(eqn: compat.JaxprEqn, name: str, kinds: list[int]) -> int:
    if _GRADIENT in kinds:
        return _GRADIENT
    if name in _PRODUCT_PRIMITIVES:
        return _ZERO if _ZERO in kinds else _FIXED
    if name == "div":
        return kinds[0]
    if name in _LINEAR_PRIMITIVES:
        floats = [
            kind
            for kind, atom in zip(kinds, eqn.invars, strict=True)
            if jnp.issubdtype(getattr(atom.aval, "dtype", np.dtype(bool)), np.inexact)
        ]
        return max(floats, default=_FIXED)
    return _FIXED


def _scan(flow: _DependenceFlow, eqn: compat.JaxprEqn, kinds: list[int]) -> tuple[list[int], list[int]]:
    consts, carried = compat.scan_counts(eqn)
    first, rest = kinds[:consts], kinds[consts + carried :]
    fixed, carry, each = flow.loop(eqn.params["jaxpr"].jaxpr, first, kinds[consts : consts + carried], rest)
    return [*carry, *each], [*fixed, *kinds[consts:]]


def _while(flow: _DependenceFlow, eqn: compat.JaxprEqn, kinds: list[int]) -> tuple[list[int], list[int]]:
    condition, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    start = condition + body
    fixed, carry, _ = flow.loop(eqn.params["body_jaxpr"].jaxpr, kinds[condition:start], kinds[start:], [])
    return carry, [*kinds[:condition], *fixed, *kinds[start:]]


def _cond(flow: _DependenceFlow, eqn: compat.JaxprEqn, kinds: list[int]) -> tuple[list[int], list[int]]:
    runs = [flow.run(b.jaxpr, [_FIXED] * len(b.jaxpr.constvars), kinds[1:]) for b in eqn.params["branches"]]
    out = [max(some) for some in zip(*(made for made, _ in runs), strict=True)]
    after = [max(some) for some in zip(*(left for _, left in runs), strict=True)]
    return out, [kinds[0], *after]


_FlowRule = Callable[[_DependenceFlow, Any, list[int]], tuple[list[int], list[int]]]
_FLOW_RULES: Final[dict[str, _FlowRule]] = {"scan": _scan, "while": _while, "cond": _cond}
