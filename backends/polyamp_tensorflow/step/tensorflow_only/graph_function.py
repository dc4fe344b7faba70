"""`GraphFunction`: the `tf.function` of a step or of half a step, one per state and strategy, traced per batch shape.

The graph decides whether to skip; Python never waits for the decision. By default float16 on a CPU uses XLA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import native_variable
from polyamp_keras.engine import ENGINE
from polyamp_keras.interrupts import close_stale_blocks
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.distributed.tensorflow_only.distributed_step import run_on_replicas
from polyamp_tensorflow.step.state import States, TensorFlowState, acquire_all

_FLOAT16_WARNING: Final = (
    "float16 on TensorFlow's CPU is slow outside XLA, on some processors 300 times slower than float32, so polyamp "
    "compiles this with XLA (jit_compile=True). The first call takes seconds. Pass jit_compile=True or False to "
    "choose, or use bfloat16."
)
_float16_warned: list[bool] = []


def needs_xla(plans: Iterable[ResolvedPolicy], parameters: Iterable[Any], *, stacklevel: int) -> bool:
    """Return whether the models compute in float16 on a CPU; if so, warn once per process.

    Args:
        plans: the models' resolved policies.
        parameters: their variables, which determine the device.
        stacklevel: stack level of the warning, counted from the caller as in `warnings.warn`.
    """
    if not any("float16" in plan.narrow for plan in plans):
        return False
    if not any(
        native_variable(parameter).device.rpartition("device:")[2].startswith("CPU") for parameter in parameters
    ):
        return False
    if not _float16_warned:
        _float16_warned.append(True)
        warnings.warn(_FLOAT16_WARNING, UserWarning, stacklevel=stacklevel + 1)
    return True


class GraphFunction:
    """`body(states, *tensors)` as a `tf.function` per combination of states.

    Args:
        body: graph code that reads and writes the states' variables; every replica runs it.
        split: True if the tensors are a batch, divided among the replicas; False if all replicas get the same tensors.
        compile: False runs it eagerly, for debugging.
        jit_compile: whether to use XLA; None uses it for float16 on a CPU, with one warning per process.

    Raises:
        UnsupportedError: `jit_compile=True` with `compile=False`; a model that XLA cannot compile.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        *,
        split: bool = True,
        compile: bool = True,  # noqa: A002  # the public option's name
        jit_compile: bool | None = False,
    ) -> None:
        if jit_compile and not compile:
            raise UnsupportedError("jit_compile=True compiles with XLA. Received: compile=False as well. Drop one.")
        self._body = body
        self._split = split
        self._compile = compile
        self._jit_compile = jit_compile

    def __call__(self, states: States, *tensors: Any) -> Any:
        close_stale_blocks()
        with acquire_all(states), ENGINE.matmul_precision(states[0].plan.float32_matmul):
            program = self._program(tuple(states))
            try:
                return program(*tensors)
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
                if "unsupported operations" not in str(error):
                    raise
                raise UnsupportedError(
                    f"XLA cannot compile loss_fn or the model: {error.message} Pass jit_compile=False to run without "
                    "XLA; on some processors float16 is then 300 times slower than float32, bfloat16 is not."
                ) from error

    def _program(self, states: tuple[TensorFlowState, ...]) -> Callable[..., Any]:
        # The program references its states, so their ids stay valid while the entry exists. The first state owns the
        # entry, which references only the states, so all are freed together.
        programs = states[0].programs.setdefault(self, {})
        key = tuple(id(state) for state in states)
        if key not in programs:
            programs[key] = self._build_program(states)
        return programs[key]

    def _build_program(self, states: tuple[TensorFlowState, ...]) -> Callable[..., Any]:
        body, split, strategy = self._body, self._split, states[0].strategy
        if any(state.strategy is not strategy for state in states):
            raise ModelError(
                "states of one step must be made in the scope of one strategy. Received: "
                f"{', '.join(type(state.strategy).__name__ for state in states)}."
            )

        def program(*tensors: Any) -> Any:
            return run_on_replicas(strategy, lambda *own: body(states, *own), tensors, split=split)

        if not self._compile:
            return program
        jit = self._jit_compile
        if has_several_replicas(strategy):
            if jit:
                raise UnsupportedError(
                    "jit_compile=True compiles the step of one replica. Received: a state on a strategy with "
                    f"{strategy.num_replicas_in_sync} replicas. Drop it."
                )
        elif jit is None:
            parameters = [variable for state in states for variable in state.variables.parameters.values()]
            jit = needs_xla([state.plan for state in states], parameters, stacklevel=6)
        # AutoGraph would wrap exceptions raised during tracing, so that the user gets other ones.
        return TraceLookup(tf.function(program, autograph=False, jit_compile=jit))


class TraceLookup:
    """A `tf.function` whose traces are found by the shapes and dtypes of its tensors.

    `tf.function` compares the types of all arguments and of the context at every call, which takes 0.15 ms: 6 % of the
    step of eight small layers. Where the tensors alone determine the trace, its `ConcreteFunction` is called instead.

    Args:
        function: the `tf.function`; its arguments are trees of tensors.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._traces: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *tensors: Any) -> Any:
        key = _trace_key(tensors)
        if key is None:
            return self.function(*tensors)
        trace = self._traces.get(key)
        if trace is not None:
            return trace(*tensors)
        result = self.function(*tensors)
        if not any(isinstance(part, tf.DType) and part in (tf.resource, tf.variant) for part in key):
            self._traces[key] = self.function.get_concrete_function(*tensors)  # the trace of the call: no second one
        return result


def _trace_key(tensors: Sequence[Any]) -> tuple[Hashable, ...] | None:
    """Return what determines the trace for some tensors; None if it depends on more, such as a strategy or a graph."""
    if not tf.executing_eagerly() or tf.distribute.has_strategy() or tf.config.functions_run_eagerly():
        return None
    key: list[Any] = []
    return tuple(key) if _append_tree_key(tensors, key) else None


def _append_tree_key(tree: Any, key: list[Any]) -> bool:
    """Append structure, dtypes and shapes of a tree to `key`; return False for a leaf that is no plain tensor."""
    kind = type(tree)
    if isinstance(tree, tf.Tensor):
        key += (tree.dtype, tree.shape)
        return True
    if tree is None:
        key.append(None)
        return True
    if kind is dict:
        key += (kind, len(tree), *tree)
        return all(_append_tree_key(member, key) for member in tree.values())
    if isinstance(tree, tuple | list):
        key += (kind, len(tree))
        return all(_append_tree_key(member, key) for member in tree)
    return False
