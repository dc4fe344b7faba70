"""The house stands: the same rooms in every backend, no circle of imports, no import from a lower floor to a higher.

The floors are those of CONTRIBUTING.md ("The house"); they are read off the syntax trees, function bodies and type-only
imports included. Who may import which framework is in test_import_rules.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BACKENDS = ("polyamp_torch", "polyamp_tensorflow", "polyamp_jax")

SHARED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("backend", "compat", "arrays", "losses", "harness"), ()),
    "precision/autocast": ("autocast",),
    "precision/cast_mode": (),
    "precision/op_list": (),
    "precision/policy_module": ("PolicyModule",),
    "distributed/all_reduce": ("all_reduce_sum",),
    "distributed/processes": ("{}Processes",),
    "distributed/replicas": ("find_replicas",),
    "step/accumulation": ("accumulate_gradients",),
    "step/averages": ("averaged_model",),
    "step/error_hints": ("explain_error",),
    "step/forward_backward": (),
    "step/grad_stats": ("global_norm_and_finite",),
    "step/loss_weights": ("LossWeighting",),
    "step/monitor_slots": ("{}Slots",),
    "step/optimizer_metadata": ("optimizer_metadata", "optimizer_setting"),
    "step/optimizers": (),
    "step/output_figures": (),
    "step/refresh": ("refresh_state",),
    "step/sharded_state": ("sharded_state",),
    "step/state": ("{}State",),
    "step/step": (),
    "step/update": ("update_states",),
    "own_loop/gradients": ("unscale_gradients",),
    "own_loop/native_scaler": ("native_scaler",),
    "own_loop/skip_report": ("non_finite_names",),
    "observe/capabilities": ("{}Probe",),
    "observe/capture": (),
    "observe/dropout": ("disable_dropout",),
    "observe/known_traps": (),
    "observe/model_copy": ("model_copy",),
    "observe/observer": (),
    "observe/op_dtypes": (),
    "observe/setup_inspection": ("inspect_setup",),
    "porting/converter": ("{}Converter",),
    "porting/evaluate": ("evaluate",),
    "porting/fill": ("fill",),
    "porting/input_orders": ("input_orders",),
    "porting/inventory": ("inventory",),
    "porting/files": ("open_file", "write_file", "write_model"),
    "porting/native_training": ("{}Training",),
    "porting/optimizer_layout": (),
    "porting/training_states": ("{}StateConverter",),
}
"""What every backend has, under these names, with its exports; {} is `Torch`, `TensorFlow`, `Jax`, or `Keras`
in the package that stands in."""
STANDS_IN: dict[str, str] = {"polyamp_tensorflow": "polyamp_keras"}
"""Backend -> the package that has those of its files which Keras on every backend shares."""
EXTENDS: set[tuple[str, str]] = {("polyamp_tensorflow", "own_loop/skip_report")}
"""(backend, file) that adds to the file of `STANDS_IN`, which has the exports."""
PREFIXES = {
    "polyamp_torch": "Torch",
    "polyamp_tensorflow": "TensorFlow",
    "polyamp_jax": "Jax",
    "polyamp_keras": "Keras",
}

MISSING: dict[tuple[str, str], str] = {}
"""(backend, room) -> why it is not there yet; strict: a row leaves with the commit that brings the room."""

CORE_FLOORS = (
    (
        "_version",
        "errors",
        "float_formats",
        "framework_detection",
        "array_namespace",
        "trees",
        "display",
        "context_values",
        "process_reaper",
    ),
    ("results", "backend_lookup", "files", "records", "schedules", "argument_hints", "worker_processes"),
    ("recipe", "report_page"),
    ("rules",),
    ("monitor",),
    ("contract",),
    ("train", "losses", "doctor"),
    ("porting",),
    ("parity",),
    ("diagnosis", "linter", "nonfinite", "backend_parts"),
    ("",),  # `polyamp` itself: what a user imports, and what stands on it
    ("conformance", "demo", "reference"),
    ("cli",),
    ("__main__",),
)
KERAS_FLOORS = (
    ("compat", "arrays", "interrupts", "backend_choice"),
    ("engines",),  # a module per Keras backend, alike
    ("engine",),
    ("models",),
    ("precision",),
    ("own_loop",),
    ("porting",),
    ("observe",),
    ("harness",),
    ("",),
)
BACKEND_FLOORS = (
    ("compat", "arrays", "interrupts"),
    ("precision", "models"),
    ("distributed",),
    ("step", "losses"),
    ("own_loop",),
    ("porting",),
    ("observe",),
    ("integrations",),
    ("harness", "keras_harness"),  # the models of the conformance suite; `Backend.harness` makes it
    ("backend",),
    ("", "lightning", "accelerate"),  # the package itself, and the public names of rooms further down
)
PORTING_FLOORS = (
    ("layouts",),
    ("matching", "progress", "rollback"),
    ("files",),
    ("model_side",),
    ("port_report",),
    ("rename_hints",),
    ("port_errors",),
    ("transfer_plan",),
    ("check", "flatten_trace"),
    ("model_run",),
    ("alike_layers",),
    ("states",),
    ("port",),
    ("convert",),
    ("",),  # `polyamp.porting` itself: what a user imports
)
"""The rooms of `polyamp/porting`, and the files beside them."""
UPWARD: dict[tuple[str, str], str] = {}
"""(importer, imported) -> why an import upward is left for now; strict."""

Graph = Mapping[str, set[str]]


def modules(package: Path) -> dict[str, str]:
    """Module name -> source, of everything in the folder of a package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def named(source: str) -> Iterator[tuple[str, str]]:
    """(module, name in it or "") of every absolute import, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if called in ("__import__", "import_module"):
                yield str(node.args[0].value), ""


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules among `sources` that it imports. `from a import b` is an import of `a.b` where that is a
    module, and then not of `a`: a room's `__init__` holds nothing."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = {f"{name}.{inner}" if f"{name}.{inner}" in sources else name for name, inner in named(source)}
        edges[module] = {target for target in targets if target in sources} - {module}
    return edges


def circles(edges: Graph) -> list[list[str]]:
    """Groups of two and more modules that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return sorted(found)


def room(module: str) -> str:
    """The first name below the package; "" for the package itself. A folder `..._only` is no room: its files stand in
    the room around it."""
    first, _, inner = module.partition(".")[2].partition(".")
    return inner.partition(".")[0] if first.endswith("_only") and inner else first


def between_rooms(edges: Graph) -> dict[str, set[str]]:
    """The same graph with a room in the place of its files."""
    rooms: dict[str, set[str]] = {}
    for module, targets in edges.items():
        rooms.setdefault(room(module), set()).update(room(target) for target in targets if room(target) != room(module))
    return rooms


def inside(edges: Graph, name: str) -> dict[str, set[str]]:
    """The part of a package's graph that lies in one room, with the room in the place of the package."""
    return {
        module.partition(".")[2]: {target.partition(".")[2] for target in targets if room(target) == name}
        for module, targets in edges.items()
        if room(module) == name
    }


def upward(edges: Graph, floors: Iterable[Iterable[str]]) -> list[tuple[str, str]]:
    """Imports of a module from a floor above; a room without a floor is an error of its own."""
    floor = {name: number for number, names in enumerate(floors) for name in names}
    homeless = {module for module in edges if room(module) not in floor}
    assert homeless == set(), "give the new room a floor"
    return sorted(
        (module, target)
        for module, targets in edges.items()
        for target in targets
        if floor[room(target)] > floor[room(module)]
    )


PACKAGES = {"polyamp": (ROOT / "polyamp", CORE_FLOORS)} | {
    name: (ROOT / "backends" / name, BACKEND_FLOORS) for name in BACKENDS
}
PACKAGES["polyamp_keras"] = (ROOT / "backends" / "polyamp_keras", KERAS_FLOORS)


def shared_file(backend: str, name: str) -> Path:
    """The file of a backend with the exports, or that of the package which has it for several of Keras's backends."""
    path = ROOT / "backends" / backend / f"{name}.py"
    own = path.exists() and (backend, name) not in EXTENDS
    return path if own else ROOT / "backends" / STANDS_IN.get(backend, backend) / f"{name}.py"


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_concept_that_the_backends_share_has_the_same_place(
    backend: str, name: str, request: pytest.FixtureRequest
) -> None:
    if (backend, name) in MISSING:
        request.applymarker(pytest.mark.xfail(strict=True, reason=MISSING[backend, name]))
    file = shared_file(backend, name)
    prefix = PREFIXES[file.relative_to(ROOT / "backends").parts[0]]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    exported = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert {each.format(prefix) for each in SHARED[name]} <= exported


@pytest.mark.parametrize(
    ("room", "least"),
    [("distributed", 1.0), ("step", 0.85), ("precision", 1.0), ("own_loop", 1.0), ("observe", 1.0), ("porting", 1.0)],
)
def test_the_files_of_a_room_are_the_same_in_all_backends(room: str, least: float) -> None:
    """What one framework alone needs stands in a folder of its own."""
    names = [{path.name for path in (ROOT / "backends" / each / room).glob("*.py")} for each in BACKENDS]
    for found, backend in zip(names, BACKENDS, strict=True):
        shared = (name for name in SHARED if name.startswith(f"{room}/") and shared_file(backend, name).exists())
        found.update(f"{name.rpartition('/')[2]}.py" for name in shared)
    assert len(set.intersection(*names)) >= least * len(set.union(*names))


def test_what_is_missing_or_upward_is_named_rightly() -> None:
    assert set(MISSING) <= {(backend, name) for backend in BACKENDS for name in SHARED}
    assert {importer.partition(".")[0] for importer, _ in UPWARD} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle(package: str) -> None:
    edges = graph(modules(PACKAGES[package][0]))
    assert circles(edges) == []
    assert circles(between_rooms(edges)) == []
    for name in sorted({room(module) for module in edges} - {""}):
        assert circles(between_rooms(inside(edges, name))) == [], name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_up(package: str) -> None:
    folder, floors = PACKAGES[package]
    expected = sorted(pair for pair in UPWARD if pair[0].partition(".")[0] == package)
    assert upward(graph(modules(folder)), floors) == expected


def test_no_import_goes_up_in_porting() -> None:
    edges = inside(graph(modules(ROOT / "polyamp")), "porting")
    assert {"porting", "porting.layouts.lazy_array", "porting.port"} <= set(edges)
    assert upward(edges, PORTING_FLOORS) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_rooms_init_is_a_docstring_only(package: str) -> None:
    """Else `from room import part` would pull in what the graph here does not see."""
    public = {
        package,
        "polyamp.reference",
        "polyamp.conformance",
        "polyamp.cli",
        "polyamp.porting",
        "polyamp.parity",
        "polyamp.losses",
        "polyamp.schedules",
    }
    folder = PACKAGES[package][0]
    for path in folder.rglob("__init__.py"):
        name = ".".join(path.parent.relative_to(folder.parent).parts)
        if name not in public:
            assert len(ast.parse(path.read_text(encoding="utf-8")).body) == 1, name


def test_what_is_forbidden_is_seen() -> None:
    sources = {
        "p": "from p.step import a",
        "p.arrays": "def f():\n    from p.step.a import x",
        "p.step": "'The room.'",
        "p.step.a": "if TYPE_CHECKING:\n    from p.step import b\nimport numpy",
        "p.step.b": "import p.step.a\nfrom p import arrays",
    }
    edges = graph(sources)
    assert edges["p"] == {"p.step.a"}
    assert edges["p.step.a"] == {"p.step.b"}
    assert circles(edges) == [["p.arrays", "p.step.a", "p.step.b"]]
    assert circles(between_rooms(edges)) == [["arrays", "step"]]
    below = graph(
        {"p.room.a.x": "import p.room.b.x", "p.room.b.x": "import p.room.a.y, p.other", "p.room.a.y": "", "p.other": ""}
    )
    assert circles(below) == []
    assert inside(below, "room") == {"room.a.x": {"room.b.x"}, "room.b.x": {"room.a.y"}, "room.a.y": set()}
    assert circles(between_rooms(inside(below, "room"))) == [["a", "b"]]
    assert upward(edges, [["arrays"], ["step"], [""]]) == [("p.arrays", "p.step.a")]
    with pytest.raises(AssertionError, match="give the new room a floor"):
        upward(edges, [["arrays"], [""]])
