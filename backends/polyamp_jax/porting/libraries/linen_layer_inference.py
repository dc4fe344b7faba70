"""Possible forms of linen's layers, inferred from the names and shapes of their arrays.

They apply to modules that are visible neither in a field, in `setup` nor with a batch: `variables` contains no classes.
The likeliest form comes first; the partner on the other side of a port decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries.flax_composites import NORM_SUBMODULES
from polyamp_jax.porting.libraries.flax_layer_spec import FormMaker, Shapes
from polyamp_jax.porting.libraries.flax_layer_table import LAYER_SPECS

_ARRAYS: Final = tuple(dict.fromkeys(spec.arrays for spec in LAYER_SPECS.values() if spec.arrays))
_GROUPS: Final = tuple(group for group in _ARRAYS if not any({*group} < {*other} for other in _ARRAYS))
"""Names of the arrays that one module has, of each kind of layer; a norm without statistics is part of one with."""


def composite_maker(children: Mapping[str, Shapes]) -> FormMaker | None:
    """Return the form maker of a module with these submodules.

    Raises:
        RefusedError: the layer cannot be moved.
    """
    parts = {name: arrays for name, arrays in children.items() if name not in NORM_SUBMODULES}
    if not all("kernel" in arrays for arrays in parts.values()):
        return None
    for kind, spec in LAYER_SPECS.items():
        if spec.submodules is not None and spec.submodules(parts):
            if spec.form is None:
                raise RefusedError(f"{kind}: {spec.refusal}")
            return spec.form
    return None


def group_arrays(names: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the arrays of one module in groups, one group per layer; an array of no layer is its own group."""
    left = dict(names)
    for group in _GROUPS:
        found = tuple(name for name in group if name in left)
        if found and (found[0] == group[0] or found[-2:] == ("mean", "var")):
            yield found
            left = {name: shape for name, shape in left.items() if name not in found}
    yield from ((name,) for name in left)


def forms_by_name(module: str, shapes: Shapes) -> tuple[Form, ...]:
    """Return possible forms of a group of arrays.

    Args:
        module: the last part of the module's path; linen names an unnamed module after its class.
        shapes: shapes of the group's arrays.

    Raises:
        RefusedError: an array stacks those of several layers.
    """
    found: list[Form] = []
    for maker in _candidate_makers(module, shapes):
        try:
            form = maker(shapes, {})
            form.canonical_shapes(shapes)  # raises if they do not fit
        except (RefusedError, ValueError):
            continue
        if form not in found:
            found.append(form)
    if not found and len(shapes.get("bias", ())) == 2 and shapes["bias"][0] == shapes.get("kernel", (0,))[0]:
        raise RefusedError(
            "its arrays have an axis too many, as nn.scan and nn.vmap stack them; a batch tells (check= of port, "
            "or porting.export(model, batch))"
        )
    if len(shapes) == 1:
        found.append(parameter_form(next(iter(shapes))))
    return tuple(found)


def _candidate_makers(module: str, shapes: Shapes) -> Iterator[FormMaker]:
    """Yield the makers that may fit, those of the class in the module's name first."""
    match = re.fullmatch(r"(.+)_\d+", module)
    default = match[1] if match and match[1] in LAYER_SPECS and LAYER_SPECS[match[1]].inferred is not None else ""
    said = module.lower()
    named, others = list[FormMaker](), list[FormMaker]()
    for kind, spec in LAYER_SPECS.items():
        if spec.inferred is not None:
            is_named = kind == default if default else any(word in said for word in spec.words)
            (named if is_named else others).extend(spec.inferred(shapes))
    yield from (*named, *others)
