"""`HaikuLayerSpec`, one row of the table of haiku's layers. All that is known of a class of layers stands in its row.

A form maker takes the shapes of the layer's arrays by haiku's names, and the module's recorded call (`HaikuCall`). The
call is None if only names and shapes are known. Unknown attributes are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.operations import Reshape, Shape
from polyamp_jax.porting.layers.refusal import RefusedError

Shapes = Mapping[str, Shape]


@dataclasses.dataclass(frozen=True)
class HaikuCall:
    """Recorded call of a module.

    Attributes:
        module: the module, for its fields.
        inputs: shape of the first array argument.
    """

    module: Any
    inputs: Shape = ()


FormMaker = Callable[[Shapes, HaikuCall | None], Form]
PossibleForms = Callable[[Shapes], tuple[Form, ...]]


class HaikuLayerSpec(NamedTuple):
    """Table row of a class of modules.

    Attributes:
        form: maker of its form.
        arrays: names of its arrays, if it has some itself.
        inferred: function from a module's name and the shapes of its arrays to the makers that may fit them, likeliest
            first; None if another row has the same arrays.
        words: parts of a module's name that indicate the class.
        submodules: names of the dense layers that it consists of, if it has no arrays itself.
        whole: function from the name of the enclosing module and the shapes of the dense layers in it to the function
            that returns possible forms of all of them, without a recorded call; None if it is another layer.
    """

    form: FormMaker
    arrays: tuple[str, ...] = ()
    inferred: Callable[[str, Shapes], Iterable[FormMaker]] | None = None
    words: tuple[str, ...] = ()
    submodules: frozenset[str] = frozenset()
    whole: Callable[[str, Mapping[str, Shapes]], PossibleForms | None] = lambda name, children: None

    @property
    def is_arrayless(self) -> bool:
        """Whether it has no arrays, and is listed for its attributes."""
        return not self.arrays and not self.submodules


def fitting_forms(makers: Iterable[FormMaker], shapes: Shapes) -> tuple[Form, ...]:
    """Return the forms that name every array once, by makers that know only names and shapes."""
    found: list[Form] = []
    for maker in makers:
        try:
            form = maker(shapes, None)
        except RefusedError:
            continue
        if form not in found and sorted(name for rule in form.rules for name in rule.native) == sorted(shapes):
            found.append(form)
    return tuple(found)


def flat_array_rule(name: str, canonical: str, shape: Shape) -> Rule:
    """Return the rule of an array of channels that also has axes of length 1."""
    length = math.prod(shape)
    lone = len(shape) != 1 and sum(each != 1 for each in shape) <= 1
    return Rule((name,), (canonical,), (Reshape(shape, (length,)),) if lone else ())
