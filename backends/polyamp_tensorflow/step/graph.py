"""`GraphFunction`: the `tf.function` of a step or of a half, one per state, strategy and batch shape.

The decision to skip is taken inside the graph; Python never waits for it. Called by the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from polyamp.errors import ModelError, UnsupportedError
from polyamp_tensorflow.interrupts import repair
from polyamp_tensorflow.precision.autocast import matmul_precision
from polyamp_tensorflow.step.distribution import on_replicas, several
from polyamp_tensorflow.step.state import States, TensorFlowState, turns
from polyamp_tensorflow.step.xla import needs_xla


class GraphFunction:
    """`body(states, *tensors)` as a `tf.function` for each combination of states.

    Args:
        body: graph code that reads and writes the states' variables; on several replicas each runs it.
        split: the tensors are a batch, of which each replica takes its part; otherwise all take the same.
        compile: False runs it eagerly, for debugging.
        jit_compile: XLA; None chooses it for float16 on a CPU, with a warning once per process.

    Raises:
        UnsupportedError: `jit_compile=True` without compiling; a model that XLA cannot compile.
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
        repair()
        with turns(states), matmul_precision(states[0].plan.float32_matmul):
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
        # The program holds its states, so their ids stay theirs as long as the entry lives. The entry lies in the
        # first state and holds neither this object nor anything outside the states, so all go together.
        programs = states[0].programs.setdefault(self, {})
        key = tuple(id(state) for state in states)
        if key not in programs:
            programs[key] = self._traced(states)
        return programs[key]

    def _traced(self, states: tuple[TensorFlowState, ...]) -> Callable[..., Any]:
        body, split, strategy = self._body, self._split, states[0].strategy
        if any(state.strategy is not strategy for state in states):
            raise ModelError(
                "states of one step must be made in the scope of one strategy. Received: "
                f"{', '.join(type(state.strategy).__name__ for state in states)}."
            )

        def program(*tensors: Any) -> Any:
            return on_replicas(strategy, lambda *own: body(states, *own), tensors, split=split)

        if not self._compile:
            return program
        jit = self._jit_compile
        if several(strategy):
            if jit:
                raise UnsupportedError(
                    "jit_compile=True compiles the step of one replica. Received: a state on a strategy with "
                    f"{strategy.num_replicas_in_sync} replicas. Drop it."
                )
        elif jit is None:
            parameters = [variable for state in states for variable in state.variables.parameters.values()]
            jit = needs_xla([state.plan for state in states], parameters, stacklevel=6)
        # AutoGraph would rewrap exceptions raised while tracing, so that they reach the user as other ones.
        return tf.function(program, autograph=False, jit_compile=jit)  # type: ignore[no-any-return]  # untyped
