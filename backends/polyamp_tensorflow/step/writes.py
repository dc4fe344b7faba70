"""Parameters that a forward pass writes itself, such as a max-norm constraint or a weight normalization does (S12).

They are running state: the write takes effect with the step, and a skipped step takes it back. Which parameters they
are is found while a step is traced, in the operations of its graph, so that a step without them runs none for them. A
step that runs eagerly looks whether a parameter lies in another place in memory. `models.variables` knows those of
Keras's `SpectralNormalization` by the layer's class.

Called by `differentiate` and by `LossScaleOptimizer.keep_statistics`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

import tensorflow as tf

from polyamp.rules.plan import NARROW
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import called_graph, written_resources
from polyamp_tensorflow.models.layers import modules
from polyamp_tensorflow.models.variables import Variables, own_variables
from polyamp_tensorflow.precision.layer_choice import Choice

PREFIX: Final = "written/"
"""Begins the names of such parameters among running statistics, which go with the gradients."""
_PASSING: Final = ("Identity", "Cast", "AddN", "AddV2", "Mul", "RealDiv", "CollectiveReduceV2", "NcclAllReduce")
"""Operations between the cast and the write: on several replicas the mean over them."""
_FUNCTIONS: Final = ("f", "then_branch", "else_branch", "body")
"""Attributes of operations that name functions with the operation's inputs."""


class Written(NamedTuple):
    """A parameter that a forward pass wrote.

    Attributes:
        variable: the parameter.
        before: its value before the pass.
        after: what is to be updated: the elements that the pass changed, as it wrote them, and the digits that the
            others had, where the pass wrote 16-bit numbers.
        narrow: whether it did.
    """

    variable: Any
    before: Any
    after: Any
    narrow: bool


class EagerReads:
    """Reads many variables at once where there is no graph: one call of a function, which costs a tenth."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, ...], Callable[[], list[Any]]] = {}

    def __call__(self, variables: Collection[Any]) -> list[Any]:
        """Their values, which share the variables' memory until one is assigned to."""
        if not tf.executing_eagerly() or tf.distribute.has_strategy():
            return [_value(variable) for variable in variables]
        key = tuple(map(id, variables))
        if key not in self._functions:
            held = list(variables)  # so that the ids stay theirs
            self._functions[key] = tf.function(lambda: [_value(variable) for variable in held], autograph=False)
        return self._functions[key]()


class ForwardWrites:
    """From before a forward pass until after it: which parameters it writes.

    Args:
        variables: the model's, by role.
        read: how to read variables in an eager step; kept from step to step.
        computes_in: the dtype in which the layer computes that owns a variable, by its `id`; asked in an eager step
            alone, after a write was found. In a graph the written value shows its dtype.
    """

    def __init__(
        self, variables: Variables, read: EagerReads, computes_in: Callable[[], Mapping[int, str | None]]
    ) -> None:
        known = {id(raw(variable)) for variable in variables.rewritten.values()}
        found = {name: raw(v) for role in (variables.parameters, variables.frozen) for name, v in role.items()}
        self._variables = {n: v for n, v in found.items() if v.dtype.is_floating and id(v) not in known}
        # In a graph there is no way to make the reads later; those that nothing consumes cost next to nothing.
        self._read = read
        self._before = dict(zip(self._variables, read(self._variables.values()), strict=True))
        self._parameters = set(variables.parameters)
        self._eager = tf.executing_eagerly()
        self._start = 0 if self._eager else len(_graph().get_operations())
        self._addresses = {n: _address(value) for n, value in self._before.items()} if self._eager else {}
        self._computes_in = computes_in

    def found(self, among: Collection[int] | None = None) -> dict[str, Written]:
        """What the pass wrote, by `PREFIX` and name.

        Args:
            among: of the parameters only those with these ids, and what is frozen.
        """
        mine = {
            n: v for n, v in self._variables.items() if among is None or id(v) in among or n not in self._parameters
        }
        if self._eager:
            now = zip(self._variables, self._read(self._variables.values()), strict=True)
            moved = {n: mine[n] for n, value in now if n in mine and _address(value) != self._addresses[n]}
            dtypes = self._computes_in() if moved else {}
            narrow = {name: dtypes.get(id(variable)) for name, variable in moved.items()}
        else:
            handles = _written_since(self._start, {name: variable.handle for name, variable in mine.items()})
            narrow = {name: _narrow_source(handle) for name, handle in handles.items()}
        return {PREFIX + name: self._written(mine[name], self._before[name], dtype) for name, dtype in narrow.items()}

    def _written(self, variable: Any, before: Any, dtype: str | None) -> Written:
        after = tf.identity(variable)
        if dtype not in NARROW or before.dtype.name in NARROW:
            return Written(variable, before, after, False)
        if self._eager and not bool(tf.reduce_all(tf.equal(_rounded(after, dtype), after))):
            return Written(variable, before, after, False)  # not written from 16-bit numbers
        return Written(variable, before, tf.where(tf.equal(after, _rounded(before, dtype)), before, after), True)


def dtypes_of(model: Any, choices: Collection[Choice] | None = None) -> dict[int, str | None]:
    """By `id` of each variable, the dtype in which the layer that owns it computes: as the layers are now, or as
    `choices` have them."""
    chosen = {id(choice.target): choice.dtype for choice in choices or ()}
    return {
        id(raw(variable)): chosen.get(id(module.layer)) or module.layer.compute_dtype
        for module in modules(model)
        for variable in own_variables(module.layer)
    }


def _rounded(value: Any, dtype: str | None) -> Any:
    return tf.cast(tf.cast(value, dtype), value.dtype)


def _value(variable: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _written_since(start: int, handles: Mapping[str, Any]) -> dict[str, Any]:
    """Of variables' handles by name, those that an operation from number `start` on writes to; each as the graph that
    is being traced has it."""
    written = {id(handle) for op in _graph().get_operations()[start:] for handle in written_resources(op)}
    inside = {id(outer): inner for outer, inner in getattr(_graph(), "captures", ())}
    here = {name: inside.get(id(handle), handle) for name, handle in handles.items()}
    return {name: handle for name, handle in here.items() if id(handle) in written}


def _narrow_source(handle: Any) -> str | None:
    """The 16-bit dtype of the numbers that are assigned to a variable, where a cast from one comes right before; None
    elsewhere. Keras casts what `assign` is given."""
    for op in handle.consumers():
        waiting = [op.inputs[1].op] if op.type == "AssignVariableOp" else []
        while waiting:
            source = waiting.pop()
            if source.type == "Cast" and source.get_attr("SrcT").name in NARROW:
                return str(source.get_attr("SrcT").name)
            if source.type in _PASSING:
                waiting += [tensor.op for tensor in source.inputs]
        for inner in _inside(op, handle):
            found = _narrow_source(inner)
            if found is not None:
                return found
    return None


def _inside(op: Any, handle: Any) -> Iterator[Any]:
    """A handle as the functions have it that an operation calls: a call, a condition's branches, a loop's body."""
    for word in _FUNCTIONS:
        graph = called_graph(op, op.get_attr(word).name) if word in op.node_def.attr else None
        if graph is not None:
            skipped = len(op.inputs) - len(graph.inputs)  # the condition of an `If`
            places = [n for n, tensor in enumerate(op.inputs) if tensor is handle and n >= skipped]
            yield from (graph.inputs[n - skipped] for n in places)


_POINTER: Final = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _address(tensor: Any) -> int | None:
    """Where the data of a tensor that has a value lies: the first field of what DLPack hands out. A variable that is
    assigned to lies elsewhere afterwards, as long as a tensor that was read from it before lives."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return ctypes.c_void_p.from_address(_POINTER(capsule, b"dltensor")).value
