"""Which parts of a model `torch.compile` has made one function of, so that a hook inside of them would have it compile
otherwise, or is not run. Called by the rest of this room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from polyamp_torch.compat import compiled_in_place, is_compiled
from polyamp_torch.porting.walk import short_paths, wrapped


class Compiled(NamedTuple):
    """A part that is compiled.

    Attributes:
        place: path of its module, `.`-separated, wrappers included.
        inside: how the places of modules begin that run in it; None where nobody knows which those are.
        module: the module.
    """

    place: str
    inside: str | None
    module: nn.Module


def compiled_parts(model: Any) -> Iterator[Compiled]:
    """Modules that are wrapped by `torch.compile`, that are compiled in place, and that hold a compiled function."""
    for place, module in model.named_modules() if isinstance(model, nn.Module) else ():
        before = f"{place}." if place else ""
        if is_compiled(module):
            yield Compiled(place, f"{before}{wrapped(module)}.", module)
        elif compiled_in_place(module) is not None:
            yield Compiled(place, before, module)
        else:
            names = [name for name, value in vars(module).items() if callable(value) and is_compiled(value)]
            if names:
                yield Compiled(place, before if "forward" in names else None, module)


def unseen(model: nn.Module, loss_fn: Any) -> str:
    """Why some modules do not show their outputs; "" where all do."""
    if is_compiled(loss_fn):
        return "torch.compile made one function of loss_fn, in which no module runs by itself"
    short = short_paths(model)
    found = [short[part.place] for part in compiled_parts(model)]
    if not found:
        return ""
    named = ", ".join(repr(path) if path else "the model" for path in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"torch.compile made one function of {named}{more}, whose inner modules do not run one by one"
