"""Products of activations with parameters in 8 bits (S36): which calls they are, and their forward and backward pass.

`op_rules_mode` applies them like the rules of `Policy.op_rules`. What is saved of an activation is 8-bit numbers: those
of the forward product, or with scales of rows or blocks those of the backward product, which sums over another axis.
torch.compile traces all of it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.recipe.float8 import (
    ACTIVATION_FORMAT,
    BLOCK,
    FLOAT8_OVERRIDE,
    GRADIENT_FORMATS,
    LARGEST_EXPONENTS,
    LARGEST_SCALE_EXPONENT,
    SCALINGS,
    SECOND_DERIVATIVES,
    Float8,
    accepts_sizes,
)
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, is_sharded
from polyamp_torch.compat import TorchAutocast, assume_constant_result
from polyamp_torch.precision.torch_only.compat import scaled_product
from polyamp_torch.precision.torch_only.float8_watch import FigureSink, find_watch, rounding_sums
from polyamp_torch.precision.torch_only.open_blocks import running_override

FLOAT8_RULES: Final = {
    f"{form} {scaling}{' emulated' if emulate else ''}": (form, scaling, emulate)
    for form, scaling, emulate in itertools.product(GRADIENT_FORMATS, SCALINGS, (False, True))
}
"""Internal rule of an operation -> format of its gradients, scaling, and whether float32 computes the products."""
_OPERATIONS: Final = ("addmm", "linear", "matmul", "mm")
"""torch's functions that multiply an activation with a matrix, under the names of `op_rules`."""
_DTYPES: Final = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_OPERAND_DTYPES: Final = (torch.float32, *HALF_TENSOR_DTYPES)
_NATIVE_CAPABILITY: Final = (8, 9)
"""Compute capability from which NVIDIA's GPUs multiply 8-bit floats (docs.nvidia.com/cuda, "Compute Capabilities")."""


class Product(NamedTuple):
    """An activation times a parameter.

    Attributes:
        x: the activation; its last axis is contracted.
        w: the parameter as a matrix, (outputs, inputs).
        bias: added afterwards, or None.
        swapped: whether the result is that of the parameter times the activation: it is transposed.
        parameter: the parameter itself, which `w` may be a view of; None if no module owns it.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    swapped: bool = False
    parameter: torch.Tensor | None = None


class Codes(NamedTuple):
    """A tensor in 8 bits: `numbers / 2 ** exponent`.

    Attributes:
        numbers: 8-bit floats.
        exponent: int32: a scalar, or one for each row (an axis of size 1) or each block of 32 numbers of a matrix.
    """

    numbers: torch.Tensor
    exponent: torch.Tensor

    def t(self) -> Codes:
        """Return the codes of the transposed matrix."""
        return Codes(self.numbers.t(), self.exponent.t())


@assume_constant_result
def region_rules(float8: Float8 | None, device_type: str, rules: tuple[tuple[str, str], ...]) -> Any:
    """Return the rules of a region: those of the policy, and the products in 8 bits, which they may change.

    Raises:
        UnsupportedError: the device has no such products.
    """
    if float8 is None:
        return rules
    check_device(float8, device_type)
    rule = float8_rule(float8)
    return (*((name, rule) for name in _OPERATIONS), *rules)


def float8_rule(float8: Float8) -> str:
    """Return the internal rule of products with these settings, one of `FLOAT8_RULES`."""
    return f"{float8.gradients} {float8.scaling}{' emulated' if float8.emulate else ''}"


def is_same_but_float8(one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]) -> bool:
    """Return whether two regions' rules differ in products in 8 bits only."""
    return without_float8(one) == without_float8(other)


def without_float8(rules: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the rules that are the policy's `op_rules`."""
    return tuple([each for each in rules if each[1] not in FLOAT8_RULES])


def check_device(float8: Float8 | None, device_type: str) -> None:
    """Reject products in 8 bits on a device that has none (S20, S36).

    Raises:
        UnsupportedError: there are none, and the policy does not emulate them.
    """
    if float8 is None or float8.emulate or device_type == "meta" or multiplies_float8(device_type):
        return  # a model on "meta" has no arrays yet; its regions ask again
    raise UnsupportedError(
        f"float8: this device ({device_type!r}) multiplies no 8-bit floats; NVIDIA's GPUs of compute capability 8.9 "
        "and later do. Use Policy('mixed_float8', float8=polyamp.Float8(emulate=True)) to compute the same 8-bit "
        "numbers' products in float32, or Policy('mixed_bfloat16')."
    )


def multiplies_float8(device_type: str) -> bool:
    """Return whether the devices of a type multiply 8-bit floats."""
    return (
        device_type == "cuda"
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability() >= _NATIVE_CAPABILITY
    )


def find_product(name: str, rule: str, device_type: str, args: Any, kwargs: dict[str, Any]) -> Product | None:
    """Return the product of a call that runs in 8 bits under an internal rule, or None (S36)."""
    if torch.compiler.is_compiling() and running_override() not in (None, FLOAT8_OVERRIDE):
        return None  # the region of a module is not always traced; see `op_rules_mode.check_traced_rules`
    if kwargs.get("out") is not None or kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        return None
    left, right, bias = _operands(name, args, kwargs)
    tensors = (left, right) if bias is None else (left, right, bias)
    if not all(isinstance(x, torch.Tensor) and x.dtype in _OPERAND_DTYPES for x in tensors):
        return None
    if any(x.device.type != device_type for x in tensors) or not left.dim():
        return None
    if not left.numel() or not right.numel():
        return None
    if name == "linear":
        found = Product(left, right, bias)
    elif _is_matrix(right):
        found = Product(left, right.t(), bias)
    elif _is_matrix(left) and right.dim() == 2 and bias is None:
        return _checked(Product(right.t(), left, None, swapped=True), left, rule)
    else:
        return None
    return _checked(found, right, rule)


def _operands(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the operands of a product, and its bias or None."""
    if name == "addmm":
        names = ("input", "mat1", "mat2")
        bias, left, right = (*args, *(kwargs.get(key) for key in names[len(args) :]))[:3]
        return left, right, bias
    second = {"linear": "weight", "matmul": "other", "mm": "mat2"}[name]
    left = args[0] if args else kwargs.get("input")
    right = args[1] if len(args) > 1 else kwargs.get(second)
    bias = (args[2] if len(args) > 2 else kwargs.get("bias")) if name == "linear" else None
    return left, right, bias


def _is_matrix(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.dim() == 2


def _checked(found: Product, parameter: torch.Tensor, rule: str) -> Product | None:
    """Return a product if the parameter is a matrix with sizes that products in 8 bits accept.

    Raises:
        UnsupportedError: the parameter is sharded over processes, and so is the product.
    """
    _, scaling, _ = FLOAT8_RULES[rule]
    if not _is_matrix(parameter) or not accepts_sizes(parameter.shape, scaling):
        return None
    if is_sharded(parameter) or is_sharded(found.x):
        raise UnsupportedError(
            "float8: a product of tensors that are sharded over processes (DTensor) has no scale of the whole tensor "
            "in this version. Shard with polyamp_torch.fully_shard or DDP, or use Policy('mixed_bfloat16')."
        )
    return found._replace(parameter=parameter)


def multiply(product: Product, dtype: torch.dtype, rule: str) -> torch.Tensor:
    """Return a product in the compute dtype, with autocast off."""
    x, w, bias, swapped, parameter = product
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    watch = None if torch.compiler.is_compiling() else find_watch(parameter)
    out = _Product.apply(rows, w, dtype, rule, torch.is_grad_enabled(), watch)[0]  # type: ignore[no-untyped-call]  # torch does not annotate apply
    if bias is not None:
        out = out + bias.to(dtype)
    shaped: torch.Tensor = out.reshape(*x.shape[:-1], w.shape[0])
    return shaped.t() if swapped else shaped


class _Product(torch.autograd.Function):
    """Rows times a matrix: y = q(x) q(w)ᵀ, dx = q(g) q(w), dw = q(g)ᵀ q(x).

    `torch.func` differentiates a function only if what it saves is an output.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, rule: str, saves: bool, watch: FigureSink | None
    ) -> Any:
        _, scaling, emulate = FLOAT8_RULES[rule]
        w = w.to(dtype)
        left, right = (quantize(each, ACTIVATION_FORMAT, scaling, axis=1) for each in (x, w))
        out = _multiply_codes(left, right.t(), dtype, scaling, emulate=emulate)
        pairs = ((x, left), (w, right))
        figures = [] if watch is None else [torch.stack([_rounding_sums(*pair, scaling) for pair in pairs])]
        if saves and scaling != "tensor":  # the backward products sum over the other axes
            left, right = (quantize(each, ACTIVATION_FORMAT, scaling, axis=0) for each in (x, w))
        return out, *left, *right, *figures

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, w, dtype, rule, _, watch = inputs
        ctx.save_for_backward(*output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.settings = dtype, rule, w.dtype
        ctx.watch = watch

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, *_: Any) -> Any:
        x, x_exponent, w, w_exponent, *figures = ctx.saved_tensors
        dtype, rule, master = ctx.settings
        gradients, scaling, emulate = FLOAT8_RULES[rule]
        with TorchAutocast(g.device.type, enabled=False):
            codes = dx = dw = None
            if ctx.watch is not None:
                codes = quantize(g, gradients, scaling, axis=1)
                ctx.watch(torch.cat([*figures, _rounding_sums(g, codes, scaling)[None]]))
            if ctx.needs_input_grad[0]:
                codes = quantize(g, gradients, scaling, axis=1) if codes is None else codes
                dx = _multiply_codes(codes, Codes(w, w_exponent), dtype, scaling, emulate=emulate)
            if ctx.needs_input_grad[1]:
                if codes is None or scaling != "tensor":
                    codes = quantize(g, gradients, scaling, axis=0)
                dw = _multiply_codes(codes.t(), Codes(x, x_exponent), dtype, scaling, emulate=emulate).to(master)
        if torch.is_grad_enabled():  # the backward pass makes a graph
            dx, dw = (None if each is None else _NoSecondDerivative.apply(each) for each in (dx, dw))  # type: ignore[no-untyped-call]  # torch does not annotate apply
        return dx, dw, None, None, None, None


def _rounding_sums(x: torch.Tensor, codes: Codes, scaling: str) -> torch.Tensor:
    """Return the figures of an operand whose rows or blocks are along axis 1."""
    exponent = codes.exponent
    return rounding_sums(x, codes.numbers, _spread(exponent, x.shape[1], 1) if scaling == "block32" else exponent)


class _NoSecondDerivative(torch.autograd.Function):
    """The identity, whose gradient is refused: that of the rounded numbers would be another one than the product's."""

    @staticmethod
    def forward(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(SECOND_DERIVATIVES)


def quantize(x: torch.Tensor, form: str, scaling: str = "tensor", *, axis: int = 1) -> Codes:
    """Return a tensor in 8 bits: times powers of two, each the largest with which its numbers fit, to nearest even.

    Numbers that share a scale with infinity or NaN become NaN (S36). Nothing is cut to the largest number.

    Args:
        x: floats, at least one: of any shape, or a matrix with scales of rows or blocks.
        form: "float8_e4m3fn" or "float8_e5m2".
        scaling: which numbers share a scale: "tensor", "row" or "block32".
        axis: the axis over which the product sums: that of the rows and blocks.
    """
    largest = _largest(x.detach().abs(), scaling, axis).to(torch.float32).view(torch.int32)
    exponent, fraction = (largest >> 23) & 0xFF, largest & 0x7FFFFF
    above = (fraction > 0x600000).to(torch.int32)  # beyond 1.75, the significand of both formats' largest number
    k = (LARGEST_EXPONENTS[form] + 127 - exponent - above).clamp(max=LARGEST_SCALE_EXPONENT)
    k = torch.where((exponent == 0) | (exponent == 0xFF), torch.zeros_like(k), k)
    scale = torch.where(exponent == 0xFF, torch.full_like(k, math.nan, dtype=torch.float32), _power_of_two(k))
    if scaling == "block32":
        scale = _spread(scale, x.shape[axis], axis)
    return Codes((x.to(torch.float32) * scale).to(_DTYPES[form]), k)


def _largest(sizes: torch.Tensor, scaling: str, axis: int) -> torch.Tensor:
    """Return the largest magnitude of the numbers that share a scale."""
    if scaling == "tensor":
        return sizes.amax()
    if scaling == "row":
        return sizes.amax(axis, keepdim=True)
    missing = -sizes.shape[axis] % BLOCK  # in the last block of a number of rows
    if missing:
        sizes = nn.functional.pad(sizes, (0, 0, 0, missing) if axis == 0 else (0, missing))
    blocks = (*sizes.shape[:axis], -1, BLOCK, *sizes.shape[axis + 1 :])
    return sizes.reshape(blocks).amax(axis + 1)


def _spread(of_blocks: torch.Tensor, size: int, axis: int) -> torch.Tensor:
    """Return the number of each block for each of the `size` elements along an axis."""
    return of_blocks.repeat_interleave(BLOCK, axis).narrow(axis, 0, size)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2 ** exponent in float32, for exponents of normal numbers."""
    return ((exponent + 127) << 23).view(torch.float32)


def _multiply_codes(left: Codes, right: Codes, dtype: torch.dtype, scaling: str, *, emulate: bool) -> torch.Tensor:
    """Return the product of two matrices of 8-bit numbers, accumulated in float32, rounded once."""
    if not emulate:
        scales = _power_of_two(-left.exponent), _power_of_two(-right.exponent)
        return scaled_product(left.numbers, right.numbers, *scales, dtype)
    if scaling == "block32":
        return (4.0 * (_half(left, 1) @ _half(right, 0))).to(dtype)
    total = left.numbers.to(torch.float32) @ right.numbers.to(torch.float32)
    exponent = left.exponent + right.exponent
    half = exponent >> 1  # two factors: their product may be outside of float32's range
    return (total * _power_of_two(-half) * _power_of_two(half - exponent)).to(dtype)


def _half(codes: Codes, axis: int) -> torch.Tensor:
    """Return the numbers divided by their blocks' scales, in float32: half of them, since the whole may be 2^128."""
    scale = _spread(_power_of_two(-codes.exponent - 1), codes.numbers.shape[axis], axis)
    return codes.numbers.to(torch.float32) * scale
