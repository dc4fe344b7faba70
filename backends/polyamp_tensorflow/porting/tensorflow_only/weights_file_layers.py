"""Inventory of a `.weights.h5` file. The file has no config, so layers are inferred from names and shapes.

Keras names the group of a layer in a list after the layer's class ("layers/conv2d_1"). In an attribute, it names the
group after the attribute. Both groups store the layer's own name. If the class is known, a layer has the forms of that
class; otherwise those that its shapes allow, likeliest first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import Blocks, Merge, Operation, Reshape, Shape, Split, Transpose
from polyamp_tensorflow.porting.tensorflow_only.h5_archive import StoredArray

_NORM_ARRAYS: Final = ("scale", "bias")
_STATISTIC_ARRAYS: Final = ("mean", "variance")
_CELL_ARRAYS: Final = ("input_kernel", "recurrent_kernel")
_INNER_LAYERS: Final = ("cell", "forward_layer", "backward_layer")
"""Attribute names of the layers inside Keras's recurrent layers. Those layers have automatic, numbered names."""
_GRU_GATE_ORDER: Final = Blocks((1, 0, 2))


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
    forms = (tuple(_forms_of_class(word, shapes)) or tuple(_forms_of_shapes(shapes))) if path else ()
    if forms:
        fixed = {
            native for rule in forms[0].rules for native in rule.native if {*rule.canonical} & {*_STATISTIC_ARRAYS}
        }
        told = {key: InventoryLeaf(leaf.name, leaf.array, key not in fixed) for key, leaf in leaves.items()}
        yield NativeLayer(path, told, forms, "")
        return
    for key, leaf in leaves.items():
        own = f"{path}/{key}".lstrip("/")
        yield NativeLayer(own, {"value": leaf}, (Form("parameter", same("value")),), "")


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
        word = told if listed_by_class else automatic if automatic in _KNOWN_CLASSES else ""
        if segment != "layers":
            path.append(
                layer
                if layer and automatic not in (told, *_KNOWN_CLASSES) and segment not in _INNER_LAYERS
                else segment
            )
    return "/".join(path), word


def _class_word(name: str) -> str:
    """Return the name without a number: "conv2d" for "conv2d_1"."""
    return re.sub(r"_\d+$", "", name)


def _bias_rules(names: Sequence[str]) -> tuple[Rule, ...]:
    return tuple(Rule((str(number),), (name,)) for number, name in enumerate(names))


def _forms_of_class(word: str, shapes: list[Shape]) -> Iterator[Form]:
    """Yield the forms of a layer of a known class; none if the shapes do not fit the class."""
    first, count = shapes[0], len(shapes)
    rank = len(first)
    kernel = ("kernel", "bias")[:count]
    if word == "dense" and rank == 2 and count <= 2:
        yield Form("dense", _bias_rules(kernel))
    elif word in ("conv1d", "conv2d", "conv3d") and count <= 2:
        yield Form("conv", _bias_rules(kernel))
    elif word in ("conv1d_transpose", "conv2d_transpose", "conv3d_transpose") and count <= 2:
        yield _transposed_convolution_form(first, kernel)
    elif word in ("depthwise_conv1d", "depthwise_conv2d") and count <= 2:
        yield _depthwise_form(first, kernel)
    elif word == "einsum_dense" and count <= 2:
        yield from _einsum_forms(shapes)
    elif word in ("embedding", "reversible_embedding") and count == 1:
        yield Form("embedding", _bias_rules(("table",)))
    elif word in ("layer_normalization", "group_normalization") and count <= 2:
        kind = word.replace("normalization", "norm")
        yield from (
            Form(kind, _bias_rules(names)) for names in ([_NORM_ARRAYS] if count == 2 else [("scale",), ("bias",)])
        )
    elif word == "rms_normalization" and count == 1:
        yield Form("rms_norm", _bias_rules(("scale",)))
    elif word == "batch_normalization" and 2 <= count <= 4:
        beside: dict[int, list[tuple[str, ...]]] = {2: [()], 3: [("bias",), ("scale",)], 4: [_NORM_ARRAYS]}
        yield from (Form("batch_norm", _bias_rules((*names, *_STATISTIC_ARRAYS))) for names in beside[count])
    elif word == "p_re_lu" and count == 1 and sum(length > 1 for length in first) <= 1:
        flat = () if rank == 1 else (Reshape(first, (math.prod(first),)),)
        yield Form("prelu", (Rule(("0",), ("slope",), flat),))
    elif word in ("lstm_cell", "gru_cell", "simple_rnn_cell") and count in (2, 3):
        yield _cell_form(word.rpartition("_")[0], shapes)


def _forms_of_shapes(shapes: list[Shape]) -> Iterator[Form]:
    """Yield possible forms of arrays with these shapes, likeliest first."""
    ranks = [len(shape) for shape in shapes]
    first = shapes[0]
    kernel = ("kernel", "bias")[: len(shapes)]
    if ranks in ([2], [2, 1]) and shapes[-1][-1] == first[-1]:
        yield Form("dense", _bias_rules(kernel))
        if ranks == [2]:
            yield Form("embedding", _bias_rules(("table",)))
            yield Form("parameter", _bias_rules(("value",)))
    elif ranks[0] in (3, 4, 5) and ranks[1:] in ([], [1]):
        if ranks[1:] == [] or first[-1] == shapes[1][0]:
            yield Form("conv", _bias_rules(kernel))
        if ranks[1:] == [] or first[-2] == shapes[1][0]:
            yield _transposed_convolution_form(first, kernel)
        if ranks[1:] == [1] and first[-1] * first[-2] == shapes[1][0] != first[-1]:
            yield _depthwise_form(first, kernel)
        if ranks[0] == 3:
            yield from _einsum_forms(shapes)
        if ranks[1:] == []:
            yield Form("parameter", _bias_rules(("value",)))
    elif len({*shapes}) == 1 and ranks[0] == 1 and len(shapes) in (1, 2, 4):
        if len(shapes) == 4:
            yield Form("batch_norm", _bias_rules((*_NORM_ARRAYS, *_STATISTIC_ARRAYS)))
        elif len(shapes) == 2:
            yield from (Form(kind, _bias_rules(_NORM_ARRAYS)) for kind in ("layer_norm", "group_norm"))
        else:
            yield from (Form("rms_norm", _bias_rules(("scale",))), Form("parameter", _bias_rules(("value",))))
    elif ranks == [3, 2]:
        yield from _einsum_forms(shapes)
    elif ranks[:2] == [2, 2] and len(shapes) in (2, 3) and first[1] == shapes[1][1]:
        gates = first[1] / shapes[1][0]
        kind = {4.0: "lstm", 3.0: "gru", 1.0: "simple_rnn"}.get(gates)
        yield from [] if kind is None else [_cell_form(kind, shapes)]


def _transposed_convolution_form(kernel: Shape, names: Sequence[str]) -> Form:
    rank = len(kernel)
    turned = Rule(("0",), ("kernel",), (Transpose((*range(rank - 2), rank - 1, rank - 2)),))
    return Form("conv_transpose", (turned, *_bias_rules(names)[1:]))


def _depthwise_form(kernel: Shape, names: Sequence[str]) -> Form:
    shape = (*kernel[:-2], 1, kernel[-2] * kernel[-1])
    apart = Rule(("0",), ("kernel",), (Reshape(kernel, shape),))
    return Form("conv", (apart, *_bias_rules(names)[1:]), {"groups": kernel[-2]})


def _einsum_forms(shapes: list[Shape]) -> Iterator[Form]:
    """Yield dense layers over several axes. The bias determines the output axes; without it, every split is
    possible."""
    kernel = shapes[0]
    for inputs in range(1, len(kernel)):
        given, result = kernel[:inputs], kernel[inputs:]
        if shapes[1:] and shapes[1] != result:
            continue
        features = math.prod(result)
        rules = [Rule(("0",), ("kernel",), (Reshape(kernel, (math.prod(given), features)),))]
        if shapes[1:]:
            rules.append(Rule(("1",), ("bias",), () if len(result) == 1 else (Reshape(result, (features,)),)))
        yield Form("dense", tuple(rules))


def _cell_form(kind: str, shapes: list[Shape]) -> Form:
    gates: tuple[Operation, ...] = (_GRU_GATE_ORDER,) if kind == "gru" else ()
    rules = [Rule((str(number),), (name,), gates) for number, name in enumerate(_CELL_ARRAYS)]
    if shapes[2:]:
        bias = shapes[2]
        both: tuple[Operation, ...] = (Split((1, 1), 0), Reshape((1, *bias[1:]), bias[1:]))
        apart = both if len(bias) == 2 else (Merge(),)
        rules.append(Rule(("2",), ("bias", "recurrent_bias"), (*apart, *gates)))
    said: dict[str, Any] = {}
    if kind == "gru" and shapes[2:]:
        said["reset"] = "after" if len(shapes[2]) == 2 else "before"
    return Form(kind, tuple(rules), said)


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


_KNOWN_CLASSES: Final = frozenset(
    (
        *(f"conv{rank}d" for rank in (1, 2, 3)),
        *(f"conv{rank}d_transpose" for rank in (1, 2, 3)),
        *("depthwise_conv1d", "depthwise_conv2d", "dense", "einsum_dense", "embedding", "reversible_embedding"),
        *("layer_normalization", "group_normalization", "rms_normalization", "batch_normalization"),
        *("p_re_lu", "lstm_cell", "gru_cell", "simple_rnn_cell"),
    )
)
"""Names of the classes that `_forms_of_class` knows."""
