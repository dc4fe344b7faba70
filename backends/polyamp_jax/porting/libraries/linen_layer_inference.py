"""Possible forms of linen's layers, inferred from the names and shapes of their arrays.

They apply to modules that are visible neither in a field, in `setup` nor with a batch: `variables` contains no classes.
The likeliest form comes first; the partner on the other side of a port decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp_jax.porting.libraries import flax_layers as forms
from polyamp_jax.porting.libraries.flax_layer_table import LAYER_SPECS
from polyamp_jax.porting.libraries.flax_layers import FormMaker, RefusedError, Shapes

COMPOSITE_MAKERS: Final[Mapping[frozenset[str], FormMaker]] = {
    frozenset(f"{side}{gate}" for side in "ih" for gate in forms.LSTM_GATES): forms.lstm,
    frozenset(f"{side}{gate}" for side in "ih" for gate in forms.GRU_GATES): forms.gru,
    frozenset((*(f"{side}{gate}" for side in "ih" for gate in "igo"), "if_", "hf")): forms.lstm,  # nnx's
    frozenset(("i", "h")): forms.simple_rnn,
    frozenset(("query", "key", "value", "out")): forms.attention,
}
"""Names of the submodules with arrays -> maker of the layer that they form."""

NORM_SUBMODULES: Final = frozenset(("query_ln", "key_ln"))
"""Norms inside an attention layer, which are separate layers."""

UNSUPPORTED: Final[Mapping[frozenset[str], str]] = {
    frozenset(("if", "in", "hf", "hn")): "MGUCell",
    frozenset(("ih", "hh")): "ConvLSTMCell",
}


def composite_maker(children: Mapping[str, Shapes]) -> FormMaker | None:
    """Return the form maker of a module with these submodules.

    Raises:
        RefusedError: the layer cannot be moved.
    """
    names = frozenset(children) - NORM_SUBMODULES
    if names in UNSUPPORTED and all("kernel" in arrays for arrays in children.values()):
        kind = UNSUPPORTED[names]
        raise RefusedError(f"{kind}: {LAYER_SPECS[kind].refusal}")
    maker = COMPOSITE_MAKERS.get(names) or _fused_cell_maker(children)
    if maker is forms.attention and any(len(children[name].get("kernel", ())) != 3 for name in names):
        return None  # by hand, of dense layers
    if maker is None or any("kernel" not in children[name] for name in names):
        return None
    return maker


def _fused_cell_maker(children: Mapping[str, Shapes]) -> FormMaker | None:
    """Return the form maker of nnx's cells with one kernel for all gates. The number of gates identifies the cell."""
    state = children.get("dense_h", {}).get("kernel", ())
    if set(children) != {"dense_i", "dense_h"} or len(state) != 2:
        return None
    return {4: forms.lstm, 3: forms.gru, 1: forms.simple_rnn}.get(state[1] // state[0])


def group_arrays(names: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the arrays of one module in groups, one group per layer; an array of no layer is its own group."""
    left = dict(names)
    for group in (("kernel", "bias"), ("scale", "bias", "mean", "var"), ("embedding",), ("negative_slope",)):
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
    match = re.fullmatch(r"(.+)_\d+", module)
    named = match.group(1) if match else ""
    if "kernel" in shapes:
        yield from sorted(_kernel_makers(shapes), key=lambda maker: not _is_named_class(maker, named, module))
    elif "mean" in shapes:
        yield forms.batch_norm
    elif "scale" in shapes:
        norms: list[FormMaker] = [forms.layer_norm, forms.group_norm]
        if "bias" not in shapes:
            norms.insert(0, forms.rms_norm)
        yield from sorted(norms, key=lambda maker: not _is_named_class(maker, named, module))
    elif "embedding" in shapes:
        yield forms.embedding
    elif "negative_slope" in shapes:
        yield forms.prelu


def _kernel_makers(shapes: Shapes) -> Iterator[FormMaker]:
    kernel, bias = shapes["kernel"], shapes.get("bias")
    rank = len(kernel)
    if rank == 2 and bias in (None, kernel[1:]):
        yield forms.dense
    if 3 <= rank <= 5 and bias in (None, kernel[-1:]):
        yield forms.conv
        yield functools.partial(forms.conv_transpose, transposed=False)
    if 3 <= rank <= 5 and bias in (None, kernel[-2:-1]):
        yield functools.partial(forms.conv_transpose, transposed=True)
    for inputs in range(1, rank):
        if rank > 2 and bias in (None, kernel[inputs:]):
            yield functools.partial(forms.dense_general, inputs=inputs)


def _is_named_class(maker: FormMaker, default: str, module: str) -> bool:
    """Return whether a maker is that of the class in a module's name."""
    function = maker.func if isinstance(maker, functools.partial) else maker
    if default in _MAKER_BY_CLASS:
        return _MAKER_BY_CLASS[default] is function
    said = module.lower()
    return any(word in said for word in _WORDS_BY_MAKER.get(function, ()))


_MAKER_BY_CLASS: Final[Mapping[str, FormMaker]] = {
    "Dense": forms.dense,
    "DenseGeneral": forms.dense_general,
    "Einsum": forms.dense_general,
    "Conv": forms.conv,
    "ConvTranspose": forms.conv_transpose,
    "LayerNorm": forms.layer_norm,
    "RMSNorm": forms.rms_norm,
    "GroupNorm": forms.group_norm,
    "InstanceNorm": forms.group_norm,
}
_WORDS_BY_MAKER: Final[Mapping[FormMaker, tuple[str, ...]]] = {
    forms.conv_transpose: ("convtrans", "conv_trans", "deconv"),
    forms.conv: ("conv",),
    forms.dense_general: ("query", "key", "value", "qkv"),
    forms.rms_norm: ("rms",),
    forms.layer_norm: ("layer",),
    forms.group_norm: ("group",),
}
"""Form maker -> the parts of a module's user-given name that indicate it."""
