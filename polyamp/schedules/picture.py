"""`plot`: the learning rate over the updates, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from polyamp.errors import ArgumentError, describe_value
from polyamp.schedules.combinations import ScaledSchedule
from polyamp.schedules.decays import Constant
from polyamp.schedules.schedule_base import ScheduleBase, check_steps

if TYPE_CHECKING:
    from pathlib import Path

_COLOURS: Final = ("#0b5cad", "#d9730d", "#12806f", "#7c3aed", "#b3261e", "#5c6670")
_POINTS: Final = 2000
"""Largest number of points of a line; of longer trainings every n-th update is drawn."""


def rate_lines(rates: Any) -> dict[str, ScheduleBase]:
    """Return label -> schedule of what `plot` takes.

    >>> rate_lines(Constant(0.1))
    {'learning rate': schedules.constant(value=0.1)}
    """
    if isinstance(rates, Mapping):
        return {str(label): _schedule(each) for label, each in rates.items()}
    spec = getattr(rates, "optimizer", rates)  # a recipe's
    rate = getattr(spec, "learning_rate", spec)
    found = {"learning rate": _schedule(rate)}
    for group in getattr(spec, "groups", ()):
        selection = ", ".join([*_listed(group.paths), *_listed(group.kind or ())])
        if group.trainable_after:
            selection += f", trained after {group.trainable_after} updates"
        if group.learning_rate is not None:
            found[selection] = _schedule(group.learning_rate)
        elif group.learning_rate_scale is not None:
            found[selection] = ScaledSchedule(_schedule(rate), group.learning_rate_scale)
    return found


def plot(rates: Any, steps: int, path: str | Path | None = None) -> Any:
    """Draw learning rates over the applied updates.

    Args:
        rates: a recipe, an optimizer spec (with a line for each parameter group that has its own rate), a schedule, or
            a dict of schedules by label.
        steps: number of updates.
        path: file to write, whose ending is the format (`.png`, `.svg`, `.pdf`); None writes none.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ArgumentError: no learning rate was given; or matplotlib is not installed.

    Example:
        >>> from polyamp import schedules
        >>> figure = plot({"cosine": schedules.cosine(1e-3, 100)}, 100)
        >>> figure.axes[0].get_xlabel()
        'applied updates'
    """
    lines = rate_lines(rates)
    check_steps("steps", steps, "rates")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError('plot needs matplotlib. Run: pip install "polyamp[parity]".') from error
    figure = Figure(figsize=(7.0, 3.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    counts = range(0, steps + 1, max(1, steps // _POINTS))
    for number, (label, schedule) in enumerate(lines.items()):
        axes.plot(counts, [schedule(count) for count in counts], color=_COLOURS[number % len(_COLOURS)], label=label)
    axes.set_xlabel("applied updates")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(0, steps)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e6ea", linewidth=0.6)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _schedule(rate: Any) -> ScheduleBase:
    if isinstance(rate, ScheduleBase):
        return rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ArgumentError(
            "rates must be a recipe, an optimizer spec, a schedule, or a dict of schedules by label. Received: "
            f"{describe_value(rate)}."
        )
    return Constant(float(rate))
