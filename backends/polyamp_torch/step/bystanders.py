"""Gradients of what a loss runs through without training it: they are after a step what they were before.

A generator's loss runs through a discriminator, whose parameters the backward pass would give the gradients of the
*scaled* loss. `torch.autograd.backward(inputs=...)` keeps them out, but then torch does not run functions of which only
the inside leads to a parameter, such as a checkpoint with `use_reentrant=True`, and is slower. So the graph is looked
through for strange leaves, once for every size of it. Called by the step.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from polyamp_torch.compat import nodes_made
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.recomputation import Carried

_EMPTY: Final = types.CellType()


def made() -> int:
    """Grows by one with every operation that autograd records in this thread; -1 where that is not known, so that every
    graph is looked through."""
    return -1 if nodes_made is None else nodes_made()


class Graphs:
    """Sizes of the graphs of one loss function that lead to nothing but the state's own parameters, as far as the first
    graph of each size tells.

    Copies and pickles know none.
    """

    __slots__ = ("_loss_fn", "_sizes")

    def __init__(self) -> None:
        self._loss_fn: Any = None
        self._sizes: set[int] = set()

    def __contains__(self, found: tuple[Any, int]) -> bool:
        return self._loss_fn is not None and self._loss_fn() is found[0] and found[1] in self._sizes

    def add(self, loss_fn: Any, size: int) -> None:
        """A graph of this size has been looked through."""
        if self._loss_fn is None or self._loss_fn() is not loss_fn:
            self._sizes = set()
            try:
                self._loss_fn = weakref.ref(loss_fn)
            except TypeError:  # nothing to know it by
                self._loss_fn = None
        self._sizes.add(size)

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()


class Bystanders:
    """A block after which strange leaves have the `.grad` that they had.

    Args:
        own: the parameters that are trained.
        graphs: what is known of the state's graphs.
        more: gives the leaves that stand for trained parameters in a graph, as whole ones for sharded ones.

    Attributes:
        began: whether a backward pass has run in the block.
    """

    __slots__ = ("_graphs", "_held", "_more", "_own", "began")

    def __init__(
        self, own: Sequence[torch.Tensor], graphs: Graphs, more: Callable[[], Sequence[torch.Tensor]] | None = None
    ) -> None:
        self._own = own
        self._graphs = graphs
        self._more = more
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.began = False

    def __enter__(self) -> Bystanders:
        return self

    def __exit__(self, *error: object) -> None:
        for leaf, grad in self._held.values():
            leaf.grad = grad

    def were_given(self, loss_fn: Any, size: int) -> bool:
        """Whether trained parameters, which had no `.grad` when the block began, have one before its first backward
        pass. Looked at once for every size of the graph."""
        if self.began or (size >= 0 and (loss_fn, size) in self._graphs):
            return False
        return any(p.grad is not None for p in self._own)

    def look(self, loss_fn: Any, loss: torch.Tensor, size: int) -> None:
        """Set aside the gradients of the strange leaves of `loss`, whose graph has `size` nodes, before its backward
        pass."""
        self.began = True
        if size >= 0 and (loss_fn, size) in self._graphs:
            return
        own = set(map(id, self._own))
        if self._more is not None:
            own.update(map(id, self._more()))
        strange = [leaf for leaf in leaves(loss) if id(leaf) not in own]
        for leaf in strange:
            if id(leaf) not in self._held:
                self._held[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None
        if not strange:
            self._graphs.add(loss_fn, size)


def leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose `.grad` the backward pass of `loss` would write to."""
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
            yield from _inside(getattr(node, "run_function", None))
        for after, _ in following:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)


def _inside(function: Any) -> Iterator[torch.Tensor]:
    """The parameters of the modules that a checkpoint with `use_reentrant=True` runs again, out of the graph's sight:
    the function itself, what it is bound to, and what it closes over."""
    if isinstance(function, Carried):
        function = function.function
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY]
    if isinstance(function, functools.partial):
        cells += [function.func, *function.args]
    for found in (function, getattr(function, "__self__", None), *cells):
        if isinstance(found, nn.Module):
            yield from (p for _, p in tree_parameters(found) if p.requires_grad and p.is_leaf)  # not cast mode's copies
