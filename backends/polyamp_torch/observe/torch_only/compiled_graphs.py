"""`GraphCounter`: counts the operations in the graphs that `torch.compile` makes of a pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx, nn

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import tree_leaves
from polyamp_torch.observe.torch_only.compat import graph_backend, is_compiler_error
from polyamp_torch.observe.torch_only.operation_counter import PassCounter

_OVERLOAD: Final = type(torch.ops.aten.relu.default)
_ROOT: Final = "._module"
"""Attribute of `PolicyModule`, at which the paths of a model begin in a graph."""
_ITEM: Final = re.compile(r"(?:\._modules)?\['?(\w+)'?\]")
NOTE: Final = (
    "Read from the graphs that torch.compile gives to its backend. Code that inductor generates computes fused "
    "elementwise operations of 16-bit arrays in float32 and rounds what it stores."
)
_FORWARD_TAG: Final = "is_forward"
"""What the partitioner calls an operation of the forward pass, also where it runs again in the backward graph."""


class GraphCounter:
    """Counter of the operations in compiled graphs.

    Args:
        counter: receives the operations.
        modules: path of each module.
    """

    def __init__(self, counter: PassCounter, modules: dict[nn.Module, str]) -> None:
        self._counter = counter
        self._paths = set(modules.values())

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` compiled as one graph, whose operations are counted when it runs; those of its backward pass
        when that runs.

        The returned function raises UnsupportedError if torch cannot make one graph of `call`.
        """
        backend = graph_backend(self._receive)
        compiled: Callable[..., Any] = torch.compile(call, backend=backend, dynamic=False, fullgraph=True)

        def run(*args: Any) -> Any:
            try:
                return compiled(*args)
            except Exception as error:
                if not is_compiler_error(error):
                    raise
                reason = next(iter(str(error).strip().splitlines()), "")
                raise UnsupportedError(
                    "explain(compiled=True): torch.compile cannot make one graph of this function, as for "
                    f"train_step(compile=True). torch says: {type(error).__name__}: {reason}"
                ) from error

        return run

    def _receive(self, graph: fx.Graph, backward: bool) -> None:
        for node in graph.nodes:
            overload = _overload(node)
            if node.op != "call_function" or overload is None:
                continue
            inputs = [
                each.meta.get("val") for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)
            ]
            # an operator with a random state has no entries of its own: its results have
            shown = [node] if "val" in node.meta else [user for user in node.users if "nn_module_stack" in user.meta]
            meta, outputs = shown[-1].meta if shown else {}, [each.meta.get("val") for each in shown]
            again = meta.get("partitioner_tag") == _FORWARD_TAG
            direction = "forward" if not backward else "recompute" if again else "backward"
            self._counter.count(overload, inputs, outputs, self._module(meta), direction)

    def _module(self, meta: dict[str, Any]) -> str:
        """Return the path of the innermost module that a node was traced in, or whose gradient it is part of."""
        stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
        for source, _ in reversed(stack.values()):
            _, root, inside = source.partition(_ROOT)
            path = _ITEM.sub(r".\1", inside).strip(".").replace(".", "/")
            if root and path in self._paths:
                return path
        return ""


def _overload(node: fx.Node) -> Any:
    """Return the operation of a node, or the one that the node's higher-order operator runs; None if there is none."""
    candidates = (node.target, *node.args)
    return next((each for each in candidates if isinstance(each, _OVERLOAD)), None)
