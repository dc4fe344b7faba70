"""Temporary replacement of private methods of a Keras optimizer and its members."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from polyamp_keras.compat import ALL_REDUCE_GRADIENTS, check_methods
from polyamp_keras.interrupts import EnsureUndo
from polyamp_keras.own_loop.optimizer_checks import optimizer_members


@contextlib.contextmanager
def replace_methods(
    optimizer: Any, replacements: Callable[[Any], dict[str, Callable[..., Any]]], *, purpose: str, instead: str
) -> Iterator[None]:
    """Context manager in which an optimizer and the members of a `MultiOptimizer` have other methods.

    Args:
        optimizer: a Keras optimizer.
        replacements: maps the optimizer or a member to its methods by name; the same names for each.
        purpose, instead: as in `check_methods`.

    Raises:
        UnsupportedError: this version of Keras lacks one of the methods.
    """
    members = optimizer_members(optimizer)
    names = list(replacements(optimizer))
    check_methods(optimizer, members, names, purpose=purpose, instead=instead)

    def restore() -> None:
        for member in members:
            for name in names:
                vars(member).pop(name, None)

    with EnsureUndo(restore):
        for member in members:
            vars(member).update(replacements(member))
        yield


def skip_gradient_reduction(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that disables a Keras optimizer's reduction of gradients, which `all_reduce_sum` has
    summed.

    Raises:
        UnsupportedError: this version of Keras lacks the method.
    """
    purpose, methods = "from adding up gradients over the replicas twice", {ALL_REDUCE_GRADIENTS: lambda pairs: pairs}
    return replace_methods(optimizer, lambda _: methods, purpose=purpose, instead="train on one replica")
