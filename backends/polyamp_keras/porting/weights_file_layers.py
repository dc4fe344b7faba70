"""Inventory of a `.weights.h5` file. The file has no config, so layers are inferred from names and shapes.

Keras names the group of a layer in a list after the layer's class ("layers/conv2d_1"). In an attribute, it names the
group after the attribute. Both groups store the layer's own name. If the class is known, a layer has the forms of that
class; otherwise those that its shapes allow, likeliest first.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_kinds import KINDS
from polyamp.porting.layouts.layer_layout import Form, Rule, parameter_form
from polyamp.porting.layouts.operations import Shape
from polyamp_keras.porting.h5_archive import StoredArray
from polyamp_keras.porting.layers.layer_record import LayerRow
from polyamp_keras.porting.layers.layer_table import file_row, possible_rows

_STATISTIC_ARRAYS: Final = ("mean", "variance")
_INNER_LAYERS: Final = ("cell", "forward_layer", "backward_layer")
"""Attribute names of the layers inside Keras's recurrent layers. Those layers have automatic, numbered names."""


def read_file_layers(
    arrays: Mapping[str, StoredArray], names: Mapping[str, str]
) -> tuple[Inventory, dict[str, list[str]]]:
    """Return the layers of a file, and the place of each leaf in it.

    Args:
        arrays: place in the file -> array.
        names: group -> the name of its layer.
    """
    groups: dict[str, list[str]] = {}
    for place, stored in arrays.items():
        groups.setdefault(stored.group, []).append(place)
    layers: list[NativeLayer] = []
    left: dict[str, str] = {}
    for group, places in groups.items():
        floating = [place for place in places if arrays[place].array.dtype.kind in "fV"]
        left.update(dict.fromkeys(sorted({*places} - {*floating}), "a counter or a random stream, no floating number"))
        if floating:
            layers += _group_layers(*_layer_name(group, names), floating, arrays)
    joined = list(_join_layers(layers))
    named = {leaf.name: [leaf.name] for layer in joined for leaf in layer.leaves.values()}
    return Inventory(joined, "keras", False, left), named


def _group_layers(
    path: str, word: str, places: Sequence[str], arrays: Mapping[str, StoredArray]
) -> Iterator[NativeLayer]:
    """Yield the layer of a group; each array as a parameter if no form fits, or if it belongs to the model itself."""
    leaves = {str(number): InventoryLeaf(place, arrays[place].array) for number, place in enumerate(places)}
    shapes = [leaf.array.shape for leaf in leaves.values()]
    row = file_row(word)
    known = () if row is None else tuple(_forms_of_class(row, shapes))
    forms = known or tuple(_forms_of_shapes(shapes)) if path else ()
    if forms:
        fixed = {
            native for rule in forms[0].rules for native in rule.native if {*rule.canonical} & {*_STATISTIC_ARRAYS}
        }
        told = {key: InventoryLeaf(leaf.name, leaf.array, key not in fixed) for key, leaf in leaves.items()}
        yield NativeLayer(path, told, forms, "")
        return
    for key, leaf in leaves.items():
        own = f"{path}/{key}".lstrip("/")
        yield NativeLayer(own, {"value": leaf}, (parameter_form(),), "")


def _layer_name(group: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the path of a group's layer, and the name of its class, "" if unknown.

    Args:
        group: "layers/dense/vars".
        names: group without "vars" -> the name of its layer.

    >>> _layer_name("layers/functional/layers/dense_1/vars", {"layers/functional/layers/dense_1": "dense_7"})
    ('functional/dense_1', 'dense')
    >>> _layer_name("layers/dense/vars", {"layers/dense": "head"}), _layer_name("hidden/vars", {"hidden": "dense_3"})
    (('head', 'dense'), ('hidden', 'dense'))
    """
    segments = group.split("/")[:-1]
    path, word = [], ""
    for number, segment in enumerate(segments):
        layer = names.get("/".join(segments[: number + 1]), "")
        told, automatic = _class_word(segment), _class_word(layer)
        listed_by_class = automatic == told or (number > 0 and segments[number - 1] in ("layers", "cells"))
        is_known = file_row(automatic) is not None
        word = told if listed_by_class else automatic if is_known else ""
        if segment != "layers":
            named = layer and automatic != told and not is_known and segment not in _INNER_LAYERS
            path.append(layer if named else segment)
    return "/".join(path), word


def _class_word(name: str) -> str:
    """Return the name without a number: "conv2d" for "conv2d_1"."""
    return re.sub(r"_\d+$", "", name)


def _forms_of_class(row: LayerRow, shapes: list[Shape]) -> Iterator[Form]:
    """Yield the forms of a layer of a class; none if the shapes do not fit it."""
    for names in row.variables:
        if len(names) == len(shapes):
            numbers = {name: str(number) for number, name in enumerate(names)}
            by_name = dict(zip(names, shapes, strict=True))
            with contextlib.suppress(ValueError):
                yield from (form.with_native_names(numbers) for form in row.file_forms(by_name) if _fits(form, by_name))


def _fits(form: Form, shapes: Mapping[str, Shape]) -> bool:
    """Return whether the canonical arrays have as many axes as those of their kind."""
    axes = KINDS[form.kind].arrays
    found = form.canonical_shapes(shapes)
    return all("..." in axes[name] or len(shape) == len(axes[name]) for name, shape in found.items())


def _forms_of_shapes(shapes: list[Shape]) -> Iterator[Form]:
    """Yield possible forms of arrays with these shapes, likeliest first."""
    for row in possible_rows(shapes):
        yield from _forms_of_class(row, shapes)
    if len(shapes) == 1 and 1 <= len(shapes[0]) <= 5:
        yield parameter_form("0")


def _join_layers(layers: list[NativeLayer]) -> Iterator[NativeLayer]:
    """Yield the layers, with an attention's projections joined and cells at the paths of their layers."""
    by_path = {layer.path: layer for layer in layers}
    for layer in layers:
        above, _, last = layer.path.rpartition("/")
        projections = {name: by_path.get(f"{above}/{name}") for name in ("query", "key", "value", "attention_output")}
        if last in projections and all(projections.values()):
            if last == "query":
                yield _attention_layer(above, {name: part for name, part in projections.items() if part is not None})
            continue
        yield NativeLayer(_cell_path(layer.path), layer.leaves, _direction_forms(layer.path, layer.forms), layer.module)


def _direction_forms(path: str, forms: tuple[Form, ...]) -> tuple[Form, ...]:
    """Return the forms with the direction as an attribute for a bidirectional layer's half."""
    way = re.search(r"/(forward|backward)_layer/", path)
    if way is None:
        return forms
    said = {"reverse": way[1] == "backward"}
    return tuple(Form(form.kind, form.rules, {**form.attributes, **said}) for form in forms)


def _cell_path(path: str) -> str:
    """Return a cell's path in the inventory: "lstm" for "lstm/cell", "rnn/layer_1" for the second cell of a stack.

    >>> _cell_path("lstm/cell"), _cell_path("bidirectional/forward_layer/cell"), _cell_path("dense")
    ('lstm', 'bidirectional/forward', 'dense')
    """
    path = re.sub(r"/(forward|backward)_layer(?=/)", r"/\1", path)
    stacked = re.fullmatch(r"(.*)/cell/cells/\w+?_cell(?:_(\d+))?", path)
    return f"{stacked[1]}/layer_{stacked[2] or 0}" if stacked else path.removesuffix("/cell")


def _attention_layer(path: str, parts: Mapping[str, NativeLayer]) -> NativeLayer:
    leaves: dict[str, InventoryLeaf] = {}
    rules: list[Rule] = []
    for name, part in parts.items():
        for key, array in (("0", "kernel"), ("1", "bias")):
            if key in part.leaves:
                leaves[f"{name}/{array}"] = part.leaves[key]
                rules.append(Rule((f"{name}/{array}",), (f"{name.removeprefix('attention_')}_{array}",)))
    return NativeLayer(path, leaves, (Form("attention", tuple(rules), {"mask": "keep"}),), "")
