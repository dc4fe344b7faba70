"""Preservation of the gradients of foreign leaves: tensors in the loss's graph that the step does not train.

For example, a generator's loss runs through a discriminator. The backward pass would give its parameters the gradients
of the *scaled* loss. `torch.autograd.backward(inputs=...)` avoids that, but it is slower, and it skips functions in
which only the inside leads to a parameter, such as a checkpoint with `use_reentrant=True`. So the graph is searched
for foreign leaves, once for every graph size.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from polyamp_torch.compat import autograd_sequence_number
from polyamp_torch.precision.torch_only.activation_checkpointing import RecomputedFunction
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters

_EMPTY: Final = types.CellType()


def _unknown_node_count() -> int:
    return -1


autograd_node_count: Final[Callable[[], int]] = autograd_sequence_number or _unknown_node_count
"""Returns the number of operations that autograd has recorded in this thread; -1 if it is unknown, so that every graph
is searched."""


class GraphSizeCache:
    """Cache of the sizes of one loss function's graphs that have no foreign leaves.

    Only the first graph of each size is searched. Copies and pickles are empty.
    """

    __slots__ = ("_loss_fn", "_sizes")

    def __init__(self) -> None:
        self._loss_fn: Any = None
        self._sizes: set[int] = set()

    def __contains__(self, found: tuple[Any, int]) -> bool:
        return self._loss_fn is not None and self._loss_fn() is found[0] and found[1] in self._sizes

    def add(self, loss_fn: Any, size: int) -> None:
        """Record that a graph of this size has no foreign leaves."""
        if self._loss_fn is None or self._loss_fn() is not loss_fn:
            self._sizes = set()
            try:
                self._loss_fn = weakref.ref(loss_fn)
            except TypeError:  # no weak reference, so no cache
                self._loss_fn = None
        self._sizes.add(size)

    def __reduce__(self) -> tuple[type[GraphSizeCache], tuple[()]]:
        return GraphSizeCache, ()


class ForeignGrads:
    """Context manager that restores the `.grad` of foreign leaves on exit.

    Args:
        own: the trained parameters.
        graphs: the state's cache of graph sizes.
        more: returns the graph leaves that represent trained parameters, such as unsharded ones for sharded ones.

    Attributes:
        began: whether a backward pass has run in the context.
    """

    __slots__ = ("_graph", "_graphs", "_held", "_more", "_own", "began")

    def __init__(
        self,
        own: Sequence[torch.Tensor],
        graphs: GraphSizeCache,
        more: Callable[[], Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self._own = own
        self._graphs = graphs
        self._more = more
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._graph: tuple[Any, int] | None = None
        self.began = False

    def __enter__(self) -> ForeignGrads:
        return self

    def __exit__(self, *error: object) -> None:
        for leaf, grad in self._held.values():
            leaf.grad = grad

    def have_new_grads(self, loss_fn: Any, size: int) -> bool:
        """Return whether trained parameters got a `.grad` before the first backward pass of the context.

        They had none when the context began. Checked once for every graph size."""
        self._graph = None if size >= 0 and (loss_fn, size) in self._graphs else (loss_fn, size)
        if self.began or self._graph is None:
            return False
        return any(p.grad is not None for p in self._own)

    def stash(self, loss: torch.Tensor) -> None:
        """Stash the gradients of the foreign leaves of `loss`, which `have_new_grads` was asked about, before its
        backward pass."""
        self.began = True
        if self._graph is None:
            return
        own = set(map(id, self._own))
        if self._more is not None:
            own.update(map(id, self._more()))
        strange = [leaf for leaf in graph_leaves(loss) if id(leaf) not in own]
        for leaf in strange:
            if id(leaf) not in self._held:
                self._held[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None
        if not strange:
            self._graphs.add(*self._graph)


def graph_leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors whose `.grad` the backward pass of `loss` would write to."""
    if loss.grad_fn is None:
        return
    seen: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        if not following and (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            yield from _checkpointed_parameters(getattr(node, "run_function", None))
        for after, _ in following:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


def _checkpointed_parameters(function: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of the modules that a checkpoint with `use_reentrant=True` recomputes outside the graph.

    The modules are the function itself, the object it is bound to, and its closure variables."""
    if isinstance(function, RecomputedFunction):
        function = function.function
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY]
    if isinstance(function, functools.partial):
        cells += [function.func, *function.args]
    for found in (function, getattr(function, "__self__", None), *cells):
        if isinstance(found, nn.Module):
            yield from (p for _, p in tree_parameters(found) if p.requires_grad and p.is_leaf)  # not cast mode's copies
