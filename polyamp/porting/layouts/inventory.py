"""`Inventory`: what a converter found in a model, layer by layer, in its framework's own layout.

The converters in `backends/*/porting` make it, `matching` pairs two of them, `port` moves arrays between them. A
`Canonical` is one too, whose forms change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from polyamp.porting.layouts.forms import Form
from polyamp.porting.layouts.lazy import Lazy


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a model.

    Attributes:
        name: its full name in the model, unique there: what `Converter.fill` takes. A parameter's is its path in
            checkpoints and reports, `/`-separated.
        array: its values, which are read late.
        trainable: False for running statistics and counters.
        tied: the name of the leaf that it is: both are one array (a head tied to an embedding). None for the first.
    """

    name: str
    array: Lazy
    trainable: bool = True
    tied: str | None = None


@dataclasses.dataclass(frozen=True)
class NativeLayer:
    """A layer as a framework has it.

    Attributes:
        path: of the module, `/`-separated, as the framework spells it ("transformer/h/0/attn"); of a stack that is one
            module in some frameworks and several in others, of the one cell ("lstm/layer_0/forward"). A parameter of
            no layer is a layer of its own, of kind "parameter", and has its own path.
        leaves: its arrays, by the names that the form's rules use.
        forms: what it may be, likeliest first: one where its class is known, several where only names and shapes are.
        module: its class as messages name it ("torch.nn.Linear"); "" where it is not known.
        lines: attribute -> the line of code that gives it another value, in canonical meaning.
    """

    path: str
    leaves: Mapping[str, Leaf]
    forms: tuple[Form, ...]
    module: str = ""
    lines: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Lazy]:
        """Its arrays by their names in it."""
        return {name: leaf.array for name, leaf in self.leaves.items()}


@dataclasses.dataclass(frozen=True)
class Inventory:
    """All layers of a model.

    Attributes:
        layers: in the order of definition, or of calls where it is known.
        framework: as messages name it: "torch", "keras", "flax.linen", "equinox", "a file".
        ordered: whether that order means something; False where a framework sorts by name.
        left: names of arrays that belong to no weight and are not moved (random streams, counters) -> why.
    """

    layers: Sequence[NativeLayer]
    framework: str
    ordered: bool = True
    left: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def channels(self) -> Literal["first", "last"] | None:
        """Where its convolutions have their channels; None where there are none, or they do not say or agree."""
        said = {
            form.attributes.get("channels")
            for layer in self.layers
            for form in layer.forms[:1]
            if form.kind in ("conv", "conv_transpose")
        }
        return said.pop() if len(said) == 1 else None

    @property
    def spatial(self) -> int:
        """Number of spatial axes of its convolutions, 0 where there are none or several numbers."""
        said = {
            len(shape) - 2
            for layer in self.layers
            for form in layer.forms[:1]
            if form.kind in ("conv", "conv_transpose")
            for name, shape in form.shapes(layer.arrays).items()
            if name == "kernel"
        }
        return said.pop() if len(said) == 1 else 0
