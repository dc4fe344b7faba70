"""What lies where in an optax state: which arrays are whose moments, and what counts updates. Called by `states`.

The state is walked: of optax's own states the fields are known by name; whatever else keeps an array for a parameter is
refused by name. Nothing is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from polyamp.porting.states.layout import Count
from polyamp_jax.arrays import path_name

_SLOTS: Final[Mapping[str, Mapping[str, str]]] = {
    "ScaleByAdamState": {"mu": "exp_avg", "nu": "exp_avg_sq"},
    "TraceState": {"trace": "momentum"},
    "ScaleByRmsState": {"nu": "square_avg"},
    "ScaleByRStdDevState": {"mu": "grad_avg", "nu": "square_avg"},
    "ScaleByRssState": {"sum_of_squares": "sum"},
    "ScaleByLionState": {"mu": "exp_avg"},
}
"""Class of an optax state -> its field -> what polyamp's specs call it."""
_KINDS: Final = {
    "ScaleByAdamState": "adam",
    "ScaleByRmsState": "rmsprop",
    "ScaleByRStdDevState": "rmsprop",
    "ScaleByRssState": "adagrad",
    "ScaleByLionState": "lion",
}
_COUNTED: Final = ("ScaleByAdamState",)
"""States whose count belongs to their parameters, for bias correction; every other count is a schedule's."""


@dataclasses.dataclass
class Found:
    """What a walk through an optimizer's state found.

    Attributes:
        slots: slot -> parameter -> array.
        counts: parameter -> where its updates are counted.
        positions: arrays that count applied updates.
        kinds: kinds of optimizers, in the state's order.
        order: classes of states, in the state's order.
        refused: what keeps arrays that no other optimizer has, a phrase each.
    """

    slots: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    counts: dict[str, Count] = dataclasses.field(default_factory=dict)
    positions: list[str] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)
    order: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of optimizer, as polyamp calls it; "" for several."""
        kinds = list(dict.fromkeys(self.kinds))
        return "sgd" if not kinds else kinds[0] if len(kinds) == 1 else ""


def found_in(opt_state: Any, parameters: Sequence[str], prefix: str = "optimizer") -> Found:
    """What lies where in an optax state.

    Args:
        opt_state: the state.
        parameters: paths of the parameters, in the order of their leaves.
        prefix: what the names of its arrays begin with.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> found = found_in(optax.adam(1e-3).init({"w": jnp.zeros(3)}), ["w"])
        >>> found.kind, found.slots["exp_avg"], found.counts["w"].array
        ('adam', {'w': 'optimizer/0/mu/w'}, 'optimizer/0/count')
    """
    found = Found()
    _walk(opt_state, prefix, parameters, found)
    for slot, names in found.slots.items():
        if found.kinds.count("adam") > 1 and len(names) != len(set(names.values())):
            found.refused.append(f"several arrays for the {slot} of one parameter")
    return found


def _walk(node: Any, prefix: str, parameters: Sequence[str], found: Found) -> None:
    kind = type(node).__name__
    if kind == "FormulaState":
        _formula(node, prefix, parameters, found)
        return
    fields = getattr(node, "_fields", None)
    if fields is None and not isinstance(node, Mapping | list | tuple):
        _unknown(node, prefix, parameters, found)
        return
    if kind == "InjectStatefulHyperparamsState" or kind == "InjectHyperparamsState":
        _walk(node.inner_state, f"{prefix}/inner_state", parameters, found)
        found.positions.append(f"{prefix}/count")
        return
    if kind == "MultiStepsState":
        found.refused.append("gradients that optax.MultiSteps has accumulated")
        return
    known = _SLOTS.get(kind, {})
    if fields is not None:
        found.order.append(kind)
        if kind in _KINDS:
            found.kinds.append(_KINDS[kind])
    for name, part in _parts(node):
        own = f"{prefix}/{name}"
        if name in known:
            _slot(known[name], part, own, parameters, found, f"{prefix}/count" if kind in _COUNTED else "")
        elif name == "count" and fields is not None:
            if kind not in _COUNTED:
                found.positions.append(own)
        else:
            _walk(part, own, parameters, found)


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(node, "_fields"):
        yield from ((name, getattr(node, name)) for name in node._fields)
    elif isinstance(node, Mapping):
        yield from ((str(name), node[name]) for name in node)
    else:
        yield from ((str(number), part) for number, part in enumerate(node))


def _slot(slot: str, tree: Any, prefix: str, parameters: Sequence[str], found: Found, count: str) -> None:
    own = found.slots.setdefault(slot, {})
    for name in _names(tree):
        if name not in parameters:
            continue
        if name in own:
            found.refused.append(f"two arrays for the {slot} of {name!r}")
        own[name] = f"{prefix}/{name}" if name else prefix
        if count:
            found.counts[name] = Count(count)


def _names(tree: Any) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _formula(node: Any, prefix: str, parameters: Sequence[str], found: Found) -> None:
    """Of polyamp's own formulas."""
    for slot, tree in node.slots.items():
        _slot(slot, tree, f"{prefix}/slots/{slot}", parameters, found, "")
    for number, name in enumerate(parameters):
        found.counts[name] = Count(f"{prefix}/count", f"{prefix}/missed", number)
    found.positions.append(f"{prefix}/count")


def _unknown(node: Any, prefix: str, parameters: Sequence[str], found: Found) -> None:
    """A leaf that is no field of a known state: a number is left as it is, an array of a parameter is refused."""
    owner = next((path for path in parameters if path and prefix.endswith(f"/{path}")), None)
    if owner is not None and hasattr(node, "shape") and node.shape != ():
        what = prefix.removesuffix(f"/{owner}").rpartition("/")[2]
        phrase = f"{what!r}, an array for each parameter"
        if phrase not in found.refused:
            found.refused.append(phrase)
