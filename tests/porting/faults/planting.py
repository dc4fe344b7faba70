"""The fixture models with a fault in them: their code with a few words replaced, other sizes, arrays carried wrongly.

Called by `finding` and `clean`. A model's file is read as text, changed, and run as a module of its own, so that the
models of `tests.fixtures.port` are never touched.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np

from tests.fixtures.port import common

Array = np.ndarray[Any, Any]
Edit = tuple[str, str]
"""What stands in the code, and what stands there instead."""

LIBRARIES: Final = ("torch", "keras", "linen", "nnx", "equinox", "haiku")
_FILES: Final = Path(common.__file__).parent
_number = itertools.count()


class Carried(NamedTuple):
    """Arrays on their way that somebody turned wrongly.

    Attributes:
        pattern: regular expression that finds the names of the target's leaves.
        change: the wrong values, of all that were found, in the order of the names.
    """

    pattern: str
    change: Callable[..., Any]


class Fault(NamedTuple):
    """One fault.

    Attributes:
        what: in words.
        model: of `common.MODELS`.
        source: library.
        target: library.
        at: regular expression of the target's paths that may be named, and no other: the module that the fault is in,
            or the first matched layer behind it where it is in the code between layers.
        edits: of the target's code.
        ours: of the source's code.
        carried: what happened to arrays on their way.
        names: wrong names that a user gave.
        both: edits of correct code, library -> edits, that give both sides what the fixture model does not have.
    """

    what: str
    model: str
    source: str
    target: str
    at: str
    edits: tuple[Edit, ...] = ()
    ours: tuple[Edit, ...] = ()
    carried: tuple[Carried, ...] = ()
    names: Mapping[str, str] | None = None
    both: Mapping[str, tuple[Edit, ...]] | None = None

    @property
    def where(self) -> str:
        """Where it was planted, in words."""
        if self.names:
            return "names="
        return "arrays" if self.carried else "the target's code" if self.edits else "the source's code"


class DoesNotFitError(Exception):
    """The code of the fixture models was changed since the fault was written."""


def code(library: str, edits: tuple[Edit, ...]) -> str:
    """The text of a library's models with other words in it.

    Raises:
        DoesNotFitError: what an edit replaces is not there exactly once.
    """
    text = (_FILES / f"{library}_models.py").read_text(encoding="utf-8")
    for before, after in edits:
        if text.count(before) != 1:
            raise DoesNotFitError(f"{library}_models.py has {text.count(before)} places like {before!r}")
        text = text.replace(before, after)
    return text


@functools.cache
def sized(sizes: tuple[tuple[str, Any], ...]) -> ModuleType:
    """`common` with other sizes."""
    if not sizes:
        return common
    text = (_FILES / "common.py").read_text(encoding="utf-8")
    module = _run(text, "common")
    for name, value in sizes:
        if name == "HEADS, WIDTH":
            raise DoesNotFitError(name)
        setattr(module, name, value)
    return module


@functools.cache
def models(library: str, edits: tuple[Edit, ...] = (), sizes: tuple[tuple[str, Any], ...] = ()) -> ModuleType:
    """A library's models: changed, in sizes of their own."""
    text = code(library, edits)
    if sizes:
        name = sized(sizes).__name__
        text = text.replace("from tests.fixtures.port import common", f"import {name} as common")
        text = text.replace("from tests.fixtures.port.common import", f"from {name} import")
    return _run(text, f"{library}_models")


def _run(text: str, name: str) -> ModuleType:
    module = ModuleType(f"{name}_{next(_number)}")
    sys.modules[module.__name__] = module  # dataclasses look their annotations up there
    exec(compile(text, f"<{module.__name__}>", "exec"), vars(module))
    return module


@contextlib.contextmanager
def carrying(model: Any, wrong: tuple[Carried, ...]) -> Iterator[None]:
    """A block in which arrays come to a target turned wrongly."""
    from polyamp.contract import registry
    from polyamp.porting.layouts.lazy_array import Lazy

    converter = registry.backend_for(model).porting
    fill = converter.fill

    def fills(target: Any, leaves: Mapping[str, Any]) -> Any:
        found = dict(leaves)
        for each in wrong:
            names = sorted(name for name in found if re.search(each.pattern, name))
            if not names:
                raise DoesNotFitError(f"{each.pattern!r} finds none of {sorted(found)}")
            old = [np.array(found[name].read()) for name in names]
            new = each.change(*old)
            for name, before, values in zip(names, old, new if isinstance(new, tuple) else (new,), strict=True):
                if np.shape(values) != before.shape:
                    raise DoesNotFitError(f"{name}: {before.shape} became {np.shape(values)}")
                found[name] = Lazy.of(np.ascontiguousarray(np.asarray(values, before.dtype)))
        return fill(target, found)

    if not wrong:
        yield
        return
    with mock.patch.object(type(converter), "fill", staticmethod(fills)):
        yield
