"""The curves of `robot.py` as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

STYLES = {
    "JAX": {"color": "#0072B2", "linewidth": 5.0},
    "ported": {"color": "#E69F00", "linewidth": 2.0},
    "epsilon": {"color": "#222222", "linewidth": 1.6, "linestyle": (0, (2, 2))},
    "no masters": {"color": "#CC79A7", "linewidth": 3.0},
    "both": {"color": "#222222", "linewidth": 1.4, "linestyle": (0, (6, 2))},
}
"""Colours that the colour-blind tell apart; curves that lie on each other are thinner from one to the next."""
WINDOW = 20


def smooth(values: list[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The mean of each step and the 19 before it."""
    return np.convolve(values, np.full(WINDOW, 1 / WINDOW), mode="valid")


def draw(losses: dict[str, list[float]], titles: dict[str, str], path: Path) -> None:
    """Losses from the port on, and each run's distance from JAX's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps = len(losses["JAX"])
    half = steps - len(losses["ported"])
    whole = smooth(losses["JAX"])
    left.axvline(half, color="#888888", linewidth=1, linestyle=":")
    left.text(half - 0.02 * steps, 0.93, "port", transform=left.get_xaxis_transform(), ha="right", fontsize=12)
    for name, values in losses.items():
        mean = whole if name == "JAX" else smooth(values)
        left.plot(np.arange(steps - len(mean), steps), mean, label=titles[name], **STYLES[name])
        if name != "JAX":
            apart = 100 * (mean / whole[-len(mean) :] - 1)
            right.plot(np.arange(steps - len(mean), steps), apart, **STYLES[name])
    left.set(yscale="log", xlabel="step", ylabel="training loss", title=f"loss, mean of {WINDOW} steps")
    right.axhline(0, color=STYLES["JAX"]["color"], linewidth=5, zorder=0)
    right.set(xlabel="step", ylabel="loss above JAX's, %", title="distance from the run in JAX")
    for axes in (left, right):
        axes.title.set_fontsize(14)
        axes.xaxis.label.set_fontsize(13)
        axes.yaxis.label.set_fontsize(13)
        axes.tick_params(labelsize=12)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=12)
    figure.savefig(path, dpi=110)
