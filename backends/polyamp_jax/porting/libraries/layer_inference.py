"""Possible forms of arrays without known classes, inferred from their names and shapes.

The likeliest form comes first; the partner on the other side of a port decides. A square kernel may be (inputs,
features) or (features, inputs), and has a form for each. These are indistinguishable, so matching refuses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from polyamp.porting.layouts.layer_layout import Form, Rule, parameter_form
from polyamp.porting.layouts.operations import Reshape, Shape, Transpose

Shapes = Mapping[str, Shape]


class ArrayGroup(NamedTuple):
    """Arrays of one layer.

    Attributes:
        path: path of the layer in its container; "" if it is the container.
        names: name of an array in the container -> its name in the forms.
        forms: possible forms.
    """

    path: str
    names: Mapping[str, str]
    forms: tuple[Form, ...]


_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "kernel": ("w", "kernel", "weight", "weights"),
    "bias": ("b", "bias", "beta", "offset"),
    "scale": ("scale", "gamma", "g", "weight", "w"),
    "mean": ("mean", "running_mean", "moving_mean"),
    "variance": ("var", "variance", "running_var", "moving_var", "moving_variance"),
    "table": ("embedding", "embeddings", "table", "emb"),
}
_WORDS: Final = "|".join(sorted({word for words in _ROLES.values() for word in words}, key=len, reverse=True))
_NUMBERED: Final = re.compile(rf"(?i)(?P<role>{_WORDS})_?(?P<key>\d+)")
_PREFIXED: Final = re.compile(rf"(?i)(?P<key>.+)[_.](?P<role>{_WORDS})")


def group_arrays(path: str, shapes: Shapes, *, others: bool = False) -> Iterator[ArrayGroup]:
    """Yield the layers among the arrays of one container, in their order.

    Args:
        path: path of the container.
        shapes: shapes of its arrays by name.
        others: whether the container has more than these arrays. Then, or if the container has no name, a layer of one
            array has the array's path.
    """
    by_key: dict[str, dict[str, str]] = {}
    for name in shapes:
        key, role = _group_key(name, shapes)
        by_key.setdefault(key, {})[role] = name
    for key, roles in by_key.items():
        names, forms = _layer_forms(key or path, {role: shapes[name] for role, name in roles.items()})
        if forms:
            lone = len(names) == 1 and not key and (others or len(shapes) > 1 or not path)
            place = roles[next(iter(names))] if lone else key
            yield ArrayGroup(place, {roles[role]: local for role, local in names.items()}, forms)
        for role, name in roles.items():
            if role not in names:
                yield ArrayGroup(name, {name: "value"}, single_array_forms(f"{path}/{name}", shapes[name]))


def _group_key(name: str, shapes: Shapes) -> tuple[str, str]:
    """Split an array's name into (key shared by the arrays of one layer, role in the layer)."""
    lower = name.lower()
    if any(lower in words for words in _ROLES.values()):
        return "", lower
    if set(shapes) == {"0", "1"}:  # (kernel, bias), as in JAX's own examples
        return "", "kernel" if name == "0" else "bias"
    for pattern in (_NUMBERED, _PREFIXED):
        if match := pattern.fullmatch(name):
            return match["key"], match["role"].lower()
    return name, "value"


def _layer_forms(path: str, roles: Shapes) -> tuple[dict[str, str], tuple[Form, ...]]:
    """Return the layer of arrays with these roles: role as spelt -> canonical role, and its forms."""
    spelt = {
        role: next((each for each in roles if each in words and _is_role_shape(role, roles[each])), "")
        for role, words in _ROLES.items()
    }
    has = {role: roles[each] for role, each in spelt.items() if each}
    if "kernel" in has:
        named = "weight" in spelt["kernel"]
        forms = kernel_forms(has["kernel"], has.get("bias"), turned_first=named)
        chosen: tuple[str, ...] = ("kernel", "bias") if "bias" in has else ("kernel",)
    elif "scale" in has and ("bias" in has or len(roles) == 1 or "mean" in has):
        chosen = tuple(role for role in ("scale", "bias", "mean", "variance") if role in has)
        forms = norm_forms(path, chosen)
    elif "table" in has:
        chosen, forms = ("table",), (Form("embedding", (Rule(("table",), ("table",)),)), parameter_form("table"))
    else:
        return {}, ()
    return {spelt[role]: role for role in chosen}, forms


def _is_role_shape(role: str, shape: Shape) -> bool:
    """Return whether an array of this shape may have this role."""
    if role == "kernel":
        return 2 <= len(shape) <= 5
    return len(shape) == 2 if role == "table" else role == "bias" or len(shape) == 1


def kernel_forms(kernel: Shape, bias: Shape | None, *, turned_first: bool = False) -> tuple[Form, ...]:
    """Return possible forms of a kernel and a bias, under the names "kernel" and "bias".

    Args:
        kernel: shape of the kernel.
        bias: shape of the bias, if there is one.
        turned_first: whether (features, inputs), as in torch, is likelier than (inputs, features).
    """
    rank = len(kernel)
    features = None if bias is None else math.prod(bias)
    flat: tuple[Rule, ...] = ()
    if bias is not None:
        if bias == () or sum(length != 1 for length in bias) > 1:
            return ()
        flat = (Rule(("bias",), ("bias",), (Reshape(bias, (math.prod(bias),)),) if len(bias) > 1 else ()),)
    kind = "dense" if rank == 2 else "conv"
    straight = [Form(kind, (Rule(("kernel",), ("kernel",)), *flat))] if features in (None, kernel[-1]) else []
    axes = (*range(2, rank), 1, 0)
    turned = []
    if features in (None, kernel[0]):
        turned = [Form(kind, (Rule(("kernel",), ("kernel",), (Transpose(axes),)), *flat))]
    return tuple([*turned, *straight] if turned_first else [*straight, *turned])


def norm_forms(path: str, roles: tuple[str, ...]) -> tuple[Form, ...]:
    """Return possible forms of a norm, from the roles of its arrays."""
    rules = tuple(Rule((role,), (role,)) for role in roles)
    if "mean" in roles:
        return (Form("batch_norm", rules),)
    kinds = ["layer_norm", "group_norm"]
    if roles == ("scale",):
        kinds.insert(1 if re.search(r"layer|ln", path.lower()) else 0, "rms_norm")
    elif re.search("group|gn", path.lower()):
        kinds.reverse()
    found = tuple(Form(kind, rules) for kind in kinds)
    return (*found, parameter_form("scale")) if roles == ("scale",) else found


def single_array_forms(path: str, shape: Shape) -> tuple[Form, ...]:
    """Return possible forms of an array whose name indicates no role, under the name "value"."""
    name, plain = path.rpartition("/")[2].lower(), parameter_form()
    if len(shape) == 1 and re.search(r"norm|ln|rms|scale|gamma", name):
        return (*(Form(kind, (Rule(("value",), ("scale",)),)) for kind in ("rms_norm", "layer_norm")), plain)
    if len(shape) != 2 or re.search(r"cls|class|pos|token$|query$", name):
        return (plain, Form("embedding", (Rule(("value",), ("table",)),))) if len(shape) == 2 else (plain,)
    table = (Form("embedding", (Rule(("value",), ("table",)),)), plain)
    if re.search(r"emb|wte|wpe|vocab|table|tok", name):
        return table
    turn = (Transpose((1, 0)),)
    return (*(Form("dense", (Rule(("value",), ("kernel",), each),)) for each in ((), turn)), *table)
