"""`port` and `load`: transfer of a model's weights into another model, either completely or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from polyamp.errors import PortError, describe_value, join_first
from polyamp.porting.check import Batch, ChannelOrderAdapter, fill_and_check
from polyamp.porting.layouts.canonical_model import Canonical
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.flatten_order import ChannelOrder
from polyamp.porting.model_side import ModelSide, make_model_side
from polyamp.porting.port_errors import dtype_error
from polyamp.porting.port_report import PortReport
from polyamp.porting.progress import track_reads
from polyamp.porting.states.port_state import port_state
from polyamp.porting.states.training_side import is_training_side
from polyamp.porting.transfer_plan import TransferPlan, make_transfer_plan

_Target = TypeVar("_Target")


def load(
    target: _Target,
    canonical: Canonical,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    batch: Any = None,
) -> tuple[_Target, PortReport]:
    """Fill a model with the values of a `Canonical`; `port` with a previously exported source.

    Args:
        target: the model that receives the values.
        canonical: what `export` or `porting.open` returned.
        names: see `port`.
        strict: see `port`.
        batch: inputs for the target; see `export`.

    Raises:
        PortError: as for `port`. The target is then unchanged.
    """
    if not isinstance(canonical, Canonical):
        raise PortError(
            "load takes what porting.export(model) or porting.open(path) returned. Received: "
            f"{describe_value(canonical)}. polyamp.port(source, target) takes models."
        )
    ours = ModelSide(canonical.inventory(), None, canonical)
    return transfer_model(ours, make_model_side(target, batch, "load(target, canonical)"), names, strict, None)


def port(
    source: Any,
    target: _Target,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    check: Any = None,
) -> tuple[_Target, PortReport]:
    """Copy a model's weights and running statistics, or a whole training state, to a model or state of another
    framework.

    Layers are matched by structure, kind, shape and names, and never guessed. Each array is converted through its
    canonical layout, so that kernels are transposed, gates reordered and projections packed for the target. Settings
    that weights do not carry are compared and reported.

    Args:
        source: a model as `polyamp.init` accepts it, a `Canonical`, or a file's path (see `polyamp.porting`). To
            continue training: a polyamp state, a checkpoint's path, or `porting.training(...)`.
        target: the model that receives the values, or for a training state the state or `porting.training(...)`. In
            torch and Keras it is filled in place, completely and at the end. In JAX it provides the structure, and a
            model may be created by `jax.eval_shape`.
        names: regular expression -> replacement, applied in turn to the source's "/"-separated paths, if names do not
            determine a match: `{r"^encoder/": "backbone/"}`.
        strict: False keeps layers without a partner unchanged, casts if dtypes differ, continues if the recipes of
            two states differ, and reports all three.
        check: inputs for both models (a NumPy array, a tuple or a mapping), in the source's layout; not for training
            states. Both run in float32, and outputs and every parameter's gradient are compared. They also identify
            the layers of linen and haiku models. `porting.Batch` sets separate inputs for each side, and tolerances.

    Returns:
        The target with the values, and a report: `print(report)`.

    Raises:
        PortError: a layer has no partner, layers cannot be distinguished, shapes or dtypes differ, the target lacks a
            formula, or with `check` the outputs or gradients differ. For training states also: optimizers are of two
            kinds, or recipes differ. The target is unchanged.
        ModelError: a model without variables, or not a model.
        UnsupportedError: the backend's models cannot be moved.

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
    if is_training_side(source) or is_training_side(target):
        return _transfer_state(source, target, names, strict, check)
    given = None if check is None else Batch.of(check)
    ours = make_model_side(source, None if given is None else given.source, "port(source, target)", files=True)
    theirs = make_model_side(target, None if given is None else given.target, "port(source, target)")
    if given is not None and given.target is None:  # the target's channel position is known now
        given = dataclasses.replace(
            given, target=ChannelOrderAdapter(ours.inventory, theirs.inventory).tree(given.source)
        )
        theirs = make_model_side(target, given.target, "port(source, target)")
    return transfer_model(ours, theirs, names, strict, given)


def _transfer_state(
    source: Any, target: Any, names: Mapping[str, str] | None, strict: bool, check: Any
) -> tuple[Any, PortReport]:
    if check is not None:
        raise PortError(
            "check= compares models, before or after the training states move: polyamp.port(source.model, a_model, "
            "check=batch). Received: check= with a training state."
        )
    return port_state(source, target, names=names, strict=strict)


def transfer_model(
    source: ModelSide, target: ModelSide, names: Mapping[str, str] | None, strict: bool, given: Any
) -> tuple[Any, PortReport]:
    """Fill the target with the source's values, and return it with the report; implements `port` and `load`.

    Args:
        source: side that provides the values.
        target: side that receives them.
        names: see `port`.
        strict: see `port`.
        given: the batches of a check; None without a check.
    """
    plan, leaves, report = plan_values(source.inventory, target.inventory, names, strict=strict)
    assert target.converter is not None
    if given is None:
        with track_reads("filling the target", leaves) as shown:
            return target.converter.fill(target.model, shown), report
    filled, measured = fill_and_check(
        source, target, leaves, plan.pairs, plan.channel_orders, given, plan.comparison.differences
    )
    return filled, dataclasses.replace(report, checked=measured)


def plan_values(
    source: Inventory, target: Inventory, names: Mapping[str, str] | None, *, strict: bool
) -> tuple[TransferPlan, dict[str, Lazy], PortReport]:
    """Return the plan of a transfer, the new value of every leaf of the target by name, and the report."""
    plan = make_transfer_plan(source, target, names, strict=strict)
    leaves, merges = new_leaf_values(plan, target, strict=strict)
    comparison = plan.comparison
    notes = [
        *plan.tie_constraints.check(leaves),
        *_describe_orders(plan.channel_orders),
        *comparison.conventions,
        *_describe_left_arrays(source),
    ]
    report = PortReport(plan.moved, comparison.differences, merges, notes, plan.missing, plan.unused, comparison.unseen)
    return plan, leaves, report


def new_leaf_values(plan: TransferPlan, target: Inventory, *, strict: bool) -> tuple[dict[str, Lazy], list[str]]:
    """Return the new value of every leaf of the target by name, and notes about merged arrays."""
    leaves: dict[str, Lazy] = {}
    merges: list[str] = []
    wrong: list[str] = []
    for each in plan.pairs:
        arrays = each.fit.source.arrays(each.source.arrays)
        if each.target.path in plan.channel_orders:
            arrays = plan.channel_orders[each.target.path].apply(arrays)
        merges += [f"{each.target.path}: {phrase}" for phrase in each.fit.target.losses(arrays)]
        for name, value in each.fit.target.leaves(arrays, each.target.arrays).items():
            leaf = each.target.leaves[name]
            if leaf.tied is not None:
                continue
            if value.dtype != leaf.array.dtype:
                if strict:
                    wrong.append(f"{leaf.name}: {leaf.array.dtype} here, {value.dtype} in the source")
                value = _lazy_cast(value, leaf.array.dtype)
            leaves[leaf.name] = value
    if wrong:
        raise dtype_error(wrong, target)
    return leaves, merges


def _lazy_cast(value: Lazy, dtype: Any) -> Lazy:
    return Lazy(value.shape, dtype, lambda: value.read().astype(dtype))


def _describe_orders(orders: Mapping[str, ChannelOrder]) -> list[str]:
    return [
        f"{path}: {'rows' if order.rows else 'columns'} put from channels {'first' if order.first else 'last'} to "
        f"channels {'last' if order.first else 'first'}, for {order.neighbour} beside it has {order.channels} channels"
        for path, order in orders.items()
    ]


def _describe_left_arrays(source: Inventory) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in source.left.items():
        reasons.setdefault(why, []).append(name)
    return [f"not moved: {join_first(found, 3)} ({why})" for why, found in reasons.items()]
