"""Tracking of parameters that a forward pass itself writes, as in max-norm constraints or weight normalization (S12).

They are running state: the write takes effect with the step, and a skipped step reverts it. They are found in the graph
while a step is traced, so that a step without such writes runs no operations for them. An eager step compares the
parameters' memory addresses. `models.variables` finds those of Keras's `SpectralNormalization` by the layer's class.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import tensorflow as tf

from polyamp.float_formats import HALF_DTYPES
from polyamp_keras.arrays import native_variable
from polyamp_keras.models.variables import ModelVariables
from polyamp_tensorflow.compat import callee_graph, resource_writes

WRITE_PREFIX: Final = "written/"
"""Prefix of the names of such parameters among the running statistics that accompany the gradients."""
_TRANSPARENT_OPERATIONS: Final = (
    "Identity",
    "Cast",
    "AddN",
    "AddV2",
    "Mul",
    "RealDiv",
    "CollectiveReduceV2",
    "NcclAllReduce",
)
"""Operations allowed between the cast and the write: with several replicas, their mean."""
_FUNCTION_ATTRIBUTES: Final = ("f", "then_branch", "else_branch", "body")
"""Attributes of operations that name functions called with the operation's inputs."""


class ParameterWrite(NamedTuple):
    """Write of a forward pass to a parameter.

    Attributes:
        variable: the parameter.
        before: its value before the pass.
        after: its value for the update. If the pass wrote 16-bit numbers, unchanged elements keep their digits from
            `before`.
        narrow: whether the pass wrote 16-bit numbers.
    """

    variable: Any
    before: Any
    after: Any
    narrow: bool


class EagerReader:
    """Reader of many variables in one `tf.function` call, at a tenth of the cost of eager reads."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, ...], Callable[[], list[Any]]] = {}

    def __call__(self, variables: Collection[Any]) -> list[Any]:
        """Return the values, which share the variables' memory until an assignment."""
        if not tf.executing_eagerly() or tf.distribute.has_strategy():
            return [_read_value(variable) for variable in variables]
        key = tuple(map(id, variables))
        if key not in self._functions:
            held = list(variables)  # keeps the ids valid
            self._functions[key] = tf.function(lambda: [_read_value(variable) for variable in held], autograph=False)
        return self._functions[key]()


class ForwardWriteTracker:
    """Tracker of the parameters that a forward pass writes, from before the pass until after it.

    Args:
        variables: the model's variables by role.
        read: reader of variables in eager steps; reused from step to step.
        compute_dtypes: returns the compute dtype of the layer that owns a variable, by its `id`; called only in an
            eager step, after a write was found. In a graph the written value has its dtype.
    """

    def __init__(
        self, variables: ModelVariables, read: EagerReader, compute_dtypes: Callable[[], Mapping[int, str | None]]
    ) -> None:
        known = {id(native_variable(variable)) for variable in variables.rewritten.values()}
        found = {
            name: native_variable(v) for role in (variables.parameters, variables.frozen) for name, v in role.items()
        }
        self._variables = {n: v for n, v in found.items() if v.dtype.is_floating and id(v) not in known}
        # In a graph the reads cannot be added later; unused ones cost almost nothing.
        self._read = read
        self._before = dict(zip(self._variables, read(self._variables.values()), strict=True))
        self._parameters = set(variables.parameters)
        self._eager = tf.executing_eagerly()
        self._start = 0 if self._eager else len(_current_graph().get_operations())
        self._addresses = {n: _data_address(value) for n, value in self._before.items()} if self._eager else {}
        self._computes_in = compute_dtypes

    def find_writes(self, among: Collection[int] | None = None) -> dict[str, ParameterWrite]:
        """Return the writes of the pass, by `WRITE_PREFIX` and name.

        Args:
            among: ids of the parameters to consider; frozen ones are always included. None for all.
        """
        mine = {
            n: v for n, v in self._variables.items() if among is None or id(v) in among or n not in self._parameters
        }
        if self._eager:
            now = zip(self._variables, self._read(self._variables.values()), strict=True)
            moved = {n: mine[n] for n, value in now if n in mine and _data_address(value) != self._addresses[n]}
            dtypes = self._computes_in() if moved else {}
            narrow = {name: dtypes.get(id(variable)) for name, variable in moved.items()}
        else:
            handles = _find_written_handles(self._start, {name: variable.handle for name, variable in mine.items()})
            narrow = {name: _narrow_source_dtype(handle) for name, handle in handles.items()}
        return {
            WRITE_PREFIX + name: self._written(mine[name], self._before[name], dtype) for name, dtype in narrow.items()
        }

    def _written(self, variable: Any, before: Any, dtype: str | None) -> ParameterWrite:
        after = tf.identity(variable)
        if dtype not in HALF_DTYPES or before.dtype.name in HALF_DTYPES:
            return ParameterWrite(variable, before, after, False)
        if self._eager and not bool(tf.reduce_all(tf.equal(_round_value(after, dtype), after))):
            return ParameterWrite(variable, before, after, False)  # not written from 16-bit numbers
        return ParameterWrite(
            variable, before, tf.where(tf.equal(after, _round_value(before, dtype)), before, after), True
        )


def _round_value(value: Any, dtype: str | None) -> Any:
    return tf.cast(tf.cast(value, dtype), value.dtype)


def _read_value(variable: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _current_graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _find_written_handles(start: int, handles: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the variables' handles, by name, to which an operation from index `start` on writes. Captured
    handles are returned as in the current graph."""
    written = {id(handle) for op in _current_graph().get_operations()[start:] for handle in resource_writes(op)}
    inside = {id(outer): inner for outer, inner in getattr(_current_graph(), "captures", ())}
    here = {name: inside.get(id(handle), handle) for name, handle in handles.items()}
    return {name: handle for name, handle in here.items() if id(handle) in written}


def _narrow_source_dtype(handle: Any) -> str | None:
    """Return the 16-bit dtype from which the value assigned to a variable was cast directly before; else None. Keras
    casts the argument of `assign`."""
    for op in handle.consumers():
        waiting = [op.inputs[1].op] if op.type == "AssignVariableOp" else []
        while waiting:
            source = waiting.pop()
            if source.type == "Cast" and source.get_attr("SrcT").name in HALF_DTYPES:
                return str(source.get_attr("SrcT").name)
            if source.type in _TRANSPARENT_OPERATIONS:
                waiting += [tensor.op for tensor in source.inputs]
        for inner in _inner_handles(op, handle):
            found = _narrow_source_dtype(inner)
            if found is not None:
                return found
    return None


def _inner_handles(op: Any, handle: Any) -> Iterator[Any]:
    """Yield a handle as the input of the functions that an operation calls: a call, branches, a loop's body."""
    for word in _FUNCTION_ATTRIBUTES:
        graph = callee_graph(op, op.get_attr(word).name) if word in op.node_def.attr else None
        if graph is not None:
            skipped = len(op.inputs) - len(graph.inputs)  # the condition of an `If`
            places = [n for n, tensor in enumerate(op.inputs) if tensor is handle and n >= skipped]
            yield from (graph.inputs[n - skipped] for n in places)


_CAPSULE_POINTER: Final = ctypes.pythonapi.PyCapsule_GetPointer
_CAPSULE_POINTER.restype, _CAPSULE_POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _data_address(tensor: Any) -> int | None:
    """Return the memory address of an eager tensor: the first field of its DLPack structure. An assignment moves a
    variable to another address while a tensor that was read from it before is alive."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return ctypes.c_void_p.from_address(_CAPSULE_POINTER(capsule, b"dltensor")).value
