"""Values of a program's variables in the interpreter: their arrays, and traits that later operations may need.

A program under autocast is traced unchanged, usually in float32. Each variable has a *declared* dtype, the one in
the trace, and an actual dtype, that of its array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.float_formats import HALF_DTYPES

FLOAT32: Final = np.dtype("float32")
CASTABLE_DTYPES: Final = frozenset({FLOAT32, *(np.dtype(getattr(jnp, name)) for name in HALF_DTYPES)})
"""The dtypes that autocast casts between. float64, complex, integers, float8 and keys are never cast (S2)."""


class ValueTraits(NamedTuple):
    """Origin of a value.

    Attributes:
        weak: a scalar that takes the dtype of the other operand, as a Python number does.
        product: result of an operation of the compute list, possibly moved. A bias added to it belongs to it.
        layer: for a product, path of the module whose parameter is an operand. "" if an operand is an input or
            constant of no known module, None if no operand is either.
        leaf: an input or constant of the program, possibly moved.
        rank: for a leaf, the smallest number of axes that it had while it was moved.
        owner: path of the module whose parameter it is.
        is_upcast: the program itself cast it up from 16 bits, as JAX's own sum and mean do.
        sensitive: such a value, and then an operand of a sensitive operation. Casting it down again would undo S4.
    """

    weak: bool = False
    product: bool = False
    layer: str | None = None
    leaf: bool = False
    rank: int = 0
    owner: str | None = None
    is_upcast: bool = False
    sensitive: bool = False


NO_TRAITS: Final = ValueTraits()


class DtypelessConstant(NamedTuple):
    """A number known while tracing, possibly broadcast. It has no dtype until an operation requests one.

    Attributes:
        number: its value in the declared dtype.
        shape: shape of the array that it represents.
        build: function from a dtype to the array.
    """

    number: Any
    shape: tuple[int, ...]
    build: Callable[[Any], Any]

    def fits(self, dtype: Any) -> bool:
        """Return False if the number overflows to infinity or underflows to zero in the dtype."""
        number = np.float64(self.number)
        if not np.isfinite(number) or number == 0 or dtype == FLOAT32:
            return True
        limits = jnp.finfo(dtype)
        return bool(float(limits.smallest_subnormal) <= abs(number) <= float(limits.max))


class ProgramValue:
    """Value of one variable.

    It is cast at most once per dtype, so several operations share the cast of an activation. The casts of a leaf are
    not shared, so that gradients of a parameter with several uses are summed in float32. (XLA merges the casts.)

    Args:
        array: its array.
        declared: its declared dtype.
        traits: its traits.
        constant: the number, if it is one.
        recast: for a leaf in another shape, the function from a dtype to the array cast *before* the change of shape.
            The gradient is then widened after it, next to the optimizer, where XLA fuses the cast.
    """

    __slots__ = ("_array", "_casts", "_recast", "constant", "declared", "traits")

    def __init__(
        self,
        array: Any,
        declared: Any,
        traits: ValueTraits = NO_TRAITS,
        constant: DtypelessConstant | None = None,
        recast: Callable[[Any], Any] | None = None,
    ) -> None:
        self._array = array
        self._casts: dict[Any, Any] = {}
        self._recast = recast
        self.declared = declared
        self.traits = traits
        self.constant = constant

    @property
    def castable(self) -> bool:
        return self.dtype in CASTABLE_DTYPES

    @property
    def narrow(self) -> bool:
        """Whether it is a 16-bit array."""
        return self.constant is None and self.castable and self.dtype != FLOAT32

    @property
    def wide(self) -> Any:
        """The float32 copy of a 16-bit array if it already exists, else None."""
        return self._casts.get(FLOAT32)

    @property
    def dtype(self) -> Any:
        """The actual dtype. For a constant the declared one, None for references and tokens."""
        return self.declared if self.constant is not None else getattr(self._array, "dtype", None)

    @property
    def widens(self) -> bool:
        """Whether it counts when the widest dtype is determined."""
        return self.castable and self.constant is None and not self.traits.weak

    def array(self, dtype: Any = None, note: Callable[[Any, Any], None] | None = None) -> Any:
        """Return the array, in `dtype` if one is given. `note` is called for a cast."""
        if self.constant is not None:
            return self.constant.build(dtype or self.declared)
        if dtype is None or self._array.dtype == dtype:
            return self._array
        made = self._casts.get(dtype)
        if made is None:
            if note is not None:
                note(self._array.dtype, dtype)
            made = jax.lax.convert_element_type(self._array, dtype) if self._recast is None else self._recast(dtype)
            if not self.traits.leaf:
                self._casts[dtype] = made
        return made

    def with_array(self, array: Any) -> ProgramValue:
        """Return this value for an inner function, with `array` instead of its own. Casts are made again there."""
        return ProgramValue(array, self.declared, self.traits, self.constant)

    def with_float32_array(self, array: Any) -> ProgramValue:
        """Return this 16-bit value for an inner function that receives `array`, its float32 copy."""
        made = self.with_array(jax.lax.convert_element_type(array, self._array.dtype))
        made._casts[FLOAT32] = array
        return made

    def part(self, array: Any) -> ProgramValue:
        """Return a slice or shard of this value for an inner function. That of a constant is no longer a constant."""
        if self.constant is not None:
            weak = all(self.constant.fits(dtype) for dtype in CASTABLE_DTYPES) and array.ndim == 0
            return ProgramValue(array, self.declared, ValueTraits(weak=weak))
        rank = self.traits.rank - (self._array.ndim - array.ndim)
        return ProgramValue(array, self.declared, self.traits._replace(rank=rank))

    def tag(self, mark: Any, params: Mapping[str, Any]) -> ProgramValue:
        """Mark this value's array and return the marked value. Return an input or a constant unchanged."""
        made = mark.bind(self.array(), **params)
        keeps = self.constant is not None or params["what"] != "output"
        return self if keeps else ProgramValue(made, self.declared, self.traits)

    def key(self) -> Any:
        """Return the cache key of an inner function's trace, in addition to the array's type."""
        return self.traits, None if self.constant is None else (str(self.constant.number), self.declared)


def literal_value(number: Any, declared: Any) -> ProgramValue:
    """Return the value of a number in the program text."""
    scalar = np.asarray(number)

    def build(dtype: Any) -> Any:
        return scalar.astype(dtype)

    return ProgramValue(None, declared, ValueTraits(weak=True), DtypelessConstant(scalar[()], (), build))
