"""Draw `schedules.png`, the chart of all schedules in the guide: python docs/images/draw_schedules.py."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from polyamp import schedules as s

CHARTS = {
    "linear, linear_warmup": {"linear": s.linear(1.0, 10, 100), "linear_warmup": s.linear_warmup(0.5, 40)},
    "cosine, warmup_cosine": {"cosine": s.cosine(1.0, 100), "warmup_cosine": s.warmup_cosine(1.0, 10, 100, end=0.1)},
    "wsd": {
        "1-sqrt": s.wsd(1.0, 10, 100, 40),
        "linear": s.wsd(1.0, 10, 100, 40, shape="linear"),
        "cosine": s.wsd(1.0, 10, 100, 40, shape="cosine"),
    },
    "one_cycle": {"cosine": s.one_cycle(1.0, 30, 100), "linear": s.one_cycle(1.0, 30, 100, shape="linear")},
    "inverse_sqrt": {"": s.inverse_sqrt(1.0, 10)},
    "polynomial": {f"power={power:g}": s.polynomial(1.0, 100, power) for power in (0.5, 1.0, 2.0)},
    "exponential, step, piecewise": {
        "exponential": s.exponential(1.0, 0.5, 20),
        "step": s.step(1.0, 20, 0.5),
        "piecewise": s.piecewise((0.2, 0.6, 0.1), (30, 80)),
    },
    "restarts": {"factor=1": s.restarts(1.0, 34), "factor=2": s.restarts(1.0, 15, 2, peak_factor=0.7)},
    "join": {"": s.join([s.linear_warmup(1.0, 20), s.constant(1.0), s.cosine(0.5, 40)], [20, 60])},
}
LEGENDS = {"wsd": "lower center", "one_cycle": "lower center"}
LINES = (("#0b5cad", "-"), ("#d9730d", (0, (5, 2))), ("#12806f", ":"))

if __name__ == "__main__":
    figure = Figure(figsize=(9.0, 6.3), layout="constrained", facecolor="white")
    grid = figure.subplots(3, 3, sharex=True, sharey=True)
    for axes, (title, lines) in zip(grid.flat, CHARTS.items(), strict=True):
        for (colour, dashes), (label, schedule) in zip(LINES, lines.items(), strict=False):
            rates = [schedule(count) for count in range(101)]
            axes.plot(rates, color=colour, linestyle=dashes, linewidth=1.8, label=label, drawstyle="steps-post")
        axes.set_title(title, fontsize=10, loc="left", family="monospace")
        axes.set(xlim=(0, 100), ylim=(0.0, 1.06))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e3e6ea", linewidth=0.6)
        if len(lines) > 1:
            axes.legend(frameon=True, edgecolor="none", fontsize=8, loc=LEGENDS.get(title, "upper right"))
    for axes in grid[-1]:
        axes.set_xlabel("applied updates")
    for axes in grid[:, 0]:
        axes.set_ylabel("rate over peak")
    figure.savefig(Path(__file__).with_name("schedules.png"), dpi=110)
