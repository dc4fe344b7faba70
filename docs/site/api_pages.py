"""The reference pages of the API: `reference/api/*.md`, made of the docstrings of every public name."""

from __future__ import annotations

import ast
import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docstrings import docstring_markdown, first_sentence, raised
from public_names import PACKAGES, PublicName, lineage, members, module_text, public_names


@dataclass(frozen=True)
class ApiPage:
    """One page of the reference.

    Attributes:
        file: its name, without `.md`.
        title: its heading.
        packages: packages all of whose names it has.
        homes: modules, or packages of modules, whose names of `polyamp` itself it has.
    """

    file: str
    title: str
    packages: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()


PAGES: Final = (
    ApiPage("training", "Training", homes=("train", "results", "contract.backend", "contract.registry")),
    ApiPage(
        "recipes",
        "Recipes, policies, loss scalers",
        homes=(
            "recipe.recipe",
            "recipe.policy",
            "recipe.scaler",
            "recipe.ema",
            "recipe.float8",
            "recipe.groups",
            "recipe.dialects",
        ),
    ),
    ApiPage("optimizers", "Optimizers", homes=("recipe.optimizer_formulas",)),
    ApiPage("schedules", "Learning-rate schedules", packages=("polyamp.schedules",)),
    ApiPage("losses", "Losses", packages=("polyamp.losses",)),
    ApiPage(
        "diagnosis",
        "Diagnosis",
        homes=("contract.explain", "contract.casting_report", "diagnosis", "doctor", "linter", "monitor", "nonfinite"),
    ),
    ApiPage("porting", "Moving models and trainings", packages=("polyamp.porting",), homes=("porting.port",)),
    ApiPage("parity", "Comparing trainings", packages=("polyamp.parity",), homes=("parity.compare",)),
    ApiPage("errors", "Errors", homes=("errors",)),
    ApiPage(
        "torch", "polyamp_torch", packages=("polyamp_torch", "polyamp_torch.lightning", "polyamp_torch.accelerate")
    ),
    ApiPage("tensorflow", "polyamp_tensorflow", packages=("polyamp_tensorflow",)),
    ApiPage("jax", "polyamp_jax", packages=("polyamp_jax",)),
    ApiPage("keras", "polyamp_keras", packages=("polyamp_keras",)),
)


def names_by_page() -> dict[ApiPage, list[PublicName]]:
    """Return the public names that each page has.

    Raises:
        LookupError: a name belongs to no page, or to two.
    """
    pages: dict[ApiPage, list[PublicName]] = {page: [] for page in PAGES}
    for package in PACKAGES:
        for name in public_names(package):
            if name.name not in PACKAGES:  # a package is a page, or a part of one
                found = [page for page in PAGES if _holds(page, package, name)]
                if len(found) != 1:
                    raise LookupError(f"{name.name} ({name.home}) belongs to one page of PAGES. Found: {found}")
                pages[found[0]].append(name)
    return pages


def write_api_pages(folder: Path) -> None:
    """Write the pages and their index into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = names_by_page()
    for page, names in pages.items():
        text = errors_markdown(page, pages) if page.file == "errors" else page_markdown(page, names)
        (folder / f"{page.file}.md").write_text(text, encoding="utf-8")
    (folder / "index.md").write_text(index_markdown(pages), encoding="utf-8")


def index_markdown(pages: dict[ApiPage, list[PublicName]]) -> str:
    """Return the page that lists every public name with its first sentence."""
    parts = [f"# API\n\n{_module('polyamp')}\nEvery public name, with its first sentence.\n"]
    for page, names in pages.items():
        rows = [f"| {{py:obj}}`{name.name}` | {first_sentence(name.text)} |" for name in names]
        table = ["::::{container} names", "| name | |", "|---|---|", *rows, "::::", ""]
        parts.append("\n".join([f"## [{page.title}]({page.file}.md)\n", *table]))
    listed = "\n".join(page.file for page in pages)
    return "\n".join([*parts, f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"])


def page_markdown(page: ApiPage, names: list[PublicName]) -> str:
    """Return one page."""
    parts = [f"# {page.title}\n"]
    for package in page.packages:
        if len(page.packages) > 1:
            parts.append(f"## `{package}`\n")
        parts.append(_module(package))
        parts.append(docstring_markdown(module_text(package)))
        parts += [name_markdown(name) for name in names if name.name.rpartition(".")[0] == package]
    parts += [name_markdown(name) for name in names if name.name.rpartition(".")[0] not in page.packages]
    return "\n".join(parts)


def errors_markdown(page: ApiPage, pages: dict[ApiPage, list[PublicName]]) -> str:
    """Return the page of the errors, each with the public names that say when they raise it."""
    causes: dict[str, list[str]] = {}
    for name in (name for names in pages.values() for name in names):
        texts = [(name.name, name.text)]
        if isinstance(name.node, ast.ClassDef):
            texts += [(f"{name.name}.{member}", text) for member, (_, text) in members(name.home, name.node).items()]
        for where, text in texts:
            for error, cause in raised(text):
                causes.setdefault(f"polyamp.{error}", []).append(f"- {{py:obj}}`{where}`: {cause}")
    parts = [
        f"# {page.title}\n\nA message names the argument, what is accepted, what was received, and what to do next. "
        "Below each error stand the names that raise it, and when.\n"
    ]
    for name in pages[page]:
        rows = causes.get(name.name, [])
        text = "\n".join([docstring_markdown(name.text), *(["**Raised by**\n", *rows] if rows else []), ""])
        parts.append(_directive("class", name.name, text, ticks=5))
    return "\n".join(parts)


def name_markdown(name: PublicName) -> str:
    """Return the description of one name, and of the members of a class."""
    node, package = name.node, name.name.rpartition(".")[0]
    if isinstance(node, ast.ClassDef):
        parts = [docstring_markdown(name.text)]
        for member, (function, text) in sorted(members(name.home, node).items()):
            kind = "property" if _is_property(function) else "method"
            signature = "" if kind == "property" else _signature(function, package, is_method=True)
            parts.append(_directive(kind, member + signature, docstring_markdown(text), ticks=4))
        return _directive("class", name.name + _class_signature(name.home, node, package), "\n".join(parts), ticks=5)
    text = docstring_markdown(name.text)
    if isinstance(node, ast.FunctionDef):
        return _directive("function", name.name + _signature(node, package), text, ticks=5)
    if node is None:
        return f"## `{name.name}`\n\n{_module(name.name)}\n{text}"
    return _directive("data", name.name, text, ticks=5)


def _module(name: str) -> str:
    """Return the entry of a module. Names that follow are written whole, so they belong to no current module."""
    return f"```{{py:module}} {name}\n```\n\n```{{py:currentmodule}} None\n```\n"


def _directive(kind: str, signature: str, text: str, *, ticks: int) -> str:
    return f"{'`' * ticks}{{py:{kind}}} {signature}\n\n{text}{'`' * ticks}\n"


def _holds(page: ApiPage, package: str, name: PublicName) -> bool:
    if package != "polyamp":
        return package in page.packages
    return any(f"{name.home}.".startswith(f"polyamp.{home}.") for home in page.homes)


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, package: str, *, is_method: bool = False) -> str:
    whole = _WholeNames(package).visit(copy.deepcopy(function))
    arguments = whole.args
    decorators = {getattr(each, "id", "") for each in function.decorator_list}
    if is_method and "staticmethod" not in decorators:
        (arguments.posonlyargs or arguments.args).pop(0)
    returns = f" -> {ast.unparse(whole.returns)}" if whole.returns is not None else ""
    return f"({ast.unparse(arguments)}){returns}"


class _WholeNames(ast.NodeTransformer):
    """Write the types that another package has under the same name with `package` in front of them."""

    def __init__(self, package: str) -> None:
        self.package = package
        others = {each for other in PACKAGES if other != package for each in _short_names(other)}
        self.repeated = _short_names(package) & others

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return the name, whole if it is in two packages."""
        return ast.Attribute(ast.Name(self.package), node.id) if node.id in self.repeated else node


@functools.cache
def _short_names(package: str) -> set[str]:
    return {each.name.rpartition(".")[2] for each in public_names(package)}


def _class_signature(home: str, node: ast.ClassDef, package: str) -> str:
    """Return the signature of `__init__`, or of the one that fields make."""
    bases = list(lineage(home, node))
    for _, each in bases:
        for member in each.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__" and each.name != "Record":
                return _signature(member, package, is_method=True).removesuffix(" -> None")
    fields: dict[str, str] = {}
    for _, each in reversed(bases):
        if each.name != "Record":
            for member in each.body:
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    kind = ast.unparse(member.annotation)
                    if not kind.startswith("ClassVar") and not member.target.id.startswith("_"):
                        default = f" = {ast.unparse(member.value)}" if member.value is not None else ""
                        fields[member.target.id] = f"{member.target.id}: {kind}{default}"
    return f"({', '.join(fields.values())})" if fields else ""


def _is_property(function: ast.FunctionDef) -> bool:
    return any(getattr(each, "id", getattr(each, "attr", "")).endswith("property") for each in function.decorator_list)
