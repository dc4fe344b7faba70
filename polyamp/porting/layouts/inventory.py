"""`Inventory`, the layers of a model in its framework's own layout.

A `Canonical` is also an inventory, whose forms change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from polyamp.porting.layouts.input_order import InputOrder
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.lazy_array import Array, Lazy


@dataclasses.dataclass(frozen=True)
class InventoryLeaf:
    """One array of a model.

    Attributes:
        name: its unique full name in the model, which `Converter.fill` accepts. A parameter's name is its `/`-separated
            path in checkpoints and reports.
        array: its values, which are read lazily.
        trainable: False for running statistics and counters.
        tied: name of the leaf with the same array (a head tied to an embedding). None for the first.
    """

    name: str
    array: Lazy
    trainable: bool = True
    tied: str | None = None


@dataclasses.dataclass(frozen=True)
class NativeLayer:
    """A layer in its framework's layout.

    Attributes:
        path: `/`-separated path of the module, as the framework spells it ("transformer/h/0/attn"). A stack is one
            module in some frameworks and several in others; its layers have the path of one cell
            ("lstm/layer_0/forward"). A parameter of no layer is a layer of kind "parameter", with its own path.
        leaves: its arrays, by their names in the form's rules.
        forms: possible forms, likeliest first: one if its class is known, several if only names and shapes are.
        module: its class for messages ("torch.nn.Linear"); "" if unknown.
        lines: attribute -> function from a canonical value to the line of code that sets it.
    """

    path: str
    leaves: Mapping[str, InventoryLeaf]
    forms: tuple[Form, ...]
    module: str = ""
    lines: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Lazy]:
        """Its arrays by their names in the layer."""
        return {name: leaf.array for name, leaf in self.leaves.items()}


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All layers of a model.

    Attributes:
        layers: in the order of definition, or of calls if that is known.
        framework: name for messages: "torch", "keras", "flax.linen", "equinox", "a file".
        ordered: whether the order is meaningful; False if a framework sorts by name.
        left: names of arrays that are no weights and are not moved (random streams, counters) -> reason.
        inputs: path of a layer -> the order of what it takes, where the model's graph of modules proves it.
    """

    layers: Sequence[NativeLayer]
    framework: str
    ordered: bool = True
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, InputOrder] = dataclasses.field(default_factory=dict)

    @property
    def channels(self) -> Literal["first", "last"] | None:
        """Channel position of the convolutions; None if there are none, or it is unknown or inconsistent."""
        said = {
            form.attributes.get("channels")
            for layer in self.layers
            for form in layer.forms[:1]
            if find_kind(form.kind).is_convolution
        }
        return said.pop() if len(said) == 1 else None

    @property
    def spatial(self) -> int:
        """Number of spatial axes of the convolutions; 0 if there are none or their numbers differ."""
        said = {
            len(shape) - 2
            for layer in self.layers
            for form in layer.forms[:1]
            if find_kind(form.kind).is_convolution
            for name, shape in form.shapes(layer.arrays).items()
            if name == "kernel"
        }
        return said.pop() if len(said) == 1 else 0


def canonical_gradients(layer: NativeLayer, form: Form, gradients: Mapping[str, Array | None]) -> dict[str, Lazy]:
    """Return the gradients of a layer's arrays in canonical layout, by canonical array.

    Arrays that are not trained, are tied to another array, or have no gradient are left out.

    Args:
        layer: the layer.
        form: its form.
        gradients: name of a leaf -> its gradient in the framework's layout.
    """
    found: dict[str, Lazy] = {}
    for rule in form.rules:
        native: dict[str, Lazy] = {}
        for name in rule.native:
            leaf = layer.leaves[name]
            gradient = gradients.get(leaf.name) if leaf.trainable and leaf.tied is None else None
            if gradient is not None:
                native[name] = Lazy.of(gradient)
        if len(native) < len(rule.native):
            continue
        made = dataclasses.replace(form, rules=(rule,)).arrays(native, gradients=True)
        if any(getattr(operation, "absent", ()) for operation in rule.operations):
            made = {rule.canonical[0]: made[rule.canonical[0]]}  # an array that the framework lacks has no gradient
        found.update(made)
    return found
