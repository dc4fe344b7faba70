"""Access to the compiler's private names for casting reports; the package's `compat` has those of eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def graph_backend(receive: Callable[[Any, bool], None]) -> Any:
    """Return a backend of `torch.compile` that passes on each graph of AOTAutograd and then runs it as it is.

    The graphs hold the operations after the casts, of the forward and of the backward pass: what another backend would
    generate code from.

    Args:
        receive: called with a graph, and whether it is that of a backward pass.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]  # torch exports it so

    def compiler(*, backward: bool) -> Callable[[Any, Any], Any]:
        def compile_graph(module: Any, inputs: Any) -> Any:
            receive(module.graph, backward)
            return make_boxed_func(module.forward)

        return compile_graph

    backend: Any = aot_autograd(fw_compiler=compiler(backward=False), bw_compiler=compiler(backward=True))
    return backend


def is_compiler_error(error: Exception) -> bool:
    """Return whether an error is torch.compile's own, not one of the function that it compiles."""
    return type(error).__module__.startswith("torch._dynamo")
