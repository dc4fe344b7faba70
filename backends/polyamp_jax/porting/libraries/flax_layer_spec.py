"""`FlaxLayerSpec`, one row of the tables of flax's layers. All that is known of a class of layers stands in its row.

linen's and nnx's layers have the same arrays and names of settings, so one row describes both.

A form maker takes the shapes of the layer's arrays by name, and its settings. These are a linen module's fields or an
nnx module's attributes, or empty if only the name of the class is known. Unknown attributes are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.operations import Shape
from polyamp_jax.porting.input_orders import ChainRole

Shapes = Mapping[str, Shape]
LayerSettings = Mapping[str, Any]
FormMaker = Callable[[Shapes, LayerSettings], Form]


class FlaxLayerSpec(NamedTuple):
    """Table row of a class of layers, which linen and nnx share by its name.

    Attributes:
        form: maker of its form; None if the layer cannot be moved.
        arrays: names of its arrays, if it consists of one module. A subclass's other arrays are parameters of no layer.
        stacked: function from its settings to the name of one of its arrays and the expected number of axes; a stack of
            layers has more axes. None if the array may have any shape.
        inferred: function from the shapes of arrays without a known class to the makers that may fit them, likeliest
            first; None if another row has the same arrays.
        words: parts of a module's user-given name that indicate the class.
        submodules: whether the arrays of these submodules make up such a layer, for one that consists of several
            modules; it includes the arrays of all of them. None for a layer of one module.
        role: what it is in a Sequential.
        can_be_arrayless: whether it may have no arrays.
        refusal: why it cannot be moved.
    """

    form: FormMaker | None = None
    arrays: tuple[str, ...] = ()
    stacked: Callable[[LayerSettings], tuple[str, int]] | None = None
    inferred: Callable[[Shapes], Iterable[FormMaker]] | None = None
    words: tuple[str, ...] = ()
    submodules: Callable[[Mapping[str, Shapes]], bool] | None = None
    role: ChainRole = "unknown"
    can_be_arrayless: bool = False
    refusal: str = ""

    @property
    def is_composite(self) -> bool:
        """Whether it consists of several modules."""
        return self.submodules is not None


KERNEL_AND_BIAS: Final = ("kernel", "bias")


def stacked_array(name: str, axes: int) -> Callable[[LayerSettings], tuple[str, int]]:
    """Return the function for an array that has the same number of axes with all settings."""
    return lambda settings: (name, axes)


def makers_by_array(maker: FormMaker, name: str, absent: Sequence[str] = ()) -> Callable[[Shapes], Iterable[FormMaker]]:
    """Return the function `inferred` of a layer that has an array of this name, and none of the `absent` ones."""
    return lambda shapes: [maker] if name in shapes and not any(other in shapes for other in absent) else []
