"""Commands `demo`, `parity` and `bench`; each other command has a file of its own.

Exit status: 0 success; 1 a framework failed or a distance is outside the tolerance; 2 a wrong argument or recipe, or
a command whose extra is not installed. Each command imports its dependencies when it runs. With `--json`, standard
output is one JSON object and nothing else.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

import polyamp
from polyamp.cli import diagnose, doctor, explain, float8_plan, lint, monitor, port, rules, tables
from polyamp.cli.console import exit_with_error, make_console
from polyamp.demo import digits
from polyamp.demo.comparison_report import DemoReport
from polyamp.errors import PolyampError
from polyamp.files import write_atomically
from polyamp.recipe.recipe import Recipe

app = typer.Typer(
    help="One Policy / LossScaler API for mixed-precision training in PyTorch, TensorFlow and JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEMO_PACKAGES: Final = {"matplotlib": "matplotlib", "sklearn": "scikit-learn"}
"""Import name -> distribution of the packages that training commands need: the extra `demo`."""

app.command()(port.port)
app.command()(doctor.doctor)
app.command()(monitor.monitor)
app.command()(diagnose.diagnose)
app.command()(explain.explain)
app.command()(float8_plan.float8_plan)
app.command()(lint.lint)
app.command()(rules.rules)

Backends = Annotated[str | None, typer.Option("--backends", metavar="A,B", help="Frameworks to run (default: all).")]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policies",
        metavar="A,B",
        help="Policies, in any spelling; float32 is always among them. Repeat the option for one that holds commas. "
        f"(default: {','.join(digits.POLICIES)}).",
    ),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
Interpreters = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        "--interpreter",
        metavar="NAME=PATH",
        help="Python of the environment that a framework, or a side, is in. Repeatable.",
    ),
]
Out = Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the picture, the report and the table.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds that one framework may take.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and progress on standard error.")]


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """One Policy / LossScaler API for mixed-precision training in PyTorch, TensorFlow and JAX."""
    if show:
        typer.echo(f"polyamp {polyamp.__version__}")
        raise typer.Exit


@app.command()
def demo(
    backends: Backends = None,
    steps: Steps = digits.STEPS,
    python: Interpreters = None,
    out: Out = Path("out"),
    timeout: Timeout = digits.TIMEOUT,
    json: Json = False,
) -> None:
    """Train one recipe on handwritten digits in every framework and policy, and compare the curves."""
    _run_digits("demo", None, backends, None, steps, python, out, timeout, json)


@app.command()
def parity(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, help="What to compare (.py), or a recipe (.toml, .json)."
        ),
    ],
    backends: Annotated[
        str | None, typer.Option("--backends", metavar="A,B", help="Sides of FILE.py, or frameworks (default: all).")
    ] = None,
    policies: Policies = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, help=f"Training steps (default: what FILE.py says; {digits.STEPS} of a recipe)."
        ),
    ] = None,
    python: Interpreters = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", file_okay=False, help="Folder for the report (default: none; of a recipe: out)."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=1.0, help="Seconds that one side, or framework, may take.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare two trainings of your own model and report where they first diverge.

    FILE.py defines build = {"torch": make_torch, "jax": make_jax}, functions that make the models, and data; optionally
    loss_fn, recipe, steps, names, inputs, ..., as polyamp.parity.run takes them. Each side runs in a separate process,
    in another environment with --interpreter LABEL=PATH.

    If a recipe is given instead, it trains polyamp's own model of handwritten digits, as in the demo.

    Exit status: 0 they agree; 1 they do not, or a side failed; 2 a wrong argument or file.
    """
    if file.suffix != ".py":
        where, limit = out or Path("out"), timeout or digits.TIMEOUT
        _run_digits("parity", file, backends, policies, steps or digits.STEPS, python, where, limit, json)
        return
    if policies:
        exit_with_error(f"--policies is for recipes: {file.name} says with recipe= what to train with.")
    from polyamp.cli.parity import CompareOptions, compare_file

    sides = _split_names(backends) if backends is not None else None
    given = CompareOptions(sides, steps, timeout, out, dict(_parse_interpreter(item) for item in python or ()))
    try:
        status = compare_file(file, given, make_console(stderr=json), json=json)
    except PolyampError as error:
        exit_with_error(error)
    raise typer.Exit(status)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Under two minutes: shows that all works.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", metavar="A,B", help="Parts whose name starts so, such as torch (all).")
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Measure in this environment; install none for the other libraries.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the tables and the raw figures.")] = (
        Path("out/bench")
    ),
) -> None:
    """Measure polyamp against its targets, handwritten steps and other libraries; needs a checkout of the repository.

    Makes an environment for each framework in the checkout first. Every ratio is of two steps that alternate in one
    process.
    """
    script = Path(polyamp.__file__).parents[1] / "benchmarks" / "bench.py"
    if not script.is_file():
        exit_with_error(
            "polyamp bench runs the scripts of the folder benchmarks/, which only a checkout of the repository has. "
            f"Received: polyamp installed in {script.parents[1]}. Clone the repository and run: make bench"
        )
    command = [sys.executable, str(script), "--out", str(out)]
    command += ["--quick"] * quick + ["--here"] * here + (["--only", *_split_names(only)] if only else [])
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _run_digits(
    command: str,
    recipe: Path | None,
    backends: str | None,
    policies: list[str] | None,
    steps: int,
    python: list[str] | None,
    out: Path,
    timeout: float,
    json: bool,
) -> None:
    if missing := [distribution for name, distribution in _DEMO_PACKAGES.items() if find_spec(name) is None]:
        exit_with_error(f'polyamp {command} needs {", ".join(missing)}. Run: pip install "polyamp[demo]"')
    from polyamp.cli.progress import show_progress
    from polyamp.demo import runner

    console = make_console(stderr=json)
    interpreters = dict(_parse_interpreter(item) for item in python or ())
    try:
        loaded = Recipe.load(recipe) if recipe is not None else runner.demo_recipe()
        _check_writable(out)
        with show_progress(console) as on_event:
            report = runner.run(
                loaded,
                backends=_split_names(backends) if backends is not None else None,
                policies=[word for item in policies for word in _split_names(item)] if policies else digits.POLICIES,
                steps=steps,
                interpreters=interpreters,
                timeout=timeout,
                on_event=on_event,
            )
    except PolyampError as error:
        exit_with_error(error)
    tables.print_report(console, report)
    for path in _write_results(report, out):
        console.print(f"wrote {path}", soft_wrap=True)
    if json:
        typer.echo(report.to_json())
    raise typer.Exit(0 if report.ok else 1)


def _check_writable(out: Path) -> None:
    """Check before a long training that its results can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "report.json", b"", replace=False)
    except OSError as error:
        exit_with_error(f"--out must be a folder that can be written to. Received: {out}: {error.strerror}.")


def _write_results(report: DemoReport, out: Path) -> list[Path]:
    """Write the report as JSON and, if anything ran, the picture and the table."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "report.json"]
    paths[0].write_text(report.to_json() + "\n", encoding="utf-8")
    if report.runs:
        from polyamp.cli.demo_charts import draw

        paths += [out / "digits.png", out / "table.md"]
        draw(report, paths[1])
        paths[2].write_text(tables.markdown(report), encoding="utf-8")
    return paths


def _split_names(item: str) -> list[str]:
    """Split a comma-separated list; a policy in jmp's spelling contains commas itself, and `=`."""
    return [item] if "=" in item else [word.strip() for word in item.split(",") if word.strip()]


def _parse_interpreter(item: str) -> tuple[str, str]:
    name, equals, path = item.partition("=")
    found = shutil.which(str(Path(path).expanduser())) if equals else None
    if not name or found is None:
        raise typer.BadParameter(
            f"must be NAME=PATH with the path of a Python interpreter, such as torch=~/torch-env/bin/python. "
            f"Received: {item!r}.",
            param_hint="--python",
        )
    return name, found
