"""What a layer of linen may be, by the names and shapes of its arrays: `variables` says nothing of classes.

Called by `linen` for modules that neither a field, `setup` nor a batch has shown. Likeliest first; the partner on the
other side of a port decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from polyamp.porting.layouts.forms import Form
from polyamp_jax.porting import flax_cells as cells
from polyamp_jax.porting import flax_forms as forms
from polyamp_jax.porting.flax_forms import Maker, RefusedError, Shapes

COMPOSITES: Final[Mapping[frozenset[str], Maker]] = {
    frozenset(f"{side}{gate}" for side in "ih" for gate in cells.LSTM): cells.lstm,
    frozenset(f"{side}{gate}" for side in "ih" for gate in cells.GRU): cells.gru,
    frozenset((*(f"{side}{gate}" for side in "ih" for gate in "igo"), "if_", "hf")): cells.lstm,  # nnx's
    frozenset(("i", "h")): cells.simple_rnn,
    frozenset(("query", "key", "value", "out")): cells.attention,
}
"""Names of the submodules that have arrays -> the layer that they are together."""

NORMS: Final = frozenset(("query_ln", "key_ln"))
"""Norms inside of an attention layer: layers of their own."""

REFUSED: Final[Mapping[frozenset[str], str]] = {
    frozenset(("if", "in", "hf", "hn")): "MGUCell: no other framework has a minimal gated unit",
    frozenset(("ih", "hh")): "ConvLSTMCell: the canonical layout has no convolutional LSTM",
}


def composite(children: Mapping[str, Shapes]) -> Maker | None:
    """The layer that a module with these submodules is.

    Raises:
        RefusedError: one that cannot be moved.
    """
    names = frozenset(children) - NORMS
    if names in REFUSED and all("kernel" in arrays for arrays in children.values()):
        raise RefusedError(REFUSED[names])
    maker = COMPOSITES.get(names) or _optimised(children)
    if maker is cells.attention and any(len(children[name].get("kernel", ())) != 3 for name in names):
        return None  # by hand, of dense layers
    if maker is None or any("kernel" not in children[name] for name in names):
        return None
    return maker


def _optimised(children: Mapping[str, Shapes]) -> Maker | None:
    """nnx's cells with one kernel for all gates: how many there are says what it is."""
    state = children.get("dense_h", {}).get("kernel", ())
    if set(children) != {"dense_i", "dense_h"} or len(state) != 2:
        return None
    return {4: cells.lstm, 3: cells.gru, 1: cells.simple_rnn}.get(state[1] // state[0])


def groups(names: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The arrays of one module, those together that belong to one layer; what belongs to none, alone."""
    left = dict(names)
    for group in (("kernel", "bias"), ("scale", "bias", "mean", "var"), ("embedding",), ("negative_slope",)):
        found = tuple(name for name in group if name in left)
        if found and (found[0] == group[0] or found[-2:] == ("mean", "var")):
            yield found
            left = {name: shape for name, shape in left.items() if name not in found}
    yield from ((name,) for name in left)


def by_names(module: str, shapes: Shapes) -> tuple[Form, ...]:
    """Forms of a group of arrays.

    Args:
        module: the last part of the module's path: linen names what the user does not name after its class.
        shapes: of the group's arrays.

    Raises:
        RefusedError: several layers' arrays in one.
    """
    found: list[Form] = []
    for maker in _candidates(module, shapes):
        try:
            form = maker(shapes, {})
            form.shapes({name: _Shaped(shape) for name, shape in shapes.items()})  # type: ignore[misc]  # a shape is all that it reads
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
        found.append(forms.parameter(next(iter(shapes))))
    return tuple(found)


class _Shaped:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _candidates(module: str, shapes: Shapes) -> Iterator[Maker]:
    match = re.fullmatch(r"(.+)_\d+", module)
    named = match.group(1) if match else ""
    if "kernel" in shapes:
        yield from sorted(_kernels(shapes), key=lambda maker: not _named(maker, named, module))
    elif "mean" in shapes:
        yield forms.batch_norm
    elif "scale" in shapes:
        norms: list[Maker] = [forms.layer_norm, forms.group_norm]
        if "bias" not in shapes:
            norms.insert(0, forms.rms_norm)
        yield from sorted(norms, key=lambda maker: not _named(maker, named, module))
    elif "embedding" in shapes:
        yield forms.embedding
    elif "negative_slope" in shapes:
        yield forms.prelu


def _kernels(shapes: Shapes) -> Iterator[Maker]:
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


def _named(maker: Maker, default: str, module: str) -> bool:
    """Whether a maker is the one of the class that a name says."""
    function = maker.func if isinstance(maker, functools.partial) else maker
    if default in _DEFAULTS:
        return _DEFAULTS[default] is function
    said = module.lower()
    return any(word in said and function is made for word, made in _WORDS)


_DEFAULTS: Final[Mapping[str, Maker]] = {
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
_WORDS: Final[tuple[tuple[str, Maker], ...]] = (
    ("convtrans", forms.conv_transpose),
    ("conv_trans", forms.conv_transpose),
    ("deconv", forms.conv_transpose),
    ("conv", forms.conv),
    ("query", forms.dense_general),
    ("key", forms.dense_general),
    ("value", forms.dense_general),
    ("qkv", forms.dense_general),
    ("rms", forms.rms_norm),
    ("layer", forms.layer_norm),
    ("group", forms.group_norm),
)
"""A part of a module's name that a user gives -> what it says."""
