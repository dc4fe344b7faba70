"""Possible forms of haiku's layers, inferred from the names and shapes of their arrays.

haiku names an unnamed module after its class ("conv2_d_transpose_1"), and its arrays have the same names in all
modules. The likeliest form comes first; the partner on the other side of a port decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.operations import Shape
from polyamp_jax.porting.libraries.haiku_layer_spec import (
    FormMaker,
    HaikuCall,
    PossibleForms,
    Shapes,
    fitting_forms,
    flat_array_rule,
)
from polyamp_jax.porting.libraries.haiku_layers import LAYER_SPECS

_SLOPE: Final = re.compile(r"slope|alpha|prelu")
_ARRAY_NAMES: Final = frozenset(name for spec in LAYER_SPECS.values() for name in spec.arrays)


def composite_forms(path: str, call: HaikuCall | None, children: Mapping[str, Shapes]) -> PossibleForms | None:
    """Return the forms of a layer made of several modules: haiku's attention and recurrent cores use dense layers.

    Args:
        path: path of the enclosing module.
        call: recorded call of it.
        children: name of each module in it -> shapes of its arrays.
    """
    if not all(set(shapes) <= {"w", "b"} and len(shapes.get("w", ())) == 2 for shapes in children.values()):
        return None
    for kind, spec in LAYER_SPECS.items():
        if spec.submodules != set(children):
            continue
        if call is None:
            return spec.whole(path.rpartition("/")[2].lower(), children)
        if isinstance(call.module, kind):
            return lambda shapes: (spec.form(shapes, call),)
    return None


def forms_by_name(path: str, shapes: Shapes) -> tuple[Form, ...]:
    """Return possible forms of those arrays of a module that make a layer; empty if there is no layer.

    Args:
        path: path of the module.
        shapes: shapes of its arrays by name.
    """
    name = path.rpartition("/")[2].lower()
    chosen = {leaf: shape for leaf, shape in shapes.items() if leaf in _ARRAY_NAMES}
    found = fitting_forms(_candidate_makers(name, chosen), chosen)
    if found and len(chosen) == 1 and "w" not in chosen:
        (leaf,) = chosen
        return (*found, parameter_form(leaf))
    return found


def parameter_forms(name: str, shape: Shape) -> tuple[Form, ...]:
    """Return possible forms of a parameter outside haiku's modules, made by `hk.get_parameter`.

    Args:
        name: its name.
        shape: its shape.
    """
    plain = parameter_form()
    if len(shape) <= 1 and _SLOPE.search(name.lower()):
        return Form("prelu", (flat_array_rule("value", "slope", shape),)), plain
    return (plain,)


def _candidate_makers(name: str, shapes: Shapes) -> list[FormMaker]:
    """Return the makers that may fit, those of the class that the name indicates first."""
    named, others = list[FormMaker](), list[FormMaker]()
    for spec in LAYER_SPECS.values():
        if spec.inferred is not None:
            (named if any(word in name for word in spec.words) else others).extend(spec.inferred(name, shapes))
    return [*named, *others]
