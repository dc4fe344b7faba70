"""Layout of an optax state: the moments of each parameter, and the arrays that count updates.

The fields of optax's own states are known by name. Any other state with an array for a parameter is refused, with its
name in the message. No values are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from polyamp.porting.states.optimizer_layout import UpdateCount
from polyamp.recipe.optimizer_spec import NativeOptimizer
from polyamp.recipe.optimizers import SPECS
from polyamp_jax.arrays import path_name

_STATES: Final[Mapping[str, tuple[str, NativeOptimizer]]] = {
    native.name.rpartition(".")[2]: (spec.tag, native) for spec in SPECS for native in spec.native.get("optax", ())
}
"""Class of an optax state -> the spec's tag, and its description. A count that is not its parameters', for bias
correction, belongs to a schedule."""


@dataclasses.dataclass
class OptaxEntries:
    """Entries found in an optimizer's state.

    Attributes:
        slots: slot -> parameter -> array.
        counts: parameter -> the array that counts its updates.
        positions: arrays that count applied updates.
        kinds: kinds of optimizers, in the state's order.
        order: classes of states, in the state's order.
        notes: how the formulas differ from polyamp's, a sentence each.
        refused: one phrase for each part with arrays that no other optimizer has.
    """

    slots: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    counts: dict[str, UpdateCount] = dataclasses.field(default_factory=dict)
    positions: list[str] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)
    order: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of optimizer in polyamp's terms; "" for several."""
        kinds = list(dict.fromkeys(self.kinds))
        return "sgd" if not kinds else kinds[0] if len(kinds) == 1 else ""


def inspect_optax_state(opt_state: Any, parameters: Sequence[str]) -> OptaxEntries:
    """Return the entries of an optax state.

    Args:
        opt_state: the state.
        parameters: paths of the parameters, in the order of their leaves.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> found = inspect_optax_state(optax.adam(1e-3).init({"w": jnp.zeros(3)}), ["w"])
        >>> found.kind, found.slots["exp_avg"], found.counts["w"].array
        ('adam', {'w': 'optimizer/0/mu/w'}, 'optimizer/0/count')
    """
    found = OptaxEntries()
    _walk_state(opt_state, "optimizer", parameters, found)
    for slot, names in found.slots.items():
        if found.kinds.count("adam") > 1 and len(names) != len(set(names.values())):
            found.refused.append(f"several arrays for the {slot} of one parameter")
        if parameters and not names:
            found.refused.append(f"the arrays of its {slot} have the names of none of the model's parameters")
    return found


def _walk_state(node: Any, prefix: str, parameters: Sequence[str], entries: OptaxEntries) -> None:
    kind = type(node).__name__
    if kind == "FormulaState":
        _add_formula(node, prefix, parameters, entries)
        return
    fields = getattr(node, "_fields", None)
    if fields is None and not isinstance(node, Mapping | list | tuple):
        _add_unknown(node, prefix, parameters, entries)
        return
    if kind == "InjectStatefulHyperparamsState" or kind == "InjectHyperparamsState":
        _walk_state(node.inner_state, f"{prefix}/inner_state", parameters, entries)
        entries.positions.append(f"{prefix}/count")
        return
    if kind == "MultiStepsState":
        entries.refused.append("gradients that optax.MultiSteps has accumulated")
        return
    tag, native = _STATES.get(kind, ("", NativeOptimizer("", counts=False)))
    if fields is not None:
        entries.order.append(kind)
        if tag not in ("", "sgd"):  # a trace alone is SGD, and a part of other optimizers
            entries.kinds.append(tag)
            entries.notes += [native.note] if native.note else []
    for name, part in _named_children(node):
        own = f"{prefix}/{name}"
        if name in native.slots:
            _add_slot(native.slots[name], part, own, parameters, entries, f"{prefix}/count" if native.counts else "")
        elif name == "count" and fields is not None:
            if not native.counts:
                entries.positions.append(own)
        else:
            _walk_state(part, own, parameters, entries)


def _named_children(node: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(node, "_fields"):
        yield from ((name, getattr(node, name)) for name in node._fields)
    elif isinstance(node, Mapping):
        yield from ((str(name), node[name]) for name in node)
    else:
        yield from ((str(number), part) for number, part in enumerate(node))


def _add_slot(slot: str, tree: Any, prefix: str, parameters: Sequence[str], entries: OptaxEntries, count: str) -> None:
    own = entries.slots.setdefault(slot, {})
    for path in _leaf_names(tree):
        name = path if path in parameters else path.removesuffix("/value")  # an nnx.State holds variables
        if name not in parameters:
            continue
        if name in own:
            entries.refused.append(f"two arrays for the {slot} of {name!r}")
        own[name] = f"{prefix}/{path}" if path else prefix
        if count:
            entries.counts[name] = UpdateCount(count)


def _leaf_names(tree: Any) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _add_formula(node: Any, prefix: str, parameters: Sequence[str], entries: OptaxEntries) -> None:
    """Add the entries of polyamp's own `FormulaState`."""
    for slot, tree in node.slots.items():
        _add_slot(slot, tree, f"{prefix}/slots/{slot}", parameters, entries, "")
    for number, name in enumerate(parameters):
        entries.counts[name] = UpdateCount(f"{prefix}/count", f"{prefix}/missed", number)
    entries.positions.append(f"{prefix}/count")


def _add_unknown(node: Any, prefix: str, parameters: Sequence[str], entries: OptaxEntries) -> None:
    """Handle a leaf outside the known states: ignore a number, refuse an array for a parameter."""
    owner = next((path for path in parameters if path and prefix.endswith(f"/{path}")), None)
    if owner is not None and hasattr(node, "shape") and node.shape != ():
        what = prefix.removesuffix(f"/{owner}").rpartition("/")[2]
        phrase = f"{what!r}, an array for each parameter"
        if phrase not in entries.refused:
            entries.refused.append(phrase)
