"""`module_records`: the records of a step's modules, from the arrays that the step collected (S35)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.monitor.exponents import output_stats, product_stats, tensor_stats
from polyamp.monitor.records import ModuleRecord
from polyamp.monitor.slots import MonitorSelection, MonitorSlots
from polyamp.recipe.recipe import Recipe


class MonitorSource(NamedTuple):
    """What a training's records are of.

    Attributes:
        backend: its name.
        recipe: its recipe.
        parameters: paths of its trainable parameters, in the order of the slots.
        to_numpy: copies an array to the host.
    """

    backend: str
    recipe: Recipe
    parameters: Sequence[str]
    to_numpy: Callable[[Any], Any]


def module_records(
    selection: MonitorSelection, source: MonitorSource, slots: MonitorSlots, scale: float
) -> list[ModuleRecord]:
    """Return the records of the modules that have figures, in the order of their parameters.

    Args:
        selection: what the step collected.
        source: what the records are of.
        slots: the arrays.
        scale: the loss scale of the step.
    """
    compute, own = source.recipe.policy.compute, ("read", "scale", "activations", "products")
    arrays: Mapping[str, Any] = {
        name: source.to_numpy(array) for name, array in slots._asdict().items() if array is not None and name not in own
    }
    carried = float(arrays["carried"])
    outputs = {
        path: output_stats(source.to_numpy(figures.sums), float(source.to_numpy(figures.largest)))
        for path, figures in (slots.activations or {}).items()
    }
    products = {path: product_stats(source.to_numpy(sums)) for path, sums in (slots.products or {}).items()}
    found = []
    for number, module in enumerate(selection.modules_of(source.parameters)):
        gradients = weights = ratio = None
        if slots.gradients is not None:
            norm = float(arrays["gradient_norms"][number]) / carried
            gradients = tensor_stats(arrays["gradients"][number], norm, compute, scale / carried)
        if slots.weights is not None:
            weights = tensor_stats(arrays["weights"][number], float(arrays["weight_norms"][number]), compute)
        if slots.update_norms is not None and arrays["weight_norms"][number] > 0.0:
            ratio = float(arrays["update_norms"][number] / arrays["weight_norms"][number])
        made = ModuleRecord(
            module=module,
            gradients=gradients,
            weights=weights,
            update_ratio=ratio,
            activations=outputs.pop(module, None),
            products=products.pop(module, None),
        )
        if made != ModuleRecord(module=module):
            found.append(made)
    for path in dict.fromkeys([*outputs, *products]):
        made = ModuleRecord(module=path, activations=outputs.get(path), products=products.get(path))
        if made != ModuleRecord(module=path):
            found.append(made)
    return found
