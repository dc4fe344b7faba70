"""`port` and `load`: a model's weights go into another model, whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from polyamp.errors import PortError, described
from polyamp.porting.check import Across, Batch, filled_and_checked
from polyamp.porting.layouts.canonical import Canonical
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.matching.flatten import Order
from polyamp.porting.progress import watched
from polyamp.porting.refusals import dtypes_differ
from polyamp.porting.report import PortReport
from polyamp.porting.settled import Settled, settled
from polyamp.porting.side import Side, side_of
from polyamp.porting.states.port_state import port_state
from polyamp.porting.states.sides import is_side

_Target = TypeVar("_Target")


def load(
    target: _Target,
    canonical: Canonical,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    batch: Any = None,
) -> tuple[_Target, PortReport]:
    """A model with the values of a `Canonical`: `port` with a source that was exported before.

    Args:
        target: the model that gets the values.
        canonical: what `export` or `porting.open` returned.
        names: as for `port`.
        strict: as for `port`.
        batch: inputs for the target, as for `export`.

    Raises:
        PortError: as `port` raises it. The target is then as it was.
    """
    if not isinstance(canonical, Canonical):
        raise PortError(
            "load takes what porting.export(model) or porting.open(path) returned. Received: "
            f"{described(canonical)}. polyamp.port(source, target) takes models."
        )
    ours = Side(canonical.inventory(), None, canonical)
    return moved(ours, side_of(target, batch, "load(target, canonical)"), names, strict, None)


def port(
    source: Any,
    target: _Target,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    check: Any = None,
) -> tuple[_Target, PortReport]:
    """Put a model's weights and running statistics, or a whole training state, into one of another framework.

    Layers are matched by structure, kind, shape and names, and never guessed; each array goes through its canonical
    layout, so that kernels are turned, gates reordered and projections packed as the target has them. What weights do
    not carry is compared and reported.

    Args:
        source: a model as `polyamp.init` takes it, a `Canonical`, or a file's path (`polyamp.porting` says which). For
            a training state that goes on: a polyamp state, a checkpoint's path, or `porting.training(...)`.
        target: the model that gets the values, or for a training state the state or `porting.training(...)`. In torch
            and Keras it is filled in place, at the end and whole; in JAX it gives the structure, and a model may be
            made by `jax.eval_shape`.
        names: regular expression -> replacement, applied in turn to the source's paths (divided by "/"), where names
            do not tell: `{r"^encoder/": "backbone/"}`.
        strict: False leaves what has no partner as it is, casts where dtypes differ, goes on where the recipes of two
            states differ, and reports all three.
        check: inputs for both models (a NumPy array, a tuple or a mapping), in the source's layout; not for training
            states. Both run in float32, and outputs and every parameter's gradient are compared. Also tells what linen
            and haiku models are made of. `porting.Batch` gives each side its own, and other tolerances.

    Returns:
        The target with the values, and a report: `print(report)`.

    Raises:
        PortError: a layer without a partner, several that nothing tells apart, other shapes or dtypes, a formula that
            the target does not have, or with `check` a model that computes something else; of training states also
            optimizers of two kinds, or other recipes. The target is as it was.
        ModelError: a model without variables, or no model.
        UnsupportedError: a backend whose models cannot be moved.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> source, target = MLP.random([4, 3, 1], seed=0), MLP.random([4, 3, 1], seed=1)
        >>> ported, report = polyamp.port(source, target)
        >>> print(report)
        2 layers moved
        >>> bool((ported.parameters["dense1/kernel"] == source.parameters["dense1/kernel"]).all())
        True
    """
    if is_side(source) or is_side(target):
        return _state_moved(source, target, names, strict, check)
    given = None if check is None else Batch.of(check)
    ours = side_of(source, None if given is None else given.source, "port(source, target)", files=True)
    theirs = side_of(target, None if given is None else given.target, "port(source, target)")
    if given is not None and given.target is None:  # where the target has its channels is known now
        given = dataclasses.replace(given, target=Across(ours.inventory, theirs.inventory).tree(given.source))
        theirs = side_of(target, given.target, "port(source, target)")
    return moved(ours, theirs, names, strict, given)


def _state_moved(
    source: Any, target: Any, names: Mapping[str, str] | None, strict: bool, check: Any
) -> tuple[Any, PortReport]:
    if check is not None:
        raise PortError(
            "check= compares models, before or after the training states move: polyamp.port(source.model, a_model, "
            "check=batch). Received: check= with a training state."
        )
    return port_state(source, target, names=names, strict=strict)


def moved(
    source: Side, target: Side, names: Mapping[str, str] | None, strict: bool, given: Any
) -> tuple[Any, PortReport]:
    """The target with the source's values, and the report; what `port` and `load` do.

    Args:
        source: where the values come from.
        target: what gets them.
        names: as for `port`.
        strict: as for `port`.
        given: the batches of a check; None without one.
    """
    way = settled(source.inventory, target.inventory, names, strict=strict)
    leaves, merges = values(way, target.inventory, strict=strict)
    notes = [*way.kept.check(leaves), *_said(way.turned), *way.compared.conventions, *_left(source.inventory)]
    assert target.converter is not None
    if given is None:
        with watched("filling the target", leaves) as shown:
            filled, measured = target.converter.fill(target.model, shown), None
    else:
        differences = way.compared.differences
        filled, measured = filled_and_checked(source, target, leaves, way.pairs, way.turned, given, differences)
    compared = way.compared
    return filled, PortReport(
        way.moved, compared.differences, merges, notes, way.missing, way.unused, compared.unseen, measured
    )


def values(way: Settled, target: Inventory, *, strict: bool) -> tuple[dict[str, Lazy], list[str]]:
    """The new value of every leaf of the target by its name, and what is merged."""
    leaves: dict[str, Lazy] = {}
    merges: list[str] = []
    wrong: list[str] = []
    for each in way.pairs:
        arrays = each.fit.source.arrays(each.source.arrays)
        if each.target.path in way.turned:
            arrays = way.turned[each.target.path].apply(arrays)
        merges += [f"{each.target.path}: {phrase}" for phrase in each.fit.target.losses(arrays)]
        for name, value in each.fit.target.leaves(arrays, each.target.arrays).items():
            leaf = each.target.leaves[name]
            if leaf.tied is not None:
                continue
            if value.dtype != leaf.array.dtype:
                if strict:
                    wrong.append(f"{leaf.name}: {leaf.array.dtype} here, {value.dtype} in the source")
                value = _cast(value, leaf.array.dtype)
            leaves[leaf.name] = value
    if wrong:
        raise dtypes_differ(wrong, target)
    return leaves, merges


def _cast(value: Lazy, dtype: Any) -> Lazy:
    return Lazy(value.shape, dtype, lambda: value.read().astype(dtype))


def _said(turned: Mapping[str, Order]) -> list[str]:
    return [
        f"{path}: {'rows' if order.rows else 'columns'} put from channels {'first' if order.first else 'last'} to "
        f"channels {'last' if order.first else 'first'}, for {order.beside} beside it has {order.channels} channels"
        for path, order in turned.items()
    ]


def _left(source: Inventory) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in source.left.items():
        reasons.setdefault(why, []).append(name)
    return [
        f"not moved: {', '.join(found[:3])}{f' and {len(found) - 3} more' if len(found) > 3 else ''} ({why})"
        for why, found in reasons.items()
    ]
