"""Walks the syntax tree of every module of a backend: a framework's private names stand in `compat.py` alone.

A private name is one that begins with an underscore and is not the package's own: in an import or a dotted name of the
framework, an attribute of anything but `self`, or a string that `getattr` and its like may read. What is found in
`compat.py` is allowed there, because that file says per name what is relied on.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
DOOR = "compat.py"
DOORS_OF_ROOMS = {
    ("distributed", "torch_only", DOOR),
    ("precision", "torch_only", DOOR),
    ("observe", "torch_only", DOOR),
    ("polyamp_keras", "engines", "tensorflow_compat.py"),
    ("polyamp_keras", "engines", "torch_compat.py"),
    ("polyamp_jax", "models", "flax_compat.py"),
    ("polyamp_jax", "models", "library_compat.py"),
}
"""What one device never imports, or is of one library or of the dispatcher, has a door of its own."""
FRAMEWORKS = {
    "polyamp_jax": ("jax", "jaxlib", "flax", "optax", "equinox", "haiku"),
    "polyamp_torch": ("torch", "accelerate", "lightning"),
    "polyamp_tensorflow": ("tensorflow", "tf", "keras"),
    "polyamp_keras": ("keras", "tensorflow", "tf", "torch", "jax"),
}
"""Backend package -> the roots of what it builds on. A backend is added here when its `compat.py` is the only door."""
PUBLIC = {"_asdict", "_fields", "_field_defaults", "_make", "_replace"}
"""What `typing.NamedTuple` documents under such names."""
OWNERS = {"self", "cls"}
HIDDEN = {("keras", "src"), ("tensorflow", "python"), ("tf", "python")}
"""Modules that are private under a name without an underscore."""
FILES = [(package, path) for package in FRAMEWORKS for path in sorted((ROOT / "backends" / package).rglob("*.py"))]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Use(NamedTuple):
    """One use of a private name, and where."""

    name: str
    line: int


def is_private(name: str) -> bool:
    """True for `_name` and TensorFlow's `__internal__`, but not for polyamp's marks on objects of others."""
    dunder = name.startswith("__") and name.endswith("__") and name != "__internal__"
    return name.startswith("_") and name != "_" and not dunder and not name.startswith("_polyamp_")


def own_names(tree: ast.AST) -> set[str]:
    """The private names that a module defines itself: functions, classes, variables, and attributes of its objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__slots__" for target in targets):
                found.update(item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant))
    return {name for name in found if isinstance(name, str) and is_private(name)}


def private_uses(source: str, frameworks: tuple[str, ...], inherited: set[str] | None = None) -> list[Use]:
    """Every use of a name that may be private to a framework.

    Args:
        source: a module's text.
        frameworks: root modules.
        inherited: private names that the package's other modules define, which `self` may have from a base class.
    """
    tree = ast.parse(source)
    own = own_names(tree)
    of_self = own | (inherited or set())
    standard = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in sys.stdlib_module_names
    }
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        Use(name, node.lineno)  # type: ignore[attr-defined]  # the nodes below have one
        for node in ast.walk(tree)
        for name in _named(node, frameworks, standard)
        if id(node) not in documented and name not in PUBLIC and name not in (of_self if _of_self(node) else own)
    ]


def _named(node: ast.AST, frameworks: tuple[str, ...], standard: set[str]) -> Iterator[str]:
    """The private names that one node of the tree mentions."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_private_path(alias.name, frameworks))
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in frameworks:
        paths = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from (path for path in paths if _is_private_path(path, frameworks))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in HIDDEN:
        yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Attribute) and is_private(node.attr):
        if not (isinstance(node.value, ast.Name) and node.value.id in standard):
            yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        identifier = node.value.isidentifier() and is_private(node.value) and node.value not in sys.stdlib_module_names
        if identifier or _is_private_path(node.value, frameworks):
            yield node.value


def _is_private_path(path: str, frameworks: tuple[str, ...]) -> bool:
    """True for a dotted name of a framework with a private part, such as "torch._C"."""
    parts = path.split(".")
    dotted = re.fullmatch(r"\w+(\.\w+)+", path) is not None
    return dotted and parts[0] in frameworks and (tuple(parts[:2]) in HIDDEN or any(map(is_private, parts)))


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in OWNERS


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_own(node.value)


@functools.cache
def inherited_names(package: str) -> set[str]:
    """The private names that any module of a backend's package defines, or of the package that it builds on."""
    packages = (package, "polyamp_keras") if package != "polyamp_keras" else (package,)
    paths = sorted(path for each in packages for path in (ROOT / "backends" / each).rglob("*.py"))
    return set().union(*(own_names(ast.parse(path.read_text())) for path in paths))


def _has_a_door(path: Path) -> bool:
    return path.parts[-3:] in DOORS_OF_ROOMS


@pytest.mark.parametrize(
    ("package", "path"), [pytest.param(*item, id=str(item[1].relative_to(ROOT / "backends"))) for item in FILES]
)
def test_private_names_of_a_framework_stand_in_compat_alone(package: str, path: Path) -> None:
    if path == ROOT / "backends" / package / DOOR or _has_a_door(path):
        return
    found = private_uses(path.read_text(), FRAMEWORKS[package], inherited_names(package))
    assert found == [], f"import it from {package}.compat, which says what is relied on"


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_the_door_exists_and_is_used(package: str) -> None:
    door = ROOT / "backends" / package / DOOR
    assert private_uses(door.read_text(), FRAMEWORKS[package]) != []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._C as c",
        "from torch._functorch import config",
        "from torch.overrides import _push_mode",
        "import torch\ntorch.utils._pytree.tree_map",
        "def f(module):\n    return module._parameters",
        "def f(grad):\n    return [grad._version for _ in range(2)]",
        "class A:\n    def f(self):\n        return self._inner_of_torch",
        "class A(B):\n    def f(self):\n        return super()._unscale()",
        "getattr(optimizer, '_supports', False)",
        "operator.attrgetter('_version')",
        "sys.modules['torch._dynamo']",
        "vars(x).get('_hooks')",
        "def f(x):\n    x._dynamo_marked = True",
        "class A:\n    def f(self, other):\n        other._inside = self",
    ],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert len(private_uses(source, ("torch",))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src.layers",
        "from keras.src import backend",
        "import tensorflow.python.framework.ops",
        "from tensorflow.python import pywrap",
        "keras.src.backend.x",
        "tf.python.y",
        "tf.__internal__.FuncGraph",
        "layer._flatten_layers()",
        "setattr(optimizer, '_filter_empty_gradients', f)",
    ],
)
def test_a_private_name_of_tensorflow_is_seen(source: str) -> None:
    assert len(private_uses(source, FRAMEWORKS["polyamp_tensorflow"])) == 1


def test_what_is_ones_own_is_not_private() -> None:
    source = '''
"""Says what `torch._C` is."""
import sys
from polyamp_torch.compat import foreach_add
from torch import nn

class A:
    __slots__ = ("_held", "_other")

    def __init__(self):
        self._held = sys._getframe(1)

    def f(self, other):
        return self._held is other._held, self._g(), self._of_base, nn.__name__, point._replace(x=1), "_signal"

    def _mark(self, layer):
        layer._polyamp_mark = True

    def _g(self):
        return getattr(self, "_held"), "torch.nn", "a torch._C in a sentence"
'''
    assert private_uses(source, ("torch",), {"_of_base"}) == []
