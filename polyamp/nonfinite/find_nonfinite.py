"""`find_nonfinite`: runs one pass and names the first operation and module whose result is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.nonfinite.report import NonfiniteReport, ValueRange
from polyamp.parity.trace.observer import HasObserver, without_policies
from polyamp.parity.trace.operation_log import (
    OperationLog,
    OperationObserver,
    OperationRecord,
    OperationRecorder,
    PassLocation,
)
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import LossFunction
from polyamp.train.step import init
from polyamp.trees import leaves

Array = np.ndarray[Any, Any]
_ROOT: Final = "sqrt"
"""Function whose derivative is infinite at 0, where its result is finite."""
_STEEP: Final = frozenset(
    {"log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "div", "realdiv", "reciprocal", "inv", "rsqrt", "pow"}
    | {"asin", "acos", "atanh", "tan", _ROOT}
)
"""Functions whose derivative can be infinite, by the names that the frameworks have, in lower case."""
_LIST_HINT: Final = (
    "polyamp: find_nonfinite takes one batch. Received: batch, a list of {}. If it is the list of micro-batches of a "
    "step with accumulate_steps, pass one of them: find_nonfinite(loss_fn, policy, model, batch[0])."
)


def find_nonfinite(
    loss_fn: LossFunction,
    policy: Policy | str,
    model: Any,
    batch: Any,
    *,
    loss_scale: float | None = None,
    backend: str | None = None,
    **options: Any,
) -> NonfiniteReport:
    """Name the first operation and module whose result is inf or NaN although what it was given is finite.

    The pass runs on a copy of the model, uncompiled, forward and then backward; the model does not change. If a value
    is not finite, the pass runs again in float32, which shows whether precision is to blame. A value that is not finite
    and that no later value takes over, such as a mask of -inf before a softmax, is no fault.

    Args:
        loss_fn: `loss_fn(model, batch)`.
        policy: the policy, or its spelling.
        model: as `polyamp.init` takes it; `state.model` in the middle of a training.
        batch: one batch; of a list of micro-batches, one of them.
        loss_scale: the factor of the loss in the backward pass; by default that with which the policy's scaler begins.
        backend: its name, if the model does not determine it.
        **options: of `polyamp.init`.

    Raises:
        PolicyError: no policy, such as a model in its place.
        UnsupportedError: the backend cannot record its modules.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> loss_fn = lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1])
        >>> model = MLP.random([4, 8, 1], seed=0)
        >>> print(polyamp.find_nonfinite(loss_fn, "mixed_float16", model, np.full((2, 4), np.nan, "f4")))
        The batch is not finite: 8 elements of batch. This is no matter of precision.
    """
    made = Policy.of(policy, "find_nonfinite(loss_fn, policy, model, batch)")
    chosen = registry.get(backend) if backend is not None else registry.backend_for(model)
    if not isinstance(chosen, HasObserver):
        raise UnsupportedError(f"the {chosen.name} backend of this version cannot record modules.")
    scale = LossScaler.for_policy(made).init_scale if loss_scale is None else float(loss_scale)
    scale = scale if LossScaler.for_policy(made).scales or loss_scale is not None else 1.0
    bad = _nonfinite_data(chosen, batch)
    if bad:
        return NonfiniteReport(origin="data", module=bad, policy=str(made), loss_scale=scale)
    first = _run_pass(chosen, model, loss_fn, made, batch, scale, options)
    if first.origin in ("none", "parameters"):
        return first
    other = _run_pass(chosen, model, loss_fn, Policy("float32"), batch, 1.0, options)
    if other.output is not None and other.output.dtype in HALF_DTYPES:
        return msgspec.structs.replace(first, own_cast=other.output.dtype)
    return msgspec.structs.replace(first, by_precision=other.origin == "none")


class _CapturedValue(NamedTuple):
    """A value that a pass showed. Attributes: module; kind; dtype; whether it is finite."""

    module: str
    kind: str
    dtype: str
    finite: bool


def _run_pass(
    backend: Any, model: Any, loss_fn: LossFunction, policy: Policy, batch: Any, scale: float, options: dict[str, Any]
) -> NonfiniteReport:
    observer = backend.observer
    scaler = LossScaler.static(scale) if scale != 1.0 else LossScaler.off()
    recipe = Recipe(policy=policy, optimizer=sgd(0.0), scaler=scaler)
    empty = NonfiniteReport(origin="none", policy=str(policy), loss_scale=scale)
    values: list[_CapturedValue] = []

    def on_capture(path: str, what: str, array: Array, dtype: str) -> None:
        values.append(_CapturedValue(path.partition("#")[0], what, dtype, bool(np.isfinite(array).all())))

    with without_policies(observer, model), observer.model_copy(model) as twin, np.errstate(all="ignore"):
        state = init(twin, recipe, **options)
        for name, value in backend.export_state(state).items():
            if name.startswith("model/") and not np.isfinite(np.asarray(value, np.float64)).all():
                name = name.removeprefix("model/")
                return msgspec.structs.replace(empty, origin="parameters", module=name)
        try:
            record = observer.capture_pass(state, loss_fn, batch, on_capture)
        except Exception as error:
            if isinstance(batch, list):
                error.add_note(_LIST_HINT.format(len(batch)))
            raise
        finite = np.isfinite(record.loss)
        found = _backward_report(empty, values, record.gradients) if finite else None
        if finite and found is None:
            return empty
        log = _operations(observer, state, loss_fn, batch)
    return _forward_report(empty, values, log) if found is None else _with_operation(found, _steep_operation(log), log)


def _backward_report(
    empty: NonfiniteReport, values: list[_CapturedValue], gradients: Mapping[str, Array | None]
) -> NonfiniteReport | None:
    """Return the report of a pass whose loss is finite; None if its gradients are too."""
    cotangents = [each for each in values if each.kind == "cotangent"]
    for index, each in enumerate(cotangents):
        if not each.finite:
            before = cotangents[index - 1].module if index else ""
            return msgspec.structs.replace(empty, origin="backward", module=each.module, finite_until=before)
    for name, value in gradients.items():
        if value is not None and not np.isfinite(value).all():
            module = name.rpartition("/")[0]
            return msgspec.structs.replace(empty, origin="backward", module=module)
    return None


def _operations(observer: Any, state: Any, loss_fn: LossFunction, batch: Any) -> OperationLog:
    recorder = OperationRecorder(PassLocation("", "loss"), opens_loops=True)
    if isinstance(observer, OperationObserver):
        observer.record_operations(state, loss_fn, batch, recorder)
    return recorder.log()


def _forward_report(empty: NonfiniteReport, values: list[_CapturedValue], log: OperationLog) -> NonfiniteReport:
    """Return the report of a pass whose loss is not finite."""
    module, between = _first_module(values)
    found = msgspec.structs.replace(empty, origin="forward", module=module, between=between)
    return _with_operation(found, _first_operation(log), log)


def _with_operation(found: NonfiniteReport, number: int | None, log: OperationLog) -> NonfiniteReport:
    """Return a report with the operation of a record, if there is one."""
    if number is None:
        return found
    record = log.records[number]
    inputs = [_value_range(log.records[each]) for each in record.inputs]
    return msgspec.structs.replace(
        found,
        operation=record.name,
        place=record.place,
        iterations=list(record.iterations),
        inputs=inputs,
        output=_value_range(record),
    )


def _first_module(values: list[_CapturedValue]) -> tuple[str, bool]:
    """Return the first module whose output is not finite, and whether its input was not either.

    A module that holds others ends after them, so that the first is the innermost.
    """
    for index, each in enumerate(values):
        if each.kind == "output" and not each.finite:
            own = (other for other in reversed(values[:index]) if other.module == each.module and other.kind == "input")
            given = next(own, None)
            return each.module, given is not None and not given.finite
    return "", False


def _first_operation(log: OperationLog) -> int | None:
    """Return the first operation with finite inputs whose result is not finite, and reaches the loss by results that
    are not."""
    bad = [number for number, record in enumerate(log.records) if record.value.nonfinite]
    if not bad:
        return None
    reached: set[int] = set()
    waiting = [bad[-1] if log.end is None else log.end]
    while waiting:
        number = waiting.pop()
        if number not in reached and log.records[number].value.nonfinite:
            reached.add(number)
            waiting.extend(log.records[number].inputs)
    origins = (n for n in sorted(reached) if not any(each in reached for each in log.records[n].inputs))
    return next(origins, None)


def _steep_operation(log: OperationLog) -> int | None:
    """Return the last operation of a finite pass whose derivative is not finite at what it was given: a root of 0, or a
    function whose result is not finite and is not taken, as in the other branch of a `where`."""
    for number in reversed(range(len(log.records))):
        record = log.records[number]
        name, inputs = record.name.lower(), [log.records[each].value for each in record.inputs]
        if name not in _STEEP or any(each.nonfinite for each in inputs):
            continue
        is_at_zero = bool(inputs) and bool(inputs[0].quantiles) and inputs[0].quantiles[0] == 0.0
        if record.value.nonfinite or (name == _ROOT and is_at_zero):
            return number
    return None


def _value_range(record: OperationRecord) -> ValueRange:
    value = record.value
    least, greatest = (value.quantiles[0], value.quantiles[-1]) if value.quantiles else (0.0, 0.0)
    return ValueRange(dtype=value.dtype, least=least, greatest=greatest, elements=value.size, nonfinite=value.nonfinite)


def _nonfinite_data(backend: Backend, batch: Any) -> str:
    """Return the name of the batch's first array that is not finite, with the number of such elements; "" if none."""
    for path, array in _host_arrays(backend, batch):
        count = int(np.count_nonzero(~np.isfinite(array)))
        if count:
            return f"{count} elements of batch{path}"
    return ""


def _host_arrays(backend: Backend, batch: Any) -> Iterator[tuple[str, Array]]:
    """Yield the floating arrays of a batch with their paths, on the host."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, np.ndarray | float | int):
            array = np.asarray(leaf)
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            array = backend.to_numpy(leaf)
        else:
            continue
        if array.dtype.kind in "fV":
            yield str(path), array.astype(np.float64)
