"""The reference of the API (`docs/site`): it has every public name with its docstring, and Sphinx is not needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import polyamp
from polyamp import losses, parity, porting, schedules

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "docs" / "site"


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of the site import each other by their names."""
    monkeypatch.syspath_prepend(str(TOOLS))


def tool(name: str) -> ModuleType:
    return importlib.import_module(name)


def listed() -> set[str]:
    """What the reference has."""
    return {name.name for names in tool("api_pages").names_by_page().values() for name in names}


def test_every_public_name_is_on_one_page() -> None:
    expected = {f"polyamp.{name}" for name in polyamp.__all__} - {"polyamp.__version__"}
    for module in (losses, parity, porting, schedules):
        expected.remove(module.__name__)  # a page of its own
        expected |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert {name for name in listed() if name.startswith("polyamp.")} == expected


@pytest.mark.parametrize("package", ["polyamp_torch", "polyamp_tensorflow", "polyamp_jax"])
def test_every_public_name_of_a_backend_is_on_its_page(package: str) -> None:
    tree = ast.parse((ROOT / "backends" / package / "__init__.py").read_text(encoding="utf-8"))
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(names) >= 10
    assert {f"{package}.{name}" for name in names} <= listed()


def test_a_states_page_has_what_dir_offers() -> None:
    names = tool("public_names")
    (state,) = (each for each in names.public_names("polyamp_jax") if each.name == "polyamp_jax.JaxState")
    assert sorted(names.members(state.home, state.node)) == ["attempts", "groups", "model"]
    (policy,) = (each for each in names.public_names("polyamp") if each.name == "polyamp.Policy")
    assert "replace" in names.members(policy.home, policy.node)


def test_every_public_name_has_a_docstring() -> None:
    pages = tool("api_pages").names_by_page()
    assert [name.name for names in pages.values() for name in names if len(name.text) < 20] == []


def test_a_name_without_a_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tool("api_pages")
    monkeypatch.setattr(pages, "PAGES", [page for page in pages.PAGES if page.file != "errors"])
    with pytest.raises(LookupError, match=r"polyamp.ArgumentError \(polyamp.errors\) belongs to one page of PAGES"):
        pages.names_by_page()


def test_signatures_are_those_of_the_code() -> None:
    pages = tool("api_pages")
    names = {name.name: name for names in pages.names_by_page().values() for name in names}

    def head(name: str) -> str:
        text: str = pages.name_markdown(names[name])
        return text.splitlines()[0].lstrip("`")

    init = (
        "{py:function} polyamp.init(model: M, recipe: Recipe, *, backend: str | None=None, **options: Any) -> State[M]"
    )
    assert head("polyamp.init") == init
    assert head("polyamp.Ema").startswith("{py:class} polyamp.Ema(decay: float")
    assert "betas: tuple[float, float] = (0.9, 0.999)" in head("polyamp.adamw"), "a field of a base class"
    assert head("polyamp_torch.BACKEND") == "{py:data} polyamp_torch.BACKEND"
    scaler = pages.name_markdown(names["polyamp.LossScaler"])
    assert "\n````{py:method} like(name: " in scaler, "without `cls`"
    assert "\n````{py:method} update(" in scaler


def test_every_error_says_who_raises_it() -> None:
    pages = tool("api_pages")
    (page,) = [page for page in pages.PAGES if page.file == "errors"]
    text = pages.errors_markdown(page, pages.names_by_page())
    errors = dict(re.findall(r"\{py:class\} polyamp\.(\w+)\n(.*?)`````", text, re.DOTALL))
    assert set(errors) == {name for name in polyamp.__all__ if name.endswith("Error")}
    assert "- {py:obj}`polyamp.apply_gradients`: gradients that do not match the state" in errors["GradientError"]
    assert "- {py:obj}`polyamp.Policy`: an unknown word or dtype" in errors["PolicyError"]
    docstring = "A.\n\nRaises:\n    AError, BError: one\n        and two.\n\nExample:\n    C: no"
    assert tool("docstrings").raised(docstring) == [("AError", "one and two."), ("BError", "one and two.")]


def test_a_docstring_becomes_markdown() -> None:
    text = """Return a thing.

    Args:
        first: what comes
            first.
        **options:
            `one` (True): an option
                of two lines.
            `two`: another.

    Returns:
        The thing.

    Raises:
        PolicyError, RecipeError: it is wrong.

    Example:
        A use:

        >>> thing(1)
        2

    Example::

        def f():
            return 1

        f()

    The end.
    """
    expected = """Return a thing.

**Parameters**

- `first`: what comes
  first.
- `**options`:
  - `one` (True): an option
    of two lines.
  - `two`: another.

**Returns**

The thing.

**Raises**

- `PolicyError`, `RecipeError`: it is wrong.

**Example**

A use:

```pycon
>>> thing(1)
2
```

**Example**

```python
def f():
    return 1

f()
```

The end.
"""
    assert tool("docstrings").docstring_markdown(inspect.cleandoc(text)) == expected


def test_every_command_has_its_options_on_the_page() -> None:
    text = tool("command_pages").commands_markdown()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    options = {
        each.split("`")[1].removeprefix("polyamp "): re.findall(r"^`+\{option\} (.*)$", each, re.MULTILINE)
        for each in sections
    }
    assert set(options) == {
        "bench",
        "demo",
        "diagnose",
        "doctor",
        "explain",
        "float8-plan",
        "lint",
        "monitor",
        "parity",
        "port",
        "rules",
    }
    assert options["bench"] == ["--quick", "--only A,B", "--here", "--out OUT"]
    assert options["parity"][0] == "FILE"
    assert "Training steps. Default: `200`." in text
    assert "```{program} polyamp port\n" in text


def test_every_rule_has_its_tests_on_the_page() -> None:
    pages = rule_pages()
    counts = [
        int(count)
        for text in pages.values()
        for count in re.findall(r"^Tests in the suite .*: (\d+);", text, re.MULTILINE)
    ]
    assert len(pages) == len(counts) == 36
    assert min(counts) >= 1
    assert pages["reference/rules/s7"].startswith("# S7 Unscaled gradients\n\nGradients are those of the *unscaled*")
    assert "- only floating leaves are cast (`test_policy.py`)" in pages["reference/rules/s2"]
    assert "polyamp/rules/update_decision.py" in pages["reference/rules/s12"].partition("## Code")[2]


def test_the_pages_of_the_rules_have_the_whole_of_the_semantics() -> None:
    semantics = (ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")
    pages = [text.partition("\n## Tests\n")[0] for text in rule_pages().values()]
    words = [line for page in pages for line in page.splitlines()[1:] if line]
    assert [line.replace("../../", "") for line in words] == [
        line for line in semantics.partition("\n## ")[2].splitlines()[1:] if line and not line.startswith("##")
    ]
    listed = tool("rule_pages").list_markdown(tool("rule_pages").rule_texts(semantics))
    assert "- [S12 Skipped steps](reference/rules/s12.md): A step whose flag is False leaves *everything* " in listed


def rule_pages() -> dict[str, str]:
    rules = tool("rule_pages")
    return rules.rule_markdown(rules.rule_texts((ROOT / "docs" / "semantics.md").read_text(encoding="utf-8")))


def test_every_page_stands_in_a_table_of_contents() -> None:
    """Of `docs/index.md`, by which the sidebar is made, under one of four headings."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n:hidden:\n(?::caption: ([^\n]*)\n)?\n(.*?)```", index, re.DOTALL)
    kinds = {caption.partition(" · ")[0] for caption, _ in trees if caption}
    assert kinds == {"Tutorials", "How-to", "Reference", "Explanation"}
    listed = [re.sub(r".*<(.*)>", r"\1", line) for _, lines in trees for line in lines.split("\n") if line]
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert pages - {"README", "index"} <= set(listed)


def test_the_start_page_is_short() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|\]\(.*?\)|[:|#*-]{2,}.*", " ", index, flags=re.DOTALL)
    assert len(prose.split()) <= 300


def test_links_that_leave_the_documents_lead_to_pages(tmp_path: Path) -> None:
    source = tool("source_pages")
    tree = source.SourceTree(tmp_path / "source")
    tree.write()
    page = (tmp_path / "source" / "guides" / "parameter_groups.md").read_text(encoding="utf-8")
    assert "](../project/examples/nanogpt.py.md)" in page
    example = (tmp_path / "source" / "project" / "examples" / "nanogpt.py.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "nanogpt.py").read_text(encoding="utf-8") in example
    assert "](../../guides/from_jax_to_torch.md)" in (
        tmp_path / "source" / "project" / "examples" / "README.md"
    ).read_text(encoding="utf-8")
    assert not (tmp_path / "source" / "README.md").exists()


def test_the_tools_need_no_framework() -> None:
    imported = set()
    for file in TOOLS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
    own = {file.stem for file in TOOLS.glob("*.py")}
    assert imported - set(sys.stdlib_module_names) - own == {"sphinx", "docutils", "polyamp", "typer"}
