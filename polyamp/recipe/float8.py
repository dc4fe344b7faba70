"""`Float8`: settings of products in 8 bits (S36), and the names of heads, which stay in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Final

from polyamp.errors import PolicyError, PolyampError, did_you_mean
from polyamp.records import Record

FLOAT8_OVERRIDE: Final = "float8"
"""Value of `Policy.overrides` for a module whose products run in 8 bits, such as a head."""
FLOAT8_COMPUTE: Final = "bfloat16"
"""Compute dtype of a policy with products in 8 bits: the dtype of all other operations."""
ACTIVATION_FORMAT: Final = "float8_e4m3fn"
"""Format of activations and parameters."""
LARGEST_EXPONENTS: Final = {"float8_e5m2": 15, "float8_e4m3fn": 8}
"""Format -> exponent of its largest number, which is 1.75 times that power of two in both."""
GRADIENT_FORMATS: Final = tuple(LARGEST_EXPONENTS)
LARGEST_SCALE_EXPONENT: Final = 100
"""With it, float32's subnormal numbers round to 0 in both formats; devices that flush them agree with those that do
not."""
BLOCK: Final = 32
"""Numbers along the contracted axis that share a scale with "block32", as in the MX formats."""
SCALINGS: Final = {"tensor": 16, "row": 16, "block32": BLOCK}
"""Scaling -> number of which a parameter's sizes are multiples in a product in 8 bits: 16 as in tensor cores."""
HEAD_NAMES: Final = frozenset({"head", "lm_head", "output", "logits", "classifier", "predictions"})
"""Last path segments of modules that stay in the compute dtype, unless an override says "float8"."""
SECOND_DERIVATIVES: Final = (
    "float8: gradients of a product in 8 bits have no gradients of their own, as a gradient penalty needs. Keep the "
    "modules that are differentiated twice in bfloat16: Policy('mixed_float8', overrides={'critic/**': 'bfloat16'})."
)
"""Message of the error in a gradient of the gradients."""
_REFUSED_SCALINGS: Final = {
    "delayed": "it scales by the largest values of earlier steps, so that a step depends on its history, and values "
    "that grow are cut",
}


class Float8(Record, kw_only=True):
    """Products of activations with parameters in 8 bits (S36), with scales from the tensors themselves.

    Args:
        gradients: format of the gradients that enter the two backward products: "float8_e5m2" or "float8_e4m3fn".
            Activations and parameters are in "float8_e4m3fn".
        scaling: what has a scale of its own, a power of two from its largest magnitude now: "tensor"; "row", the
            numbers that are summed to one number of a product; or "block32", 32 of those numbers, as in MXFP8. The last
            two are emulated only.
        emulate: True to compute the products of the same 8-bit numbers in float32, on any device.

    Raises:
        PolicyError: another format or scaling; scales of rows or blocks without `emulate`.

    Example:
        >>> from polyamp import Float8, Policy
        >>> Policy("mixed_float8", float8=Float8(emulate=True)).float8
        Float8(emulate=True)
    """

    word: ClassVar[str] = "float8"
    error: ClassVar[type[PolyampError]] = PolicyError

    gradients: str = "float8_e5m2"
    scaling: str = "tensor"
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.gradients not in GRADIENT_FORMATS:
            raise PolicyError(
                f"float8.gradients must be one of {', '.join(GRADIENT_FORMATS)}. Received: {self.gradients!r}."
                f"{did_you_mean(str(self.gradients), GRADIENT_FORMATS)}"
            )
        if not isinstance(self.scaling, str) or self.scaling not in SCALINGS:
            reason = _REFUSED_SCALINGS.get(str(self.scaling))
            raise PolicyError(
                f"float8.scaling must be one of {', '.join(SCALINGS)}. Received: {self.scaling!r}"
                + (f": {reason}." if reason else "." + did_you_mean(str(self.scaling), SCALINGS))
            )
        if not isinstance(self.emulate, bool):
            raise PolicyError(f"float8.emulate must be True or False. Received: {self.emulate!r}.")
        if self.scaling != "tensor" and not self.emulate:
            raise PolicyError(
                f"float8.scaling={self.scaling!r} needs emulate=True: this version has no product on a device with "
                f"scales of {'rows' if self.scaling == 'row' else 'blocks'}. Received: emulate=False. Use "
                f"Float8(scaling={self.scaling!r}, emulate=True) to compute the products of the 8-bit numbers in "
                "float32, or Float8(), which has one scale per tensor."
            )


def parse_float8(value: Any) -> Float8 | None:
    """Return the `float8` argument of a policy as a `Float8` or None.

    Raises:
        PolicyError: neither a `Float8`, nor its fields by name, nor None.
    """
    if value is None or isinstance(value, Float8):
        return value
    if isinstance(value, dict):
        return Float8(**value)
    raise PolicyError(
        f"float8 must be a polyamp.Float8, its fields by name, or None. Received: {value!r}. Policy('mixed_float8') "
        "has its defaults."
    )


def accepts_sizes(sizes: Iterable[int], scaling: str) -> bool:
    """Return whether a parameter's contracted and other size are those of products in 8 bits.

    >>> accepts_sizes((64, 48), "row"), accepts_sizes((64, 48), "block32")
    (True, False)
    """
    return not any(size % SCALINGS[scaling] for size in sizes)


def head_paths(paths: Iterable[str]) -> list[str]:
    """Return the paths whose last segment names a head.

    >>> head_paths(["", "body", "body/output", "lm_head"])
    ['body/output', 'lm_head']
    """
    return [path for path in paths if path.rpartition("/")[2] in HEAD_NAMES]
