"""`TorchFloat8Probe`: products in 8 bits of a torch model, and their programs for the doctor (`Float8Probe`)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from polyamp.doctor.float8_probe import Float8Probe, ModelProduct, ModelProducts, ProductPrograms, ProductShape
from polyamp.errors import UnsupportedError
from polyamp.recipe.float8 import Float8
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_torch.arrays import to_device
from polyamp_torch.observe.torch_only.casting_reports import count_operations
from polyamp_torch.precision.policy_module import PolicyModule, module_device, wrapped_module
from polyamp_torch.precision.torch_only.float8_products import Product, float8_rule, multiplies_float8, multiply
from polyamp_torch.precision.torch_only.keras_layers import is_keras_model
from polyamp_torch.precision.torch_only.op_rules_mode import RUNNING_RULE

_PRODUCTS: Final = frozenset({"mm", "scaled_mm"})
"""Operations that multiply two matrices of 8-bit numbers, emulated and not."""


class TorchFloat8Probe:
    """`Float8Probe` for torch."""

    always_compiles = False

    def multiplies_float8(self, device: str) -> bool:
        return multiplies_float8(torch.device(device).type)

    def products(self, target: Any, policy: Policy, *inputs: Any) -> ModelProducts:
        if any(map(is_keras_model, (target, *inputs))):
            return _keras_products(target, policy, inputs)
        counter, _ = count_operations(target, policy, inputs, _ProductCounter, compiled=False)
        given = [wrapped_module(each) if isinstance(each, PolicyModule) else each for each in (target, *inputs)]
        name = _device_name(next(each for each in given if isinstance(each, nn.Module)))
        found = [ModelProduct(*key, count) for key, count in counter.found.items()]
        return ModelProducts(name, found, self.programs)

    def programs(self, shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
        narrow = functools.partial(_narrow_product, rule=float8_rule(float8))
        functions = [_compiled(function) if compiled else function for function in (_wide, narrow)]
        return _programs(functions, shape, (shape.outputs, shape.inputs), device)


def _keras_products(target: Any, policy: Policy, inputs: tuple[Any, ...]) -> ModelProducts:
    """Return the products of a Keras model."""
    from polyamp_keras.observe import layer_products as layers  # imports Keras

    given = layers.read_pass("float8_plan", target, inputs)
    batch = to_device(given.batch, module_device(given.model), policy.param)
    found = layers.layer_products(given._replace(batch=batch), policy)
    return ModelProducts(_device_name(given.model), found, _keras_programs)


def _keras_programs(shape: ProductShape, float8: Float8, device: str, *, compiled: bool) -> ProductPrograms:
    """Return the programs of a product of a Keras layer (`MakePrograms`).

    Raises:
        UnsupportedError: `compiled`.
    """
    from polyamp_keras.observe.layer_products import product_functions  # imports Keras

    if compiled:
        raise UnsupportedError(
            "float8_plan(compiled=True): torch's compiler does not trace the layers of Keras, so a step of a Keras "
            "model on torch runs eagerly. Leave compiled= out."
        )
    return _programs(product_functions(float8), shape, (shape.inputs, shape.outputs), device)


def _device_name(model: nn.Module) -> str:
    device = module_device(model)
    return "cpu" if device.type == "cpu" else str(torch.empty(0, device=device).device)


def _programs(
    functions: Iterable[Callable[..., torch.Tensor]], shape: ProductShape, sizes: tuple[int, int], device: str
) -> ProductPrograms:
    """Return the programs of two functions of an activation and a parameter, which has these sizes."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    x = random(shape.rows, shape.inputs).bfloat16().requires_grad_()
    w = random(*sizes).requires_grad_()
    cotangent = random(shape.rows, shape.outputs).bfloat16()
    return ProductPrograms(*(_repeat(function, x, w, cotangent) for function in functions))


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
