"""`FunctionRef`: importable reference to a user's function, by module name or file and qualified name.

A worker also gets the import path of the parent process (`import_paths`).
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

from polyamp.errors import ArgumentError, describe_value

MAIN_MODULE: Final = "__polyamp_parity_main__"
"""Module name of a script in a worker, where the script's own name belongs to another module."""
_HINT: Final = "Write a function with a name, at the top level of a file, and give that"


class FunctionRef(msgspec.Struct, frozen=True, kw_only=True, tag="named"):
    """Reference to a function or a class of a module.

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

    def load(self) -> Any:
        """Import and return the function.

        Raises:
            ArgumentError: the module has no such name (it is defined by code that only runs as a script).
            Exception: any error of importing the module.
        """
        value: Any = load_module_file(self.module, Path(self.file))
        for part in self.name.split("."):
            if not hasattr(value, part):
                raise ArgumentError(
                    f"{self.file} has no {self.name} where it is imported: is it made under "
                    'if __name__ == "__main__":? Move it to the top level of the file.'
                )
            value = getattr(value, part)
        return value


def load_module_file(name: str, file: Path) -> types.ModuleType:
    """Import a module by its name if that resolves to the file, else from the file itself, under that name."""
    if name != MAIN_MODULE:
        known = sys.modules.get(name)
        if known is not None and _is_same_file(getattr(known, "__file__", None), file):
            return known
        if _is_same_file(_module_origin(name), file):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name if name not in sys.modules else MAIN_MODULE, file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"{file} is no Python file: functions are looked for in files that end in .py.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_function_ref(function: Any, argument: str) -> FunctionRef:
    """Return a reference with which a worker can import a function.

    Args:
        function: a function or a class.
        argument: its name in error messages.

    Raises:
        ArgumentError: it is a lambda, a nested function, a method, an object, or not defined in a file.
    """
    if isinstance(function, functools.partial):
        raise _not_importable_error(
            argument, "a functools.partial", f"{_HINT}: it calls the other one with its arguments."
        )
    if isinstance(function, types.MethodType):
        raise _not_importable_error(
            argument, f"the method {function.__qualname__} of an object", f"{_HINT}: it makes the object."
        )
    if not isinstance(function, types.FunctionType | type):
        raise _not_importable_error(argument, describe_value(function), f"{_HINT}.")
    name, module = function.__qualname__, function.__module__
    if "<lambda>" in name:
        raise _not_importable_error(argument, "a lambda", f"{_HINT}.")
    if "<locals>" in name:
        inside = name.partition(".<locals>")[0]
        raise _not_importable_error(argument, f"{function.__name__}, which is made inside of {inside}", f"{_HINT}.")
    defining = sys.modules.get(module)
    file = getattr(defining, "__file__", None)
    if defining is None or file is None or not Path(file).is_file():
        raise _not_importable_error(
            argument, f"{name} of {module}, which has no file", "Put it into a file and import that."
        )
    if _nested_attribute(defining, name) is not function:
        raise _not_importable_error(
            argument, f"{name}, and {module}.{name} is another object", "Give what the module has there."
        )
    place = Path(file).resolve()
    return FunctionRef(module=_import_name(defining, module, place), name=name, file=str(place))


def import_paths() -> list[str]:
    """Return this process's import path without the interpreter's own folders: another interpreter may be used."""
    own = [Path(each).resolve() for each in {*sysconfig.get_paths().values(), *site.getsitepackages()} if each]
    own += [Path(site.getusersitepackages()).resolve()]
    found = [str(Path(each or os.curdir).resolve()) for each in sys.path]
    return [
        each for each in dict.fromkeys(found)
        if Path(each).is_dir() and not any(Path(each).is_relative_to(mine) for mine in own)
    ]  # fmt: skip


def add_import_paths(folders: Sequence[str]) -> None:
    """Prepend folders to the import path."""
    known = {str(Path(each).resolve()) for each in sys.path if each}
    sys.path[:0] = [each for each in folders if each not in known]


def _not_importable_error(argument: str, received: str, advice: str) -> ArgumentError:
    return ArgumentError(
        f"{argument} must be a function that another process can import: it is called in one. Received: {received}. "
        f"{advice}"
    )


def _nested_attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _import_name(module: Any, name: str, file: Path) -> str:
    """Return the name under which other processes import a module's file."""
    if name != "__main__":
        return name
    spec = getattr(module, "__spec__", None)
    if spec is not None and _is_same_file(_module_origin(spec.name), file):
        return str(spec.name)  # python -m package.module
    return file.stem if _is_same_file(_module_origin(file.stem), file) else MAIN_MODULE


def _module_origin(name: str) -> str | None:
    """Return the file of a module, or None."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # it is in no package, or was loaded without a spec
        return None
    return None if spec is None else spec.origin


def _is_same_file(origin: str | None, file: Path) -> bool:
    return origin is not None and Path(origin).resolve() == file
