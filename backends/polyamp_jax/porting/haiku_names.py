"""What a layer of haiku may be, by the names and shapes of its arrays. Called by `haiku`.

haiku names a module that the user does not name after its class ("conv2_d_transpose_1"), and its arrays are named
alike in all modules. Likeliest first; the partner on the other side of a port decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import haiku as hk

from polyamp.porting.layouts.forms import Form, Rule, same
from polyamp.porting.layouts.operations import Shape
from polyamp_jax.porting import haiku_forms as forms
from polyamp_jax.porting.flax_forms import RefusedError
from polyamp_jax.porting.haiku_forms import Maker, Seen, Shapes, flat

Whole = Callable[[Shapes], tuple[Form, ...]]
_SLOPE: Final = re.compile(r"slope|alpha|prelu")
_RECURRENT: Final = re.compile(r"lstm|rnn|cell|core|recurrent|forward|backward|fwd|bwd")


def composite(path: str, seen: Seen | None, children: Mapping[str, Shapes]) -> Whole | None:
    """What modules in one module are together: haiku's attention and recurrent cores are made of dense layers.

    Args:
        path: of the module around them.
        seen: what a call showed of it.
        children: name -> shapes of the arrays, of each module in it.
    """
    names = set(children)
    dense = all(set(shapes) <= {"w", "b"} and len(shapes.get("w", ())) == 2 for shapes in children.values())
    if not dense:
        return None
    name = path.rpartition("/")[2].lower()
    module = None if seen is None else seen.module
    if names == {"query", "key", "value", "linear"} and (module is None or isinstance(module, hk.MultiHeadAttention)):
        return forms.attentions if seen is None else lambda shapes: (forms.attention(shapes, seen),)
    if names == {"linear", "linear_1"} and (
        isinstance(module, hk.VanillaRNN) or (module is None and re.fullmatch(r"vanilla_rnn(_\d+)?", name))
    ):
        return lambda shapes: (forms.simple_rnn(shapes, seen),)
    if names == {"linear"} and (isinstance(module, hk.LSTM) or (module is None and _RECURRENT.search(name))):
        if isinstance(module, hk.LSTM):
            return lambda shapes: (forms.lstm(shapes, seen),)
        return (lambda shapes: _fitting((forms.lstm, forms.dense), shapes)) if _may_be_lstm(children) else None
    return None


def _may_be_lstm(children: Mapping[str, Shapes]) -> bool:
    return any(form.kind == "lstm" for form in _fitting((forms.lstm,), children["linear"]))


def by_names(path: str, shapes: Shapes) -> tuple[Form, ...]:
    """Forms of those arrays of a module that make a layer; none where they make none.

    Args:
        path: of the module.
        shapes: by name.
    """
    name = path.rpartition("/")[2].lower()
    chosen = {leaf: shape for leaf, shape in shapes.items() if leaf in _LEAVES}
    found = _fitting(tuple(_candidates(name, chosen)), chosen)
    if found and len(chosen) == 1 and "w" not in chosen:
        (leaf,) = chosen
        return (*found, Form("parameter", (Rule((leaf,), ("value",)),)))
    return found


def parameter(name: str, shape: Shape) -> tuple[Form, ...]:
    """Forms of a parameter of no module of haiku's: `hk.get_parameter`.

    Args:
        name: its own.
        shape: its shape.
    """
    plain = Form("parameter", same("value"))
    if len(shape) <= 1 and _SLOPE.search(name.lower()):
        return Form("prelu", (flat("value", "slope", shape),)), plain
    return (plain,)


_LEAVES: Final = ("w", "b", "w_i", "w_h", "scale", "offset", "embeddings", "mean", "variance")


def _candidates(name: str, shapes: Shapes) -> Iterator[Maker]:
    if {"w_i", "w_h", "b"} <= set(shapes):
        yield forms.gru
    elif "w" in shapes:
        yield from _kernels(name, shapes)
    elif "embeddings" in shapes:
        yield forms.embedding
    elif "mean" in shapes and "variance" in shapes:
        yield forms.batch_norm
    elif "scale" in shapes or "offset" in shapes:
        norms = [forms.norm, forms.group_norm, forms.instance_norm]
        if "offset" not in shapes:
            norms.insert(0, forms.rms_norm)
        yield from sorted(norms, key=lambda maker: not any(w in name and maker is of for w, of in _WORDS))


_WORDS: Final[tuple[tuple[str, Maker], ...]] = (
    ("rms", forms.rms_norm),
    ("layer", forms.norm),
    ("group", forms.group_norm),
    ("instance", forms.instance_norm),
)
"""A part of a module's name -> what it says."""


def _kernels(name: str, shapes: Shapes) -> Iterator[Maker]:
    kernel, bias = shapes["w"], shapes.get("b")
    features = None if bias is None else max(bias, default=1)
    if len(kernel) == 2:
        if features in (None, kernel[1]):
            yield forms.dense
            if name == "linear":  # the one in hk.LSTM
                yield forms.lstm
    elif 3 <= len(kernel) <= 5:
        both: list[Maker] = [forms.conv] if features in (None, kernel[-1]) else []
        both += [forms.conv_transpose] if features in (None, kernel[-2]) else []
        yield from reversed(both) if re.search("transpose|deconv", name) else both


def _fitting(makers: tuple[Maker, ...], shapes: Shapes) -> tuple[Form, ...]:
    found: list[Form] = []
    for maker in makers:
        try:
            form = maker(shapes, None)
        except RefusedError:
            continue
        if form not in found and sorted(name for rule in form.rules for name in rule.native) == sorted(shapes):
            found.append(form)
    return tuple(found)
