"""`AssertParity`: value of the fixture `assert_parity`.

It runs a comparison. If it does not agree, it fails with the report's ten lines and the path of the saved report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polyamp.contract import registry
from polyamp.errors import ArgumentError, PolyampError
from polyamp.parity.in_pytest import backend_selection

if TYPE_CHECKING:
    from polyamp.parity.report.report import Report


class AssertParity:
    """Callable that asserts that two trainings agree.

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
        """Compare two trainings and assert that they agree.

        Args:
            model_a, model_b, batch: two models of frameworks that share this process, as for `polyamp.compare`.
            loss_fn, recipe, steps: as for `polyamp.compare`.
            build, data: alternatively label -> a function that builds the model, and batches, as for
                `polyamp.parity.run`: each side runs in a separate process. Labels begin with a backend's name ("torch",
                "torch compiled"); sides whose backend `--polyamp-backends` does not select are left out.
            **options: further arguments of these two functions.

        Returns:
            The report, which agrees.

        Raises:
            AssertionError: the sides diverge, or a side did not finish; the message is the report's ten lines and the
                path of the saved report.
            pytest.skip.Exception: `--polyamp-skip-missing` is set and a side's framework is not installed; or the
                session selects fewer than two of the sides.
            PolyampError: any error of the comparison.
        """
        __tracebackhide__ = True
        given = {"loss_fn": loss_fn, "recipe": recipe, "steps": steps, **options}
        try:
            if build is not None:
                report = self._run_in_processes(build, data, given, models=(model_a, model_b, batch))
            else:
                report = _compare_in_process(model_a, model_b, batch, data, given)
        except PolyampError as error:
            raise error.with_traceback(None)  # noqa: B904  # polyamp's own frames would hide the test
        if report.agrees:
            return report
        missing = [failure.message for failure in report.failures if failure.reason == "missing"]
        if missing and backend_selection.is_skip_missing_set(self._request.config):
            pytest.skip("; ".join(missing))
        raise AssertionError(f"{report}\n{self._save_report(report)}")

    def _run_in_processes(
        self, build: Mapping[str, Any], data: Any, given: Mapping[str, Any], *, models: tuple[Any, ...]
    ) -> Report:
        __tracebackhide__ = True
        from polyamp.parity.execution.runner import run

        if any(each is not None for each in models):
            raise ArgumentError("assert_parity takes two models and a batch, or build= and data=. Received: both.")
        if not isinstance(build, Mapping):
            raise ArgumentError(
                f"build must be label -> function, as in build={{'torch': net, 'jax': net}}. Received: {build!r}."
            )
        chosen = backend_selection.selection(self._request.config)
        sides = {
            label: make for label, make in build.items() if not chosen or _backend_of_label(label) in (None, *chosen)
        }
        if len(sides) < 2 <= len(build):
            pytest.skip(f"--polyamp-backends={','.join(chosen)} leaves {len(sides)} of {', '.join(build)}")
        elsewhere = given.get("interpreters") or {}
        problem = backend_selection.installation_problems(
            [name for label in sides if label not in elsewhere and (name := _backend_of_label(label)) is not None]
        )
        if problem and backend_selection.is_skip_missing_set(self._request.config):
            pytest.skip(problem)
        if problem:
            pytest.fail(f"{problem}\n--polyamp-skip-missing makes this a skip.", pytrace=False)
        return run(sides, data=data, **given)

    def _save_report(self, report: Report) -> str:
        """Save a report and return a line with its path."""
        folder = self._report_folder()
        lack = ""
        try:
            page = report.save(folder)
        except ArgumentError as error:  # no drawing package, or no writable folder: the ten lines are still shown
            page = next((found for name in ("html", "json") if (found := folder / f"report.{name}").exists()), folder)
            lack = f" ({error})"
        # Same as the fixture record_property, without its warning about a junit schema.
        self._request.node.user_properties.append(("polyamp_report", str(page)))
        return f"  {'report':<11} {page}{lack}"  # aligned with the ten lines

    def _report_folder(self) -> Path:
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


def _compare_in_process(model_a: Any, model_b: Any, batch: Any, data: Any, given: Mapping[str, Any]) -> Report:
    __tracebackhide__ = True
    from polyamp.parity.compare import compare

    if model_a is None or model_b is None or batch is None or data is not None:
        raise ArgumentError(
            "assert_parity takes two models and a batch, as polyamp.compare does, or build= and data=, as "
            "polyamp.parity.run does. Received neither as a whole."
        )
    return compare(model_a, model_b, batch, **given)


def _backend_of_label(label: str) -> str | None:
    """Return the backend with whose name a label begins; None if there is none."""
    first = label.split()[0] if label.split() else ""
    return first if first in registry.names() else None
