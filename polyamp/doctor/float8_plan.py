"""`float8_plan`: measures which layers of a model are faster in 8 bits than in bfloat16."""

from __future__ import annotations

import math
from typing import Any

from polyamp import backend_lookup as lookup
from polyamp.contract import registry
from polyamp.doctor.float8_plan_data import decide_layers
from polyamp.doctor.float8_plan_report import Float8PlanReport
from polyamp.doctor.float8_probe import HasFloat8Probe
from polyamp.doctor.float8_times import limits_of, measure_product
from polyamp.doctor.probe import HasCapabilityProbe, ProbeDevice
from polyamp.errors import ArgumentError, ModelError, UnsupportedError
from polyamp.recipe.policy import Policy


def float8_plan(
    target: Any,
    policy: Policy | str,
    *inputs: Any,
    compiled: bool = False,
    least_speed: float = 1.0,
    backend: str | None = None,
) -> Float8PlanReport:
    """Measure which layers of a model are faster in 8 bits than in bfloat16, on the model's device (S36).

    The products that run in 8 bits are found in one forward pass. Each of their shapes is then measured: three products
    in bfloat16 against three in 8 bits with their quantization. `report.recipe(recipe)` keeps the slower layers in
    bfloat16. Emulated products decide nothing.

    Args:
        target: a model, with its inputs; or `loss_fn`, with `model, batch` as inputs, as for `polyamp.explain`.
        policy: the policy: "mixed_float8", or one with other settings or overrides.
        *inputs: the arguments. The number of rows decides: give a batch of the size that you train with.
        compiled: measure compiled products, for a torch model that you compile. JAX compiles in any case.
        least_speed: speed relative to bfloat16 from which on a layer runs in 8 bits.
        backend: its name, if neither the target nor the inputs determine it.

    Raises:
        ModelError: a training state in place of its model.
        ArgumentError: a policy without products in 8 bits, or a `least_speed` that is no positive number.
        UnsupportedError: the backend has no products in 8 bits, or the device has none and the policy does not emulate
            them.

    Example:
        >>> import torch, polyamp
        >>> policy = polyamp.Policy("mixed_float8", float8=polyamp.Float8(emulate=True))
        >>> report = polyamp.float8_plan(torch.nn.Linear(32, 16), policy, torch.ones(8, 32))
        >>> [(row.module, row.shape, row.count, row.decision) for row in report.layers], report.emulated
        ([('', ProductShape(rows=8, inputs=32, outputs=16), 1, 'none')], True)
    """
    for given in (target, *inputs):
        if hasattr(given, "scale_state"):
            raise ModelError(
                f"float8_plan takes a model. Received: a {type(given).__name__}. Pass its model: state.model."
            )
    if isinstance(least_speed, bool) or not isinstance(least_speed, int | float) or not 0 < least_speed < math.inf:
        raise ArgumentError(f"least_speed must be a positive number, such as 1.1. Received: {least_speed!r}.")
    chosen_policy = Policy.of(policy)
    float8 = chosen_policy.float8
    if float8 is None:
        raise ArgumentError(
            f"policy must have products in 8 bits. Received: {chosen_policy}. Use Policy('mixed_float8')."
        )
    chosen = registry.get(backend) if backend is not None else lookup.backend_of_call(target, inputs)
    name = chosen.name
    if not isinstance(chosen, HasFloat8Probe) or not isinstance(chosen, HasCapabilityProbe):
        raise UnsupportedError(f"float8_plan: the {name} backend of this version measures no products in 8 bits.")
    probe = chosen.float8_probe
    found = probe.products(target, chosen_policy, *inputs)
    unlisted = ProbeDevice(found.device, found.device.partition(":")[0], found.device)
    device = next((each for each in chosen.capability_probe.devices() if each.name == found.device), unlisted)
    limits = limits_of(device.kind)
    times = {
        shape: measure_product(found.programs, shape, float8, device.name, compiled=compiled, limits=limits)
        for shape in dict.fromkeys(product.shape for product in found.products)
    }
    return Float8PlanReport(
        backend=name,
        policy=str(chosen_policy),
        device=device.name,
        device_label=device.label,
        emulated=float8.emulate,
        compiled=compiled or probe.always_compiles,
        least_speed=float(least_speed),
        layers=decide_layers(found.products, times, emulated=float8.emulate, least_speed=least_speed),
    )
