"""`AssertParity`: what the fixture `assert_parity` gives. It runs the comparison, and where two sides part it fails
with the report's ten lines and the path of the saved report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyamp.contract import registry
from polyamp.errors import ArgumentError, PolyampError
from polyamp.parity.in_pytest import choice

if TYPE_CHECKING:
    from polyamp.parity.report import Report


class AssertParity:
    """Asserts that two trainings are the same; a function of a test.

    Args:
        request: of the test.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._count = 0

    def __repr__(self) -> str:
        return "assert_parity"  # pytest shows a failed test's arguments

    def __call__(
        self,
        model_a: Any = None,
        model_b: Any = None,
        batch: Any = None,
        loss_fn: Any = None,
        recipe: Any = None,
        steps: int = 1,
        *,
        build: Mapping[str, Callable[[], Any]] | None = None,
        data: Any = None,
        **options: Any,
    ) -> Report:
        """Compare two trainings.

        Args:
            model_a, model_b, batch: two models of frameworks that share this process, as for `polyamp.compare`.
            loss_fn, recipe, steps: as there.
            build, data: in their place, label -> a function that builds the model, and batches, as for
                `polyamp.parity.run`: each side has a process of its own. Labels begin with a backend's name ("torch",
                "torch compiled"); where `--polyamp-backends` does not choose it the side is left out.
            **options: whatever else these two take.

        Returns:
            The report, which agrees.

        Raises:
            AssertionError: they part, or a side did not come to its end; the message is the report's ten lines and the
                path of the saved report.
            pytest.skip.Exception: `--polyamp-skip-missing`, and a side's framework is not installed; or the session
                chooses fewer than two of the sides.
            PolyampError: what the comparison raises.
        """
        __tracebackhide__ = True
        given = {"loss_fn": loss_fn, "recipe": recipe, "steps": steps, **options}
        try:
            if build is not None:
                report = self._in_processes(build, data, given, beside=(model_a, model_b, batch))
            else:
                report = _here(model_a, model_b, batch, data, given)
        except PolyampError as error:
            raise error.with_traceback(None)  # noqa: B904  # the message says it; frames of polyamp's would hide the test
        if report.agrees:
            return report
        missing = [failure.message for failure in report.failures if failure.reason == "missing"]
        if missing and choice.skips_missing(self._request.config):
            pytest.skip("; ".join(missing))
        raise AssertionError(f"{report}\n{self._saved(report)}")

    def _in_processes(
        self, build: Mapping[str, Any], data: Any, given: Mapping[str, Any], *, beside: tuple[Any, ...]
    ) -> Report:
        __tracebackhide__ = True
        from polyamp.parity.runner import run

        if any(each is not None for each in beside):
            raise ArgumentError("assert_parity takes two models and a batch, or build= and data=. Received: both.")
        if not isinstance(build, Mapping):
            raise ArgumentError(
                f"build must be label -> function, as in build={{'torch': net, 'jax': net}}. Received: {build!r}."
            )
        chosen = choice.selection(self._request.config)
        sides = {label: make for label, make in build.items() if not chosen or _framework(label) in (None, *chosen)}
        if len(sides) < 2 <= len(build):
            pytest.skip(f"--polyamp-backends={','.join(chosen)} leaves {len(sides)} of {', '.join(build)}")
        elsewhere = given.get("interpreters") or {}
        problem = choice.missing(
            [name for label in sides if label not in elsewhere and (name := _framework(label)) is not None]
        )
        if problem and choice.skips_missing(self._request.config):
            pytest.skip(problem)
        if problem:
            pytest.fail(f"{problem}\n--polyamp-skip-missing makes this a skip.", pytrace=False)
        return run(sides, data=data, **given)

    def _saved(self, report: Report) -> str:
        """Save a report; a line that says where."""
        folder = self._folder()
        lack = ""
        try:
            page = report.save(folder)
        except ArgumentError as error:  # nothing to draw with, or no place: the ten lines must be seen all the same
            page = next((found for name in ("html", "json") if (found := folder / f"report.{name}").exists()), folder)
            lack = f" ({error})"
        # What the fixture record_property does, without its warning of a junit schema that no reader insists on.
        self._request.node.user_properties.append(("polyamp_report", str(page)))
        return f"  {'report':<11} {page}{lack}"  # set as the ten lines are

    def _folder(self) -> Path:
        config, node = self._request.config, self._request.node
        self._count += 1
        given = config.getoption("polyamp_report_dir")
        if given:
            base = Path(config.invocation_params.dir, given)
        elif config.getini("polyamp_report_dir"):
            base = Path(config.rootpath, config.getini("polyamp_report_dir"))
        else:
            return Path(self._request.getfixturevalue("tmp_path")) / f"parity-{self._count}"
        name = re.sub(r"[^\w.\-]+", "-", node.nodeid).strip("-")
        return base / (name if self._count == 1 else f"{name}-{self._count}")


def _here(model_a: Any, model_b: Any, batch: Any, data: Any, given: Mapping[str, Any]) -> Report:
    __tracebackhide__ = True
    from polyamp.parity.compare import compare

    if model_a is None or model_b is None or batch is None or data is not None:
        raise ArgumentError(
            "assert_parity takes two models and a batch, as polyamp.compare does, or build= and data=, as "
            "polyamp.parity.run does. Received neither as a whole."
        )
    return compare(model_a, model_b, batch, **given)


def _framework(label: str) -> str | None:
    """The backend that a label begins with; None where it begins with something else."""
    first = label.split()[0] if label.split() else ""
    return first if first in registry.names() else None
