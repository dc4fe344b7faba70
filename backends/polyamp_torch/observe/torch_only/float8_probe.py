"""`TorchFloat8Probe`: products in 8 bits of a torch model, and their programs for the doctor (`Float8Probe`)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from polyamp.doctor.float8_probe import Float8Probe, ModelProduct, ModelProducts, ProductPrograms, ProductShape
from polyamp.recipe.float8 import Float8
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_torch.observe.torch_only.casting_reports import count_operations
from polyamp_torch.precision.policy_module import PolicyModule, module_device, wrapped_module
from polyamp_torch.precision.torch_only.float8_products import Product, float8_rule, multiplies_float8, multiply
from polyamp_torch.precision.torch_only.op_rules_mode import RUNNING_RULE

_PRODUCTS: Final = frozenset({"mm", "scaled_mm"})
"""Operations that multiply two matrices of 8-bit numbers, emulated and not."""


class TorchFloat8Probe:
    """`Float8Probe` for torch."""

    always_compiles = False

    def multiplies_float8(self, device: str) -> bool:
        return multiplies_float8(torch.device(device).type)

    def products(self, target: Any, policy: Policy, *inputs: Any) -> ModelProducts:
        counter, _ = count_operations(target, policy, inputs, _ProductCounter, compiled=False)
        given = [wrapped_module(each) if isinstance(each, PolicyModule) else each for each in (target, *inputs)]
        device = module_device(next(each for each in given if isinstance(each, nn.Module)))
        name = "cpu" if device.type == "cpu" else str(torch.empty(0, device=device).device)
        return ModelProducts(name, [ModelProduct(*key, count) for key, count in counter.found.items()])

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        generator = torch.Generator().manual_seed(0)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(device)

        x = random(shape.rows, shape.inputs).bfloat16().requires_grad_()
        w = random(shape.outputs, shape.inputs).requires_grad_()
        cotangent = random(shape.rows, shape.outputs).bfloat16()
        narrow = functools.partial(_narrow_product, rule=float8_rule(float8))
        return ProductPrograms(
            *(_repeat(_compiled(function) if compiled else function, x, w, cotangent) for function in (_wide, narrow))
        )


class _ProductCounter:
    """Counts the products in 8 bits of a forward pass, by module and shape. It needs no policy."""

    def __init__(self, plan: ResolvedPolicy) -> None:
        self.found: Counter[tuple[str, ProductShape]] = Counter()

    def count(self, func: Any, inputs: Any, outputs: Any, module: str, direction: str) -> None:
        if (
            direction == "forward"
            and RUNNING_RULE.word == "float8"
            and func.overloadpacket.__name__.strip("_") in _PRODUCTS
        ):
            (rows, contracted), (_, outputs_) = (each.shape for each in inputs[0][:2])
            self.found[module, ProductShape(rows, contracted, outputs_)] += 1


def _wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, w.to(x.dtype))


def _narrow_product(x: torch.Tensor, w: torch.Tensor, *, rule: str) -> torch.Tensor:
    return multiply(Product(x, w, None), x.dtype, rule)


def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    made: Callable[..., torch.Tensor] = torch.compile(function, dynamic=False)
    return made


def _repeat(
    function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, cotangent: torch.Tensor
) -> Callable[[int], None]:
    def run(count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(function(x, w), (x, w), cotangent)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    return run


FLOAT8_PROBE: Final[Float8Probe] = TorchFloat8Probe()
