"""Every public name of polyamp and of its backends, read from the source files: no framework is imported.

A package's public names are its `__all__`, and what it imports for type checkers as `x as x`: those of `polyamp`, which
has its names lazily. `optimizers.__all__` belongs to `polyamp` too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    *("polyamp", "polyamp.losses", "polyamp.schedules", "polyamp.porting", "polyamp.parity"),
    *("polyamp_torch", "polyamp_torch.lightning", "polyamp_torch.accelerate", "polyamp_tensorflow", "polyamp_jax"),
    "polyamp_keras",
)
_INTERFACES: Final = ("Spec",)
"""Base classes whose members are for whoever writes a class of that kind; guides describe them."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Statement = Definition | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class PublicName:
    """One public name.

    Attributes:
        name: as users write it, such as "polyamp.losses.Mean".
        home: the module that defines it.
        node: its definition; None for a module.
        text: its docstring.
    """

    name: str
    home: str
    node: Statement | None
    text: str


def public_names(package: str) -> list[PublicName]:
    """Return the public names of a package, in alphabetical order.

    Raises:
        LookupError: a name has no definition that can be found.
    """
    names = _listed(package)
    if package == "polyamp":
        names = names | _listed("polyamp.recipe.optimizers")
    return [
        _public_name(package, name) for name in sorted(names - {"__version__"}, key=lambda name: (name.lower(), name))
    ]


def definition(module: str, name: str) -> tuple[str, Statement] | None:
    """Return the module that defines a name which `module` defines, imports or gives another name, and the node.

    None if the name is a module, or is defined outside of the repository.
    """
    for node in _statements(_tree(module).body):
        if isinstance(node, ast.ImportFrom) and node.module and _file(node.module) is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return None if _file(f"{node.module}.{alias.name}") else definition(node.module, alias.name)
    found: tuple[str, Statement] | None = None
    for node in _statements(_tree(module).body):
        if isinstance(node, Definition) and node.name == name:
            found = module, node  # the last one: what stands before it are an overloaded function's signatures
        elif isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            if isinstance(node.value, ast.Name) and (meant := definition(module, node.value.id)) is not None:
                return meant  # another name, as in `sgd = SGD`
            found = module, node
    return found


def members(home: str, node: ast.ClassDef) -> dict[str, tuple[ast.FunctionDef, str]]:
    """Return the documented public methods and properties of a class: name -> (definition, docstring)."""
    found: dict[str, tuple[ast.FunctionDef, str]] = {}
    shown = _shown_names(home, node)
    for _, each in lineage(home, node):
        for member in each.body if each.name not in _INTERFACES else ():
            if isinstance(member, ast.FunctionDef) and (member.name in shown or not (shown or member.name[0] == "_")):
                text = ast.get_docstring(member)
                if text and member.name not in found and not _has_decorator(member, "overload", "setter"):
                    found[member.name] = member, text
    return found


def _shown_names(home: str, node: ast.ClassDef) -> set[str]:
    """Return the names that `dir` offers of a class which lists them in `_shown`, with its bases; empty without."""
    assigned = [
        each.value
        for _, kind in lineage(home, node)
        for each in kind.body
        if isinstance(each, ast.Assign | ast.AnnAssign) and _targets(each) == ["_shown"] and each.value is not None
    ]
    return {name for value in assigned for name in ast.literal_eval(value)}


def lineage(home: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its base classes in this repository, with their modules."""
    yield home, node
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(expression, ast.Name):
            found = definition(home, expression.id)
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from lineage(found[0], found[1])


def module_text(module: str) -> str:
    """Return a module's docstring."""
    return ast.get_docstring(_tree(module)) or ""


def _public_name(package: str, name: str) -> PublicName:
    full = f"{package}.{name}"
    found = definition(package, name)
    if found is None and package == "polyamp":
        found = definition("polyamp.recipe.optimizers", name)
    if found is not None:
        home, node = found
        return PublicName(full, home, node, _docstring(home, node))
    module = _imported_module(package, name)
    if module is None:
        raise LookupError(f"{full} has no definition that can be found")
    return PublicName(full, module, None, module_text(module))


def _docstring(home: str, node: Statement) -> str:
    if isinstance(node, Definition):
        return ast.get_docstring(node) or ""
    body = list(_statements(_tree(home).body))
    for before, after in itertools.pairwise(body):
        if before is node and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return inspect.cleandoc(str(after.value.value))
    return ""


def _listed(package: str) -> set[str]:
    listed: set[str] = set()
    for node in _statements(_tree(package).body):
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            listed |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.ImportFrom):
            listed |= {alias.name for alias in node.names if alias.asname == alias.name}
    return listed


def _imported_module(package: str, name: str) -> str | None:
    for node in _statements(_tree(package).body):
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return f"{node.module}.{name}" if _file(f"{node.module}.{name}") else None
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those that only a type checker reads."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
        else:
            yield node


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _has_decorator(node: Definition, *names: str) -> bool:
    return bool({getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list} & set(names))


@functools.cache
def _tree(module: str) -> ast.Module:
    file = _file(module)
    if file is None:
        raise LookupError(f"no module {module} in this repository")
    return ast.parse(file.read_text(encoding="utf-8"))


def _file(module: str) -> Path | None:
    path = Path(*module.split("."))
    for folder in (ROOT, ROOT / "backends"):
        for file in (folder / path / "__init__.py", (folder / path).with_suffix(".py")):
            if file.exists():
                return file
    return None
