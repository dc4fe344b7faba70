"""Possible forms of haiku's layers, inferred from the names and shapes of their arrays.

haiku names an unnamed module after its class ("conv2_d_transpose_1"), and its arrays have the same names in all
modules. The likeliest form comes first; the partner on the other side of a port decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import haiku as hk

from polyamp.porting.layouts.layer_layout import Form, parameter_form
from polyamp.porting.layouts.operations import Shape
from polyamp_jax.porting.libraries import haiku_layers as forms
from polyamp_jax.porting.libraries.flax_layers import RefusedError
from polyamp_jax.porting.libraries.haiku_layers import FormMaker, HaikuCall, Shapes, flat_array_rule

CompositeForms = Callable[[Shapes], tuple[Form, ...]]
_SLOPE: Final = re.compile(r"slope|alpha|prelu")
_RECURRENT: Final = re.compile(r"lstm|rnn|cell|core|recurrent|forward|backward|fwd|bwd")


def composite_forms(path: str, call: HaikuCall | None, children: Mapping[str, Shapes]) -> CompositeForms | None:
    """Return the forms of a layer made of several modules: haiku's attention and recurrent cores use dense layers.

    Args:
        path: path of the enclosing module.
        call: recorded call of it.
        children: name of each module in it -> shapes of its arrays.
    """
    names = set(children)
    dense = all(set(shapes) <= {"w", "b"} and len(shapes.get("w", ())) == 2 for shapes in children.values())
    if not dense:
        return None
    name = path.rpartition("/")[2].lower()
    module = None if call is None else call.module
    if names == {"query", "key", "value", "linear"} and (module is None or isinstance(module, hk.MultiHeadAttention)):
        return forms.attention_forms if call is None else lambda shapes: (forms.attention(shapes, call),)
    if names == {"linear", "linear_1"} and (
        isinstance(module, hk.VanillaRNN) or (module is None and re.fullmatch(r"vanilla_rnn(_\d+)?", name))
    ):
        return lambda shapes: (forms.simple_rnn(shapes, call),)
    if names == {"linear"} and (isinstance(module, hk.LSTM) or (module is None and _RECURRENT.search(name))):
        if isinstance(module, hk.LSTM):
            return lambda shapes: (forms.lstm(shapes, call),)
        return (lambda shapes: _fitting_forms((forms.lstm, forms.dense), shapes)) if _can_be_lstm(children) else None
    return None


def _can_be_lstm(children: Mapping[str, Shapes]) -> bool:
    return any(form.kind == "lstm" for form in _fitting_forms((forms.lstm,), children["linear"]))


def forms_by_name(path: str, shapes: Shapes) -> tuple[Form, ...]:
    """Return possible forms of those arrays of a module that make a layer; empty if there is no layer.

    Args:
        path: path of the module.
        shapes: shapes of its arrays by name.
    """
    name = path.rpartition("/")[2].lower()
    chosen = {leaf: shape for leaf, shape in shapes.items() if leaf in _ARRAY_NAMES}
    found = _fitting_forms(tuple(_candidate_makers(name, chosen)), chosen)
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


_ARRAY_NAMES: Final = ("w", "b", "w_i", "w_h", "scale", "offset", "embeddings", "mean", "variance")


def _candidate_makers(name: str, shapes: Shapes) -> Iterator[FormMaker]:
    if {"w_i", "w_h", "b"} <= set(shapes):
        yield forms.gru
    elif "w" in shapes:
        yield from _kernel_makers(name, shapes)
    elif "embeddings" in shapes:
        yield forms.embedding
    elif "mean" in shapes and "variance" in shapes:
        yield forms.batch_norm
    elif "scale" in shapes or "offset" in shapes:
        norms = [forms.norm, forms.group_norm, forms.instance_norm]
        if "offset" not in shapes:
            norms.insert(0, forms.rms_norm)
        yield from sorted(norms, key=lambda maker: not any(w in name and maker is of for w, of in _WORDS))


_WORDS: Final[tuple[tuple[str, FormMaker], ...]] = (
    ("rms", forms.rms_norm),
    ("layer", forms.norm),
    ("group", forms.group_norm),
    ("instance", forms.instance_norm),
)
"""A part of a module's name -> the form maker that it indicates."""


def _kernel_makers(name: str, shapes: Shapes) -> Iterator[FormMaker]:
    kernel, bias = shapes["w"], shapes.get("b")
    features = None if bias is None else max(bias, default=1)
    if len(kernel) == 2:
        if features in (None, kernel[1]):
            yield forms.dense
            if name == "linear":  # the dense layer in hk.LSTM
                yield forms.lstm
    elif 3 <= len(kernel) <= 5:
        both: list[FormMaker] = [forms.conv] if features in (None, kernel[-1]) else []
        both += [forms.conv_transpose] if features in (None, kernel[-2]) else []
        yield from reversed(both) if re.search("transpose|deconv", name) else both


def _fitting_forms(makers: tuple[FormMaker, ...], shapes: Shapes) -> tuple[Form, ...]:
    found: list[Form] = []
    for maker in makers:
        try:
            form = maker(shapes, None)
        except RefusedError:
            continue
        if form not in found and sorted(name for rule in form.rules for name in rule.native) == sorted(shapes):
            found.append(form)
    return tuple(found)
