"""Layers of a file with torch's names, inferred from names and shapes alone.

A layer has several forms, the likeliest first, where names and shapes do not determine one. The other side of a port
then decides: a matrix may belong to a dense layer or be an embedding table. A transposed matrix (GPT-2's dense layers
store inputs first) is recognised by its bias, or by layers of the same name elsewhere in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule, parameter_form
from polyamp.porting.layouts.operations import Shape
from polyamp_torch.porting.layers import attention, recurrent, weight_layers
from polyamp_torch.porting.layers.layer_record import FileReader, LayerLeaves

_EMBEDDING_NAMES: Final = re.compile(r"emb|wte|wpe|token|position|shared|table|vocab|lookup|codebook")
"""Pattern of words in the names of embeddings."""
_FILE_READERS: Final[tuple[FileReader, ...]] = (
    attention.file_layers,
    recurrent.file_layers,
    weight_layers.file_layers,
)
"""Readers of layers whose arrays have names that no other layer has."""


def read_file_layers(leaves: LayerLeaves) -> list[NativeLayer]:
    """Return the layers of arrays given by `/`-separated paths, in their order.

    Raises:
        PortError: an array is computed from other arrays in the file.
    """
    modules: dict[str, dict[str, InventoryLeaf]] = {}
    for path, leaf in leaves.items():
        module, _, name = path.rpartition("/")
        if name in ("weight_g", "weight_v", "weight_orig") or "parametrizations" in path.split("/"):
            raise PortError(
                f"{path!r} belongs to a weight that the model computes from other arrays (weight_norm, spectral_norm): "
                "no other framework has them. Save the model after torch.nn.utils.parametrize.remove_parametrizations."
            )
        modules.setdefault(module, {})[name] = leaf
    outs = {f"{path}/out_proj".lstrip("/"): path for path, own in modules.items() if attention.has_attention(own)}
    votes = _orientation_votes(modules)
    found: list[NativeLayer] = []
    for path, own in modules.items():
        if path in outs:
            continue  # part of the enclosing attention
        if attention.has_attention(own):
            output = modules.get(f"{path}/out_proj".lstrip("/"), {})
            own = {**own, **{f"out_proj.{name}": leaf for name, leaf in output.items()}}
        found += _module_layers(path, own, votes)
    return found


def _module_layers(path: str, own: LayerLeaves, votes: Mapping[str, set[bool]]) -> list[NativeLayer]:
    """Return the layers of one module's arrays: groups that form a layer, and the rest one by one."""
    rest = dict(own)
    found: list[NativeLayer] = []

    def take(forms: Sequence[Form], names: Mapping[str, str], suffix: str = "") -> None:
        leaves = {name: rest.pop(stored) for name, stored in names.items()}
        found.append(NativeLayer("/".join(part for part in (path, suffix) if part), leaves, tuple(forms)))

    for read in _FILE_READERS:
        for layer in list(read(rest)):
            take(layer.forms, layer.tensors, layer.suffix)
    for scale, bias in (("weight", "bias"), ("gamma", "beta"), ("scale", "bias")):
        if scale in rest and len(rest[scale].array.shape) > 0:
            names = {name: name for name in (scale, bias) if name in rest}
            forms = _weight_forms(path, scale, bias if bias in rest else "", rest, votes)
            if forms:
                take(forms, names)
            break
    for name in list(rest):
        take([parameter_form(name)], {name: name}, name)
    return found


def _weight_forms(path: str, scale: str, bias: str, own: LayerLeaves, votes: Mapping[str, set[bool]]) -> list[Form]:
    """Return the possible forms of a weight with an optional bias; [] if it belongs to no layer."""
    shape = own[scale].array.shape
    length = own[bias].array.shape if bias else ()
    biases = (Rule((bias,), ("bias",)),) if bias else ()
    if len(shape) == 1:
        return weight_layers.norm_forms(path, scale, biases) if not bias or length == shape else []
    if scale != "weight" or (bias and len(length) != 1):
        return []
    if len(shape) == 2:
        return _matrix_forms(path, shape, length, own, votes)
    if len(shape) > 5:
        return []
    conv, transposed = (
        Form(kind, weight_layers.convolution_rules(kind, len(shape) - 2, own), {"channels": "first"})
        for kind in ("conv", "conv_transpose")
    )
    if not bias:
        return [conv, transposed]
    kept = [conv] if length[0] == shape[0] else []
    return kept + ([transposed] if length[0] % shape[1] == 0 and shape[0] % (length[0] // shape[1]) == 0 else [])


def _matrix_forms(
    path: str, shape: Shape, length: Shape, own: LayerLeaves, votes: Mapping[str, set[bool]]
) -> list[Form]:
    usual, as_it_is = (
        Form("dense", weight_layers.dense_rules(own)),
        Form("dense", weight_layers.untransposed_dense_rules(own)),
    )
    if not length:
        table = Form("embedding", (Rule(("weight",), ("table",)),))
        named = _EMBEDDING_NAMES.search("/".join(path.lower().split("/")[-2:]))
        return [table, usual] if named else [usual, table]
    if length[0] not in shape:
        return []
    if shape[0] != shape[1]:
        return [usual if length[0] == shape[0] else as_it_is]
    said = votes.get(path.rpartition("/")[2]) or votes[""]
    if said == {True}:
        return [as_it_is]
    return [usual, as_it_is] if True in said else [usual]


def _orientation_votes(modules: Mapping[str, LayerLeaves]) -> dict[str, set[bool]]:
    """Map each module name to whether its matrices store inputs first, as far as a bias determines it. The key ""
    covers all modules."""
    found: dict[str, set[bool]] = {"": set()}
    for path, own in modules.items():
        if {"weight", "bias"} <= set(own):
            shape, length = own["weight"].array.shape, own["bias"].array.shape
            if len(shape) == 2 and shape[0] != shape[1] and length in (shape[:1], shape[1:]):
                for name in ("", path.rpartition("/")[2]):
                    found.setdefault(name, set()).add(length == shape[1:])
    return found
