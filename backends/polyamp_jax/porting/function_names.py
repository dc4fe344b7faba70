"""What the arrays of a plain function may be, by their names and shapes. Called by `function`, and by `equinox` for
modules of the user's own.

Likeliest first; the partner on the other side of a port decides. A square kernel may be (inputs, features) or
(features, inputs), and has a form for each: nothing tells, and matching refuses it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.operations import Reshape, Shape, Transpose

Shapes = Mapping[str, Shape]


class Group(NamedTuple):
    """Arrays that are one layer.

    Attributes:
        path: of the layer, from the container that holds them; "" where it is the container.
        names: name of an array in the container -> its name in the forms.
        forms: what they may be.
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


def groups(path: str, shapes: Shapes, *, others: bool = False) -> Iterator[Group]:
    """The layers among the arrays of one container, in their order.

    Args:
        path: of the container.
        shapes: of its arrays by name.
        others: whether the container holds more than these arrays. Then, and where it has no name, a layer of one
            array has the array's path.
    """
    by_key: dict[str, dict[str, str]] = {}
    for name in shapes:
        key, role = _key(name, shapes)
        by_key.setdefault(key, {})[role] = name
    for key, roles in by_key.items():
        names, forms = _layer(key or path, {role: shapes[name] for role, name in roles.items()})
        if forms:
            lone = len(names) == 1 and not key and (others or len(shapes) > 1 or not path)
            place = roles[next(iter(names))] if lone else key
            yield Group(place, {roles[role]: local for role, local in names.items()}, forms)
        for role, name in roles.items():
            if role not in names:
                yield Group(name, {name: "value"}, single(f"{path}/{name}", shapes[name]))


def _key(name: str, shapes: Shapes) -> tuple[str, str]:
    """(what arrays of one layer have in common, the role in it) of an array's name."""
    lower = name.lower()
    if any(lower in words for words in _ROLES.values()):
        return "", lower
    if set(shapes) == {"0", "1"}:  # (kernel, bias), as in JAX's own examples
        return "", "kernel" if name == "0" else "bias"
    for pattern in (_NUMBERED, _PREFIXED):
        if match := pattern.fullmatch(name):
            return match["key"], match["role"].lower()
    return name, "value"


def _layer(path: str, roles: Shapes) -> tuple[dict[str, str], tuple[Form, ...]]:
    """The layer that arrays of these roles are: role as it is spelt -> canonical role, and its forms."""
    spelt = {
        role: next((each for each in roles if each in words and _rank(role, roles[each])), "")
        for role, words in _ROLES.items()
    }
    has = {role: roles[each] for role, each in spelt.items() if each}
    if "kernel" in has:
        named = "weight" in spelt["kernel"]
        forms = kernels(has["kernel"], has.get("bias"), turned_first=named)
        chosen: tuple[str, ...] = ("kernel", "bias") if "bias" in has else ("kernel",)
    elif "scale" in has and ("bias" in has or len(roles) == 1 or "mean" in has):
        chosen = tuple(role for role in ("scale", "bias", "mean", "variance") if role in has)
        forms = norms(path, chosen)
    elif "table" in has:
        chosen, forms = ("table",), (Form("embedding", (Rule(("table",), ("table",)),)), _parameter("table"))
    else:
        return {}, ()
    return {spelt[role]: role for role in chosen}, forms


def _rank(role: str, shape: Shape) -> bool:
    """Whether an array of this shape may have a role."""
    if role == "kernel":
        return 2 <= len(shape) <= 5
    return len(shape) == 2 if role == "table" else role == "bias" or len(shape) == 1


def kernels(kernel: Shape, bias: Shape | None, *, turned_first: bool = False) -> tuple[Form, ...]:
    """Forms of a kernel and a bias, under the names "kernel" and "bias".

    Args:
        kernel: shape of the kernel.
        bias: of the bias, if there is one.
        turned_first: features come before inputs, as torch has them, more likely than behind.
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


def norms(path: str, roles: tuple[str, ...]) -> tuple[Form, ...]:
    """Forms of a norm, by what it has."""
    rules = tuple(Rule((role,), (role,)) for role in roles)
    if "mean" in roles:
        return (Form("batch_norm", rules),)
    kinds = ["layer_norm", "group_norm"]
    if roles == ("scale",):
        kinds.insert(1 if re.search(r"layer|ln", path.lower()) else 0, "rms_norm")
    elif re.search("group|gn", path.lower()):
        kinds.reverse()
    found = tuple(Form(kind, rules) for kind in kinds)
    return (*found, _parameter("scale")) if roles == ("scale",) else found


def single(path: str, shape: Shape) -> tuple[Form, ...]:
    """Forms of an array whose name says no role, under the name "value"."""
    name, plain = path.rpartition("/")[2].lower(), _parameter("value")
    if len(shape) == 1 and re.search(r"norm|ln|rms|scale|gamma", name):
        return (*(Form(kind, (Rule(("value",), ("scale",)),)) for kind in ("rms_norm", "layer_norm")), plain)
    if len(shape) != 2 or re.search(r"cls|class|pos|token$|query$", name):
        return (plain, Form("embedding", (Rule(("value",), ("table",)),))) if len(shape) == 2 else (plain,)
    table = (Form("embedding", (Rule(("value",), ("table",)),)), plain)
    if re.search(r"emb|wte|wpe|vocab|table|tok", name):
        return table
    turn = (Transpose((1, 0)),)
    return (*(Form("dense", (Rule(("value",), ("kernel",), each),)) for each in ((), turn)), *table)


def _parameter(name: str) -> Form:
    return Form("parameter", (Rule((name,), ("value",)),))
