"""Parts of a model that `torch.compile` has compiled, in which a hook would change the compilation or does not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from polyamp_torch.compat import compiled_call_of_module, is_compiled
from polyamp_torch.porting.inventory import short_paths, wrapper_attribute


class CompiledPart(NamedTuple):
    """Compiled part of a model.

    Attributes:
        place: path of its module, `.`-separated, wrappers included.
        inside: path prefix of the modules that run in it; None if they are unknown.
        module: the module.
    """

    place: str
    inside: str | None
    module: nn.Module


def compiled_parts(model: Any) -> Iterator[CompiledPart]:
    """Yield modules that `torch.compile` wraps, that are compiled in place, or that have a compiled function."""
    for place, module in model.named_modules() if isinstance(model, nn.Module) else ():
        before = f"{place}." if place else ""
        if is_compiled(module):
            yield CompiledPart(place, f"{before}{wrapper_attribute(module)}.", module)
        elif compiled_call_of_module(module) is not None:
            yield CompiledPart(place, before, module)
        else:
            names = [name for name, value in vars(module).items() if callable(value) and is_compiled(value)]
            if names:
                yield CompiledPart(place, before if "forward" in names else None, module)


def hidden_modules_reason(model: nn.Module, loss_fn: Any) -> str:
    """Return why the outputs of some modules cannot be observed; "" if all can."""
    if is_compiled(loss_fn):
        return "torch.compile made one function of loss_fn, in which no module runs by itself"
    short = short_paths(model)
    found = [short[part.place] for part in compiled_parts(model)]
    if not found:
        return ""
    named = ", ".join(repr(path) if path else "the model" for path in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"torch.compile made one function of {named}{more}, whose inner modules do not run one by one"
