"""What a float8 plan found, as data: times of each layer's products, decisions, and `Float8PlanFindings`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from polyamp.doctor.float8_probe import ModelProduct, ProductShape
from polyamp.doctor.float8_times import ProductTime
from polyamp.recipe.float8 import FLOAT8_COMPUTE, FLOAT8_OVERRIDE

Decision = Literal["float8", "bfloat16", "none"]
LAYER_HEADING: Final = ("module", "rows x inputs x outputs", "count", "bfloat16 ms", "float8 ms", "speed", "decision")
"""Names of the cells of `layer_rows`."""
_ROOT_GLOB: Final = "*"
"""Override of a model's own parameters: it covers every module, and the override of any of them comes before it."""


class LayerProduct(ProductTime, frozen=True, kw_only=True):
    """Products of one module and one shape.

    Attributes:
        module: path of the module.
        count: number of these products in a forward pass.
        decision: what the module's products run in: "float8" or "bfloat16"; "none" where the times decide nothing.
    """

    module: str
    count: int
    decision: Decision


class Float8PlanFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What `polyamp.float8_plan` found; its public form is `Float8PlanReport`.

    Attributes:
        backend, policy: what was measured.
        device: its name in the framework ("cuda:0"); device_label: the model of an accelerator ("NVIDIA H100").
        emulated: whether the 8-bit numbers were multiplied in float32. Then the times decide nothing.
        compiled: whether compiled programs were measured. JAX always compiles.
        least_speed: speed relative to bfloat16 from which on a module runs in 8 bits.
        layers: a row for each module and shape, in the order of the program.
    """

    backend: str
    policy: str
    device: str
    device_label: str
    emulated: bool
    compiled: bool
    least_speed: float
    layers: list[LayerProduct]

    @property
    def overrides(self) -> dict[str, str]:
        """What `Policy(overrides=...)` takes so that the layers that are slower in 8 bits stay in bfloat16.

        An override covers submodules; those that run in 8 bits get "float8" back.
        """
        narrow = dict.fromkeys(row.module for row in self.layers if row.decision == "float8")
        wide = dict.fromkeys(row.module for row in self.layers if row.decision == "bfloat16")
        found = dict.fromkeys((name or _ROOT_GLOB for name in wide), FLOAT8_COMPUTE)
        return found | {name: FLOAT8_OVERRIDE for name in narrow if any(parent in wide for parent in _parents(name))}

    @property
    def milliseconds(self) -> dict[str, float]:
        """Time of all products of a forward and backward pass: in "bfloat16", in "float8", and with the "plan", if
        there is one."""
        wide = sum(row.count * row.bfloat16_ms for row in self.layers)
        narrow = sum(row.count * row.float8_ms for row in self.layers)
        if self.emulated:
            return {"bfloat16": wide, "float8": narrow}
        chosen = (row.bfloat16_ms if row.decision == "bfloat16" else row.float8_ms for row in self.layers)
        planned = sum(row.count * each for row, each in zip(self.layers, chosen, strict=True))
        return {"bfloat16": wide, "float8": narrow, "plan": planned}

    def verdict(self) -> str:
        """Return the result as a sentence."""
        decisions = {row.module: row.decision for row in self.layers}
        if not decisions:
            return "No product of the model runs in 8 bits; polyamp.explain lists its products."
        if self.emulated:
            return (
                "Emulated: these are times of 8-bit numbers that are multiplied in float32. They say nothing of a "
                "device that multiplies 8-bit floats, and decide nothing. Measure on the device that you train on."
            )
        faster = sum(decision == "float8" for decision in decisions.values())
        least = "as fast" if self.least_speed == 1.0 else f"{self.least_speed:g} times as fast"
        if not faster:
            return f"No layer is {least} in 8 bits as in bfloat16: train with Policy('mixed_bfloat16')."
        times = self.milliseconds
        return (
            f"{faster} of {len(decisions)} layers are at least {least} in 8 bits; {len(decisions) - faster} stay in "
            f"bfloat16. All products of a pass: {times['bfloat16']:.3g} ms in bfloat16, {times['float8']:.3g} ms in 8 "
            f"bits, {times['plan']:.3g} ms with the plan."
        )


def decide_layers(
    products: Iterable[ModelProduct],
    times: Mapping[ProductShape, ProductTime],
    *,
    emulated: bool,
    least_speed: float,
) -> list[LayerProduct]:
    """Return a row for each module and shape. A module runs in 8 bits if all of its products together are faster.

    Args:
        products: those of the model.
        times: shape -> its times.
        emulated: whether the times decide nothing.
        least_speed: speed relative to bfloat16 from which on a module runs in 8 bits.
    """
    found = list(products)
    wide: dict[str, float] = {}
    narrow: dict[str, float] = {}
    for module, shape, count in found:
        wide[module] = wide.get(module, 0.0) + count * times[shape].bfloat16_ms
        narrow[module] = narrow.get(module, 0.0) + count * times[shape].float8_ms

    def decision(module: str) -> Decision:
        if emulated:
            return "none"
        return "float8" if wide[module] >= least_speed * narrow[module] else "bfloat16"

    return [
        LayerProduct(**msgspec.structs.asdict(times[shape]), module=module, count=count, decision=decision(module))
        for module, shape, count in found
    ]


def layer_rows(found: Float8PlanFindings) -> list[list[str]]:
    """Return the cells of each row, for tables."""
    return [
        [
            row.module or ".",
            str(row.shape),
            str(row.count),
            f"{row.bfloat16_ms:.3g}",
            f"{row.float8_ms:.3g}",
            f"{row.speed:.2f}",
            row.decision,
        ]
        for row in found.layers
    ]


def _parents(path: str) -> Iterable[str]:
    """Return the paths of the modules around a module.

    >>> list(_parents("blocks/0/mlp")), list(_parents(""))
    (['blocks/0', 'blocks', ''], [])
    """
    while path:
        path = path.rpartition("/")[0]
        yield path
