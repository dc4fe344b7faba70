"""Converters of the reference backend, of models and of training states.

An `MLP` has dense layers and batch normalisation, whose layout is the canonical one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import numpy as np

from polyamp.errors import ModelError, UnsupportedError, describe_value
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, same
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.states.optimizer_layout import NativeTraining, OptimizerLayout, UpdateCount
from polyamp.porting.states.recipe_comparison import member_settings
from polyamp.reference import tensor as ops
from polyamp.reference.arrays import Array
from polyamp.reference.models import EPSILON, MLP, MOMENTUM
from polyamp.reference.tensor import Tensor


class ReferenceConverter:
    """`polyamp.porting.layouts.converter.Converter` for `MLP`."""

    in_place: Final = True

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        """Return the layers of an `MLP` in call order."""
        if not isinstance(model, MLP):
            raise ModelError(f"the reference backend moves models of class MLP. Received: {describe_value(model)}.")
        arrays = {**model.parameters, **model.running}
        paths = sorted({name.rpartition("/")[0] for name in arrays}, key=_layer_path)
        return Inventory([_canonical_layer(path, arrays, model) for path in paths], "reference")

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        """Replace the model's arrays in place and return the model."""
        new = {name: np.array(array.read()) for name, array in leaves.items()}
        for held in (model.parameters, model.running):
            held.update({name: value for name, value in new.items() if name in held})
        return model

    def evaluate(
        self,
        model: Any,
        batch: Any,
        cotangents: Callable[[Sequence[Array]], Sequence[Array]],
        inputs: Container[str] = (),
    ) -> Evaluation:
        """Run one pass. Norms use the batch's own statistics: an `MLP` has no other mode."""
        watched = {name: Tensor(np.asarray(value, np.float32)) for name, value in model.parameters.items()}
        running = {name: np.asarray(value, np.float32) for name, value in model.running.items()}
        output = model.with_arrays(watched, running)(np.asarray(batch, np.float32))
        (weights,) = cotangents([output.data])
        found = ops.gradients(ops.total(output * weights), list(watched.values()))
        gradients = {
            name: np.zeros_like(each.data) if gradient is None else gradient
            for (name, each), gradient in zip(watched.items(), found, strict=True)
        }
        return Evaluation([output.data], gradients, {})


def _layer_path(path: str) -> tuple[int, bool]:
    """Return the sort key of a layer's path: dense0, norm0, dense1, ..."""
    return int("".join(letter for letter in path if letter.isdigit())), path.startswith("norm")


def _canonical_layer(path: str, arrays: Mapping[str, Any], model: MLP) -> NativeLayer:
    leaves = {
        name.rpartition("/")[2]: InventoryLeaf(name, Lazy.of(array), name in model.parameters)
        for name, array in arrays.items()
        if name.rpartition("/")[0] == path
    }
    if path.startswith("dense"):
        form = Form("dense", same(*leaves), {"activation": "linear"})
    else:
        attributes = {"epsilon": EPSILON, "momentum": MOMENTUM, "unbiased": False}
        form = Form("batch_norm", same(*leaves), attributes)
    return NativeLayer(path, leaves, (form,), f"polyamp.reference.{type(model).__name__}")


class ReferenceStateConverter:
    """`polyamp.porting.states.optimizer_layout.StateConverter` over NumPy."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        """Return the layout: slots and counts are stored under the parameter's own name."""
        names = list(state.model.parameters)
        slots = {slot: {name: f"optimizer/{name}/{slot}" for name in names} for slot in state.recipe.optimizer.slots}
        counts = {name: UpdateCount(f"optimizer/{name}/step") for name in names}
        return OptimizerLayout(slots, counts, *member_settings(state.groups))

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        """Raise: the reference has no native optimizers."""
        raise UnsupportedError("NumPy has no optimizers and loss scalers of its own.")
