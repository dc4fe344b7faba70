"""What the interpreter knows of a program's values: the array as it is, and what the next operation may need.

A program under autocast is traced as it stands, usually in float32. Each of its variables then has a *declared* dtype,
the one in the trace, and the dtype that its array really has. Called by `walk` and `control_flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FLOAT32: Final = np.dtype("float32")
CASTABLE: Final = frozenset({FLOAT32, np.dtype("float16"), np.dtype(jnp.bfloat16)})
"""The dtypes that autocast moves between. float64, complex, integers, float8 and keys pass untouched (S2)."""


class Traits(NamedTuple):
    """Where a value comes from.

    Attributes:
        weak: a scalar that takes the dtype of what it meets, as a Python number does.
        product: made by an operation of the compute list, then perhaps moved: a bias added to it belongs to it.
        layer: of a product, path of the module whose parameter it was made with; "" where it was made with an input or
            constant of no known module, None where with neither.
        leaf: an input or constant of the program, then perhaps moved.
        rank: of a leaf, the least number of axes that it had while it was moved.
        owner: path of the module whose parameter it is.
        raised: the program itself raised it from 16 bits, as JAX's own sum and mean do.
        sensitive: raised, and then the operand of a sensitive operation: lowering it again would undo S4.
    """

    weak: bool = False
    product: bool = False
    layer: str | None = None
    leaf: bool = False
    rank: int = 0
    owner: str | None = None
    raised: bool = False
    sensitive: bool = False


NO_TRAITS: Final = Traits()


class Constant(NamedTuple):
    """A number known while tracing, perhaps broadcast: it has no dtype until an operation asks for one.

    Attributes:
        number: its value in the declared dtype.
        shape: shape of the array it stands for.
        build: the array, given a dtype.
    """

    number: Any
    shape: tuple[int, ...]
    build: Callable[[Any], Any]

    def fits(self, dtype: Any) -> bool:
        """False where the dtype would turn the number into an infinity or into zero."""
        number = np.float64(self.number)
        if not np.isfinite(number) or number == 0 or dtype == FLOAT32:
            return True
        limits = jnp.finfo(dtype)
        return bool(float(limits.smallest_subnormal) <= abs(number) <= float(limits.max))


class Value:
    """One variable's value.

    An array of at most one of them is made per dtype: several operations share the cast of an activation. The casts of
    a leaf are not shared, so that gradients of a parameter with several uses are summed in float32 (XLA merges the
    casts themselves).
    """

    __slots__ = ("_array", "_casts", "constant", "declared", "traits")

    def __init__(self, array: Any, declared: Any, traits: Traits = NO_TRAITS, constant: Constant | None = None) -> None:
        self._array = array
        self._casts: dict[Any, Any] = {}
        self.declared = declared
        self.traits = traits
        self.constant = constant

    @property
    def castable(self) -> bool:
        return self.dtype in CASTABLE

    @property
    def narrow(self) -> bool:
        """Whether it is an array of 16 bits."""
        return self.constant is None and self.castable and self.dtype != FLOAT32

    @property
    def wide(self) -> Any:
        """The float32 copy of a 16-bit array, where it was made already; or None."""
        return self._casts.get(FLOAT32)

    @property
    def dtype(self) -> Any:
        """The dtype it has; of a constant the declared one; None for what has no dtype (references, tokens)."""
        return self.declared if self.constant is not None else getattr(self._array, "dtype", None)

    @property
    def widens(self) -> bool:
        """Whether it takes part when the widest dtype is sought."""
        return self.castable and self.constant is None and not self.traits.weak

    def array(self, dtype: Any = None, note: Callable[[Any, Any], None] | None = None) -> Any:
        """The array, in `dtype` if one is given; `note` hears of a cast."""
        if self.constant is not None:
            return self.constant.build(dtype or self.declared)
        if dtype is None or self._array.dtype == dtype:
            return self._array
        made = self._casts.get(dtype)
        if made is None:
            if note is not None:
                note(self._array.dtype, dtype)
            made = jax.lax.convert_element_type(self._array, dtype)
            if not self.traits.leaf:
                self._casts[dtype] = made
        return made

    def inside(self, array: Any) -> Value:
        """This value as an inner function sees it: `array` in place of its own, the casts made anew there."""
        return Value(array, self.declared, self.traits, self.constant)

    def widened(self, array: Any) -> Value:
        """This value of 16 bits as an inner function sees it that is given `array`, the same in float32."""
        made = self.inside(jax.lax.convert_element_type(array, self._array.dtype))
        made._casts[FLOAT32] = array
        return made

    def part(self, array: Any) -> Value:
        """A slice or a shard of this value, as an inner function sees it: of a constant no longer the whole."""
        if self.constant is not None:
            weak = all(self.constant.fits(dtype) for dtype in CASTABLE) and array.ndim == 0
            return Value(array, self.declared, Traits(weak=weak))
        rank = self.traits.rank - (self._array.ndim - array.ndim)
        return Value(array, self.declared, self.traits._replace(rank=rank))

    def shown(self, mark: Any, params: Mapping[str, Any]) -> Value:
        """This value, marked, where it is an output; of a constant, which has no dtype of its own, what it is now."""
        made = mark.bind(self.array(), **params)
        keeps = self.constant is not None or params["what"] != "output"
        return self if keeps else Value(made, self.declared, self.traits)

    def key(self) -> Any:
        """What an inner function's trace depends on beside the array's type."""
        return self.traits, None if self.constant is None else (str(self.constant.number), self.declared)


def literal(number: Any, declared: Any) -> Value:
    """The value of a number in the program text."""
    scalar = np.asarray(number)

    def build(dtype: Any) -> Any:
        return scalar.astype(dtype)

    return Value(None, declared, Traits(weak=True), Constant(scalar[()], (), build))
