"""`port` and `load`: transfer of a model's weights into another model, either completely or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from polyamp.errors import PortError, describe_value, join_first
from polyamp.porting.alike_layers import make_settler
from polyamp.porting.check import Batch
from polyamp.porting.layouts.canonical_model import Canonical
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_layout import Form
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.flatten_order import ChannelOrder, Rows
from polyamp.porting.matching.matching import LayerMatch
from polyamp.porting.model_run import fill_and_check, make_model_sides, trace_plan
from polyamp.porting.model_side import ModelSide, make_model_side
from polyamp.porting.port_report import PortReport, warn_of_differences
from polyamp.porting.progress import track_reads
from polyamp.porting.states.port_state import port_state
from polyamp.porting.states.training_side import is_training_side
from polyamp.porting.transfer_plan import PortOptions, TransferPlan, make_transfer_plan, new_leaf_values

_Target = TypeVar("_Target")


def load(
    target: _Target,
    canonical: Canonical,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    batch: Any = None,
    rows: Rows | None = None,
    forms: Mapping[str, str | Form] | None = None,
) -> tuple[_Target, PortReport]:
    """Fill a model with the values of a `Canonical`; `port` with a previously exported source.

    Args:
        target: the model that receives the values.
        canonical: what `export` or `porting.open` returned.
        names: see `port`.
        strict: see `port`.
        batch: inputs for the target; see `export`.
        rows: see `port`.
        forms: see `port`.

    Raises:
        PortError: as for `port`. The target is then unchanged.
    """
    if not isinstance(canonical, Canonical):
        raise PortError(
            "load takes what porting.export(model) or porting.open(path) returned. Received: "
            f"{describe_value(canonical)}. polyamp.port(source, target) takes models."
        )
    ours = ModelSide(canonical.inventory(), None, canonical)
    theirs = make_model_side(target, batch, "load(target, canonical)")
    filled, report = transfer_model(ours, theirs, PortOptions(names, strict, rows, forms), None)
    warn_of_differences(report, 2)
    return filled, report


def port(
    source: Any,
    target: _Target,
    *,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    rows: Rows | None = None,
    forms: Mapping[str, str | Form] | None = None,
    batch: Any = None,
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
            determine a match: `{r"^encoder/": "backbone/"}`. With fields in braces, names of modules on both sides:
            `{"block{n}{l}": "blocks/{i}"}`. A field is a number, or a letter if its name begins with "l"; modules
            correspond by the fields if both sides have the same, else in order.
        strict: False keeps layers without a partner unchanged, casts if dtypes differ, continues if the recipes of
            two states differ, and reports all three.
        rows: glob over the target's paths of dense layers -> "channels" for a layer next to a flatten of channels (its
            rows, or its columns before a reshape), None for one that is not: `{"fc": "channels", "film/*": None}`.
            Needed only where the channels are first on one side and last on the other, and there is no batch.
        forms: regular expression over the paths of either model -> layout of an array of no known layer, as the kernel
            (inputs, features) of its counterpart: "transpose", or a letter for each axis, with axes in parentheses
            joined: `{"rel_embedding": "transpose", "q_einsum": "ndh -> d(nh)"}`. An axis that is missing on the right
            stacks several layers: `{"kv_einsum": "ckdh -> d(kh)"}`. Or a `porting.Form`, of a layer of no known class.
            Not for training states.
        batch: inputs for both models (a NumPy array, a tuple or a mapping), in the source's layout. Both run in
            float32, which shows which of several alike layers is which, and the order in which dense layers take
            flattened channels. They also identify the layers of linen and haiku models. `porting.Batch` sets separate
            inputs for each side.
        check: the same; outputs and every parameter's gradient are compared too, within the tolerances of
            `porting.Batch`. Not for training states.

    Returns:
        The target with the values, and a report: `print(report)`. A warning names settings that differ (an epsilon, a
        momentum, an activation), for a caller who does not print it.

    Raises:
        PortError: a layer has no partner, layers cannot be distinguished, the order of a layer's rows is not known,
            shapes or dtypes differ, the target lacks a formula, or with `check` the outputs or gradients differ. For
            training states also: optimizers are of two kinds, or recipes differ. The target is unchanged.
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
    options = PortOptions(names, strict, rows, forms)
    if is_training_side(source) or is_training_side(target):
        if check is not None:
            raise PortError(
                "check= compares models, before or after the training states move: polyamp.port(source.model, a_model, "
                "check=batch). Received: check= with a training state. batch= shows alike layers and the order of rows."
            )
        if forms is not None:
            raise PortError(
                "forms= is for models: register a form for the layer's class (polyamp.porting.register) to move its "
                f"training state. Received: forms={describe_value(forms)}."
            )
        state, state_report = port_state(source, target, options, batch)
        warn_of_differences(state_report, 2)
        return state, state_report
    if check is not None and batch is not None:
        raise PortError("check= runs both models, as batch= does, and compares them. Give one of them. Received: both.")
    ours, theirs, given = make_model_sides(source, target, batch if check is None else check)
    filled, report = transfer_model(ours, theirs, options, given, check=check is not None)
    warn_of_differences(report, 2)
    return filled, report


def transfer_model(
    source: ModelSide, target: ModelSide, options: PortOptions, batch: Batch | None, *, check: bool = True
) -> tuple[Any, PortReport]:
    """Fill the target with the source's values, and return it with the report; implements `port` and `load`.

    Args:
        source: side that provides the values.
        target: side that receives them.
        options: how their layers correspond.
        batch: inputs for a run of both models; None without one.
        check: whether outputs and gradients of the run are compared.
    """
    strict = options.strict
    settle = None if batch is None or source.converter is None else make_settler(source, target, batch)
    plan = make_transfer_plan(source.inventory, target.inventory, **options._asdict(), settle=settle, absent_bias=True)
    assert target.converter is not None
    if batch is not None and check:
        filled, plan, measured, said = fill_and_check(source, target, plan, batch, strict=strict)
        _, report = _leaves_and_report(plan, source.inventory, target.inventory, strict=strict)
        return filled, dataclasses.replace(report, checked=measured, notes=[*report.notes, *said])
    said = []
    if batch is not None and source.converter is not None:
        plan, said = trace_plan(source, target, plan, batch, strict=strict)
    plan = plan.without_questions(strict=strict)
    leaves, report = _leaves_and_report(plan, source.inventory, target.inventory, strict=strict)
    report = dataclasses.replace(report, notes=[*report.notes, *said])
    with track_reads("filling the target", leaves) as shown:
        return target.converter.fill(target.model, shown), report


def plan_values(source: Inventory, target: Inventory, options: PortOptions) -> tuple[dict[str, Lazy], PortReport]:
    """Return the new value of every leaf of the target by name, and the report, without a run of the models."""
    plan = make_transfer_plan(source, target, **options._asdict(), absent_bias=True)
    plan = plan.without_questions(strict=options.strict)
    return _leaves_and_report(plan, source, target, strict=options.strict)


def _leaves_and_report(
    plan: TransferPlan, source: Inventory, target: Inventory, *, strict: bool
) -> tuple[dict[str, Lazy], PortReport]:
    leaves, merges = new_leaf_values(plan, target, strict=strict)
    comparison = plan.comparison
    notes = [
        *plan.tie_constraints.check(leaves),
        *_describe_orders(plan.channel_orders),
        *_describe_absent_biases(plan.pairs),
        *comparison.conventions,
        *_describe_left_arrays(source),
    ]
    report = PortReport(plan.moved, comparison.differences, merges, notes, plan.missing, plan.unused, comparison.unseen)
    return leaves, report


def _describe_orders(orders: Mapping[str, ChannelOrder]) -> list[str]:
    return [f"{path}: {order.describe()}" for path, order in orders.items()]


def _describe_absent_biases(pairs: Sequence[LayerMatch]) -> list[str]:
    filled = [each.target.path for each in pairs if each.fit.absent_bias == "source"]
    dropped = [each.source.path for each in pairs if each.fit.absent_bias == "target"]
    notes = []
    if filled:
        notes.append(f"biases that the source lacks are zeros, which train from now on: {join_first(filled, 3)}")
    if dropped:
        notes.append(f"biases that the target lacks were zeros, and are dropped: {join_first(dropped, 3)}")
    return notes


def _describe_left_arrays(source: Inventory) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in source.left.items():
        reasons.setdefault(why, []).append(name)
    return [f"not moved: {join_first(found, 3)} ({why})" for why, found in reasons.items()]
