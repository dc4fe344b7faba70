"""Products in 8 bits beside torchao's (S36): scales, 8-bit numbers, one layer's result and gradients, on a CPU.

    pip install --no-deps torchao
    python benchmarks/float8_torchao.py [--tensors 400]

torchao rounds its scales to powers of two (`round_scales_to_power_of_2`) and emulates the products, as polyamp does
here. It quantizes a float32 weight at once; polyamp rounds it to bfloat16 first. So the layer is compared twice, with a
weight of bfloat16 numbers and with any weight. torchao: https://github.com/pytorch/ao, release 0.18.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import numpy as np
import torch
from torch import nn

import polyamp
from polyamp.reference import float8

DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
POLICY = polyamp.Policy("mixed_float8", float8=polyamp.Float8(emulate=True)).replace(output="bfloat16")


def differing_tensors(count: int) -> int:
    """Return how many of `count` bfloat16 tensors have another scale or another 8-bit number in torchao."""
    scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
    tensors = importlib.import_module("torchao.float8.float8_training_tensor")
    setup = tensors.LinearMMConfig(*[tensors.ScaledMMConfig(True, False, False, False)] * 3)
    rng, found = np.random.default_rng(0), 0
    for number in range(count):
        form = list(DTYPES)[number % 2]
        values = rng.standard_normal((16, 32)) * 2.0 ** rng.integers(-30, 30)
        x = torch.from_numpy(values).to(torch.bfloat16)
        other = scaling.hp_tensor_to_float8_dynamic(x, DTYPES[form], setup, round_scales_to_power_of_2=True)
        own = float8.quantize(x.float().numpy(), form)
        same = np.array_equal(other._data.view(torch.uint8).numpy(), own.numbers.view(np.uint8))
        found += not (same and int(np.log2(float(other._scale))) == own.exponent)
    return found


def layer(weight: torch.Tensor, *, torchao: bool) -> list[torch.Tensor]:
    """Return the result of a linear layer of 64 to 128 on 32 rows, and its gradients by the input and the weight."""
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(32, size, generator=generator).to(torch.bfloat16) for size in (64, 128))
    model: Any = nn.Sequential(nn.Linear(64, 128, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    x.requires_grad_()
    if torchao:
        made = importlib.import_module("torchao.float8")
        config = made.Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True)
        model = made.convert_to_float8_training(model, config=config)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
    else:
        out = POLICY.autocast(model)(x)
    out.backward(g)
    assert x.grad is not None
    return [out.detach(), x.grad, model[0].weight.grad]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=400)
    count = parser.parse_args().tensors
    print(f"scales and 8-bit numbers: {differing_tensors(count)} of {count} tensors differ")
    weight = 0.1 * torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
    for kind, each in (("bfloat16 numbers", weight.to(torch.bfloat16).float()), ("float32 numbers", weight)):
        pairs = zip(("y", "dx", "dw"), layer(each, torchao=False), layer(each, torchao=True), strict=True)
        rows = [f"{name} {int((own != other).sum())} of {own.numel()}" for name, own, other in pairs]
        print(f"a layer with a weight of {kind}: {', '.join(rows)} differ")


if __name__ == "__main__":
    main()
