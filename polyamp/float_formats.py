"""The table of floating-point formats: name, bits, range and roundoff of each, and its other spellings.

A new format is one row here. Backends make their tables from it, except where a framework lists what it casts. No
framework is imported: a framework's own dtype object is recognised by its name.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from polyamp.errors import PolicyError, did_you_mean


class FloatFormat(NamedTuple):
    """One format of binary floating-point numbers.

    Attributes:
        name: canonical name, that of NumPy and ml_dtypes.
        bits: size of an element.
        exponent_bits: of these, the exponent.
        fraction_bits: stored bits of the significand.
        aliases: other spellings that a user may write; the first is that of XLA's programs and, in capitals, of
            safetensors files.
        needs_scale: whether the range is so small that gradients need a loss scale.
        complex_name: dtype of complex numbers whose parts have this format; "" where there is none.
        in_numpy: whether NumPy has it by itself, and not from ml_dtypes.

    Example:
        >>> FORMATS["float16"].largest, FORMATS["bfloat16"].unit_roundoff
        (65504.0, 0.00390625)
    """

    name: str
    bits: int
    exponent_bits: int
    fraction_bits: int
    aliases: tuple[str, ...]
    needs_scale: bool = False
    complex_name: str = ""
    in_numpy: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of an element."""
        return self.bits // 8

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest."""
        return 2.0 ** -(self.fraction_bits + 1)

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return float((2 - 2.0**-self.fraction_bits) * 2.0**self._largest_exponent)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with all bits of the significand."""
        return 2.0 ** (1 - self._largest_exponent)

    @property
    def _largest_exponent(self) -> int:
        return int(2 ** (self.exponent_bits - 1) - 1)


FORMATS: Final = {
    each.name: each
    for each in (
        FloatFormat("float16", 16, 5, 10, ("f16", "fp16", "half"), needs_scale=True),
        FloatFormat("bfloat16", 16, 8, 7, ("bf16",), in_numpy=False),
        FloatFormat("float32", 32, 8, 23, ("f32", "fp32", "single", "full"), complex_name="complex64"),
        FloatFormat("float64", 64, 11, 52, ("f64", "fp64", "double"), complex_name="complex128"),
    )
}
"""Canonical name -> format."""
FLOAT_DTYPES: Final = tuple(FORMATS)
"""Names of all formats."""
HALF_DTYPES: Final = tuple(each.name for each in FORMATS.values() if each.bits == 16)
"""Names of the 16-bit formats."""
ML_DTYPES: Final = tuple(each.name for each in FORMATS.values() if not each.in_numpy)
"""Names of the formats that NumPy gets from ml_dtypes, under the same names."""
COMPLEX_DTYPES: Final = {each.name: each.complex_name for each in FORMATS.values() if each.complex_name}
"""Name of a format -> dtype of complex numbers with parts in it."""
DTYPE_ALIASES: Final = {word: each.name for each in FORMATS.values() for word in (each.name, *each.aliases)}
"""Spelling -> canonical name."""


def canonical_dtype(dtype: Any, *, argument: str) -> str:
    """Return the canonical name of a floating dtype, given by name or as a framework's dtype object.

    Args:
        dtype: a name ("bf16"), or any object whose name ends in one (`torch.bfloat16`, `jnp.float16`, `tf.float32`).
        argument: name of the caller's argument, for the message.

    Raises:
        PolicyError: the table has no match.

    >>> canonical_dtype("bf16", argument="compute")
    'bfloat16'
    """
    name = dtype if isinstance(dtype, str) else framework_dtype_name(dtype)
    found = DTYPE_ALIASES.get(name)
    if found is None:
        raise PolicyError(
            f"{argument} must be one of {', '.join(sorted(set(DTYPE_ALIASES.values())))} (or an alias such as 'bf16'). "
            f"Received: {argument}={dtype!r}.{did_you_mean(name, DTYPE_ALIASES)}"
        )
    return found


def framework_dtype_name(dtype: Any) -> str:
    """Return the name of a framework's dtype object: "bfloat16" for `torch.bfloat16`; any text for other values."""
    for attribute in ("name", "__name__"):
        name = getattr(dtype, attribute, None)
        if isinstance(name, str):
            return name
    return str(dtype).rpartition(".")[2]
