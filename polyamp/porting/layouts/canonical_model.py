"""`Canonical`, a model as an ordered mapping from module path to layer in the canonical layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from polyamp.errors import PortError, join_first
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_kinds import to_json_value
from polyamp.porting.layouts.layer_layout import Form, same
from polyamp.porting.layouts.lazy_array import Lazy


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer in the canonical layout (`polyamp.porting.layouts.layer_kinds`).

    Attributes:
        kind: "dense", "conv", ..., or a third party's name.
        arrays: name -> values, which are read lazily; `numpy.asarray` reads one.
        attributes: settings that the weights do not carry, as far as they are readable; plain JSON data.
        tied: array -> "path/array" of the array that it is tied to, if the model uses one array twice.
        fixed: arrays that are not trained, such as running statistics.
        module: original class, for messages; "" if unknown.
    """

    kind: str
    arrays: Mapping[str, Lazy]
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    module: str = ""


class Canonical(Mapping[str, Layer]):
    """Mapping of module path -> layer, in the model's order.

    Args:
        layers: path -> layer.
        framework: original framework, for messages.
        ordered: whether the order is meaningful (`Inventory.ordered`).

    Example:
        >>> import numpy as np
        >>> model = Canonical({"head": Layer("dense", {"kernel": Lazy.of(np.zeros((2, 3)))})}, "torch")
        >>> model
        Canonical(of torch: 1 layer, 6 values)
        >>> model["head"].arrays["kernel"].shape
        (2, 3)
    """

    def __init__(self, layers: Mapping[str, Layer], framework: str, *, ordered: bool = True) -> None:
        self._layers = dict(layers)
        self.framework = framework
        self.ordered = ordered

    def __getitem__(self, path: str) -> Layer:
        return self._layers[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def arrays(self) -> dict[str, Lazy]:
        """Return "path/array" -> values, with every array once: a tied array is listed under its first name."""
        return {
            f"{path}/{name}": array
            for path, layer in self.items()
            for name, array in layer.arrays.items()
            if name not in layer.tied
        }

    def inventory(self) -> Inventory:
        """Return the model as an inventory whose native layout is the canonical one."""
        layers = [
            NativeLayer(
                path,
                {
                    name: InventoryLeaf(f"{path}/{name}", array, name not in layer.fixed, layer.tied.get(name))
                    for name, array in layer.arrays.items()
                },
                (Form(layer.kind, same(*layer.arrays), layer.attributes),),
                layer.module,
            )
            for path, layer in self.items()
        ]
        return Inventory(layers, self.framework, self.ordered)

    def __repr__(self) -> str:
        count = sum(array.size for array in self.arrays().values())
        return f"Canonical(of {self.framework}: {len(self)} layer{'s' * (len(self) != 1)}, {count:,} values)"


def to_canonical(inventory: Inventory) -> Canonical:
    """Convert an inventory to the canonical layout.

    Raises:
        PortError: the kinds of some layers are unknown; the message lists them.
    """
    unknown = [layer for layer in inventory.layers if len(layer.forms) > 1]
    if unknown:
        shown = [
            f"{layer.path} ({' or '.join(dict.fromkeys(form.kind.replace('_', ' ') for form in layer.forms))})"
            for layer in unknown
        ]
        raise PortError(
            f"what these layers are cannot be told from names and shapes: {join_first(shown, 5, '; ')}. Give inputs, "
            "export(model, batch), so that a call of the model shows it; polyamp.port(source, target) needs none where "
            "the other side tells."
        )
    places = _canonical_names(inventory)
    layers = {}
    for layer in inventory.layers:
        form = layer.forms[0]
        tied: dict[str, str] = {}
        fixed: set[str] = set()
        for rule in form.rules:
            owners = [layer.leaves[name].tied for name in rule.native]
            if len(rule.canonical) == 1 and owners[0] in places:
                tied[rule.canonical[0]] = places[owners[0]]
            if not any(layer.leaves[name].trainable for name in rule.native):
                fixed.update(rule.canonical)
        layers[layer.path] = Layer(
            form.kind,
            form.arrays(layer.arrays),
            to_json_value(dict(form.attributes)),
            tied,
            frozenset(fixed),
            layer.module,
        )
    return Canonical(layers, inventory.framework, ordered=inventory.ordered)


def _canonical_names(inventory: Inventory) -> dict[str | None, str]:
    """Map a leaf's name to the "path/array" of its canonical array, if it has one."""
    return {
        layer.leaves[rule.native[0]].name: f"{layer.path}/{rule.canonical[0]}"
        for layer in inventory.layers
        for rule in layer.forms[0].rules
        if len(rule.native) == len(rule.canonical) == 1 and layer.leaves[rule.native[0]].tied is None
    }
