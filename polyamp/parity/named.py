"""`Named`: how a function of the user's reaches a worker: by its module's name or file, and its name in there.

`run` names functions and hands over where modules are found (`paths`); `worker` finds them again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from polyamp.errors import ArgumentError, described

MAIN: Final = "__polyamp_parity_main__"
"""What a script is called in a worker, where its own name is another module's."""
_GIVE: Final = "Write a function with a name, at the top level of a file, and give that"


class Named(msgspec.Struct, frozen=True, kw_only=True, tag="named"):
    """A function, or a class, of a module.

    Attributes:
        module: name of the module.
        name: its name in the module, with dots.
        file: the module's file.
    """

    module: str
    name: str
    file: str

    def __str__(self) -> str:
        return f"{self.name} of {self.file}"

    def found(self) -> Any:
        """The function, in this process.

        Raises:
            ArgumentError: the module has no such name (a part of it is made by code that only runs as a script).
            Exception: whatever importing the module raises.
        """
        value: Any = module_of(self.module, Path(self.file))
        for part in self.name.split("."):
            if not hasattr(value, part):
                raise ArgumentError(
                    f"{self.file} has no {self.name} where it is imported: is it made under "
                    'if __name__ == "__main__":? Move it to the top level of the file.'
                )
            value = getattr(value, part)
        return value


def module_of(name: str, file: Path) -> types.ModuleType:
    """The module of a file: by its name where that leads to the file, else by the file itself, under that name."""
    if name != MAIN:
        known = sys.modules.get(name)
        if known is not None and _same(getattr(known, "__file__", None), file):
            return known
        if _same(_place_of(name), file):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name if name not in sys.modules else MAIN, file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{file} is no Python file: functions are looked for in files that end in .py.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(function: Any, argument: str) -> Named:
    """How a worker finds a function.

    Args:
        function: a function or a class.
        argument: what messages call it by.

    Raises:
        ArgumentError: a lambda, a function inside of another, a method, an object, or one that no file holds.
    """
    if isinstance(function, functools.partial):
        raise _refused(argument, "a functools.partial", f"{_GIVE}: it calls the other one with its arguments.")
    if isinstance(function, types.MethodType):
        raise _refused(argument, f"the method {function.__qualname__} of an object", f"{_GIVE}: it makes the object.")
    if not isinstance(function, types.FunctionType | type):
        raise _refused(argument, described(function), f"{_GIVE}.")
    name, module = function.__qualname__, function.__module__
    if "<lambda>" in name:
        raise _refused(argument, "a lambda", f"{_GIVE}.")
    if "<locals>" in name:
        inside = name.partition(".<locals>")[0]
        raise _refused(argument, f"{function.__name__}, which is made inside of {inside}", f"{_GIVE}.")
    held = sys.modules.get(module)
    file = getattr(held, "__file__", None)
    if held is None or file is None or not Path(file).is_file():
        raise _refused(argument, f"{name} of {module}, which has no file", "Put it into a file and import that.")
    if _reached(held, name) is not function:
        raise _refused(argument, f"{name}, and {module}.{name} is another object", "Give what the module has there.")
    place = Path(file).resolve()
    return Named(module=_importable(held, module, place), name=name, file=str(place))


def paths() -> list[str]:
    """Where this process looks for modules, without what belongs to its interpreter: another may have its own."""
    own = [Path(each).resolve() for each in {*sysconfig.get_paths().values(), *site.getsitepackages()} if each]
    own += [Path(site.getusersitepackages()).resolve()]
    found = [str(Path(each or os.curdir).resolve()) for each in sys.path]
    return [
        each for each in dict.fromkeys(found)
        if Path(each).is_dir() and not any(Path(each).is_relative_to(mine) for mine in own)
    ]  # fmt: skip


def look_in(folders: Sequence[str]) -> None:
    """Look for modules in these folders too, before all others, as whoever handed them over does."""
    known = {str(Path(each).resolve()) for each in sys.path if each}
    sys.path[:0] = [each for each in folders if each not in known]


def _refused(argument: str, came: str, instead: str) -> ArgumentError:
    return ArgumentError(
        f"{argument} must be a function that another process can import: it is called in one. Received: {came}. "
        f"{instead}"
    )


def _reached(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _importable(module: Any, name: str, file: Path) -> str:
    """The name by which a module's file is imported elsewhere."""
    if name != "__main__":
        return name
    spec = getattr(module, "__spec__", None)
    if spec is not None and _same(_place_of(spec.name), file):
        return str(spec.name)  # python -m package.module
    return file.stem if _same(_place_of(file.stem), file) else MAIN


def _place_of(name: str) -> str | None:
    """The file that an import of a module would run; None if there is none. Imports nothing."""
    within: Any = None
    found = None
    parts = name.split(".")
    for number in range(len(parts)):
        found = _finders(".".join(parts[: number + 1]), within)
        if found is None:
            return None
        within = found.submodule_search_locations
        if within is None and number + 1 < len(parts):
            return None
    return None if found is None else found.origin


def _finders(name: str, within: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, within, None)
        if spec is not None:
            return spec
    return None


def _same(place: str | None, file: Path) -> bool:
    return place is not None and Path(place).resolve() == file
