"""Draw the pictures of `docs/explanation/mixed_precision.md`: python docs/images/draw_formats.py.

`formats.png` has range and precision of three formats, `underflow.png` the gradients of a network before and after
they are multiplied by a loss scale, `loss_scale.png` the loss scale of a run that starts too high.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import polyamp
from polyamp.reference import MLP

Floats = npt.NDArray[np.float32]

HERE = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY, RED = "#0b5cad", "#d9730d", "#12806f", "#59636e", "#b3261e"
BITS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Format -> bits of the exponent, and of the fraction."""
COLOURS = {"float32": GREY, "bfloat16": GREEN, "float16": ORANGE}
SIZES = [64, 256, 256, 256, 256, 10]
SCALE = 2.0**15


def draw_formats() -> None:
    """Bits of each format, and the relative distance between neighbours over the magnitude."""
    figure = Figure(figsize=(9.0, 5.4), layout="constrained", facecolor="white")
    bits, gaps = figure.subplots(2, 1, height_ratios=[1, 2.6])
    for row, (name, (exponent, fraction)) in enumerate(BITS.items()):
        left = 0
        for count, colour, word in ((1, GREY, ""), (exponent, BLUE, "exponent"), (fraction, COLOURS[name], "fraction")):
            bits.barh(-row, count, left=left, color=colour, edgecolor="white", linewidth=1.5, height=0.75)
            if word:
                bits.text(
                    left + count / 2, -row, f"{count} {word}", ha="center", va="center", color="white", fontsize=9
                )
            left += count
        info = ml_dtypes.finfo(name)
        text = f"largest {float(info.max):.1e}, smallest normal {float(info.tiny):.1e}"
        bits.text(left + 0.4, -row, text, va="center", fontsize=9)
    bits.set(xlim=(0, 48), yticks=[0, -1, -2], yticklabels=list(BITS), xticks=[])
    bits.spines[:].set_visible(False)
    bits.tick_params(length=0)
    for name, (_, fraction) in BITS.items():
        info = ml_dtypes.finfo(name)
        smallest, largest = float(info.smallest_subnormal), float(info.max)
        exponents = np.arange(np.log2(smallest), np.floor(np.log2(largest)) + 1)
        gap = np.maximum(np.exp2(-float(fraction)), smallest / np.exp2(exponents))
        gaps.loglog(np.exp2(exponents), gap, color=COLOURS[name], linewidth=2.4)
        gaps.vlines([smallest, largest], 1e-9, [1.0, gap[-1]], color=COLOURS[name], linewidth=0.8, linestyle="--")
        gaps.text(largest / 3, gap[-1] * 1.3, name, color=COLOURS[name], ha="right", va="bottom", fontsize=10)
    gaps.set(xlim=(1e-46, 1e40), ylim=(3e-8, 2.0), xlabel="magnitude of a number")
    gaps.set_ylabel("distance to the next number,\nrelative, at powers of two")
    gaps.axvspan(1e-10, 1e-4, color=RED, alpha=0.10, linewidth=0)
    gaps.text(3e-11, 0.9, "many gradients", ha="right", va="top", color=RED, fontsize=9)
    gaps.grid(color="#e3e6ea", linewidth=0.6)
    gaps.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "formats.png", dpi=110)


def gradients() -> tuple[Floats, Floats]:
    """Return the gradients of a trained network's activations, in float32, without and with a loss scale."""
    images, labels = load_digits(return_X_y=True)
    x, y = (images[:256] / 16.0).astype(np.float32), labels[:256].astype(np.int32)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-3))
    state = polyamp.init(MLP.random(SIZES, seed=0), recipe)
    step = polyamp.train_step(
        lambda model, batch: polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"]), recipe
    )
    for _ in range(60):
        state, _ = step(state, {"x": x, "y": y})
    arrays = state.model.parameters
    weights, biases = ([arrays[f"dense{n}/{kind}"] for n in range(len(SIZES) - 1)] for kind in ("kernel", "bias"))
    hidden = [x]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        hidden.append(np.maximum(hidden[-1] @ weight + bias, 0.0))
    logits = hidden[-1] @ weights[-1] + biases[-1]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    passed = powers / powers.sum(axis=1, keepdims=True)
    passed[np.arange(len(y)), y] -= 1.0
    passed /= len(y)
    found = [passed]
    for weight, output in zip(weights[:0:-1], hidden[:0:-1], strict=True):
        passed = (passed @ weight.T) * (output > 0.0)
        found.append(passed)
    flat = np.concatenate([each.ravel() for each in found]).astype(np.float32)
    return flat[flat != 0.0], flat[flat != 0.0] * np.float32(SCALE)


def shares(values: Floats) -> tuple[float, float]:
    """Return the percentages of values that float16 makes 0, and of those that it keeps with fewer digits."""
    lost = 100.0 * float(np.mean(values.astype(np.float16) == 0.0))
    return lost, 100.0 * float(np.mean(np.abs(values) < float(np.finfo(np.float16).tiny))) - lost


def draw_underflow() -> None:
    """Histograms of the gradients' magnitudes, with what float16 makes of each magnitude."""
    info = np.finfo(np.float16)
    figure = Figure(figsize=(9.0, 5.4), layout="constrained", facecolor="white")
    titles = ("without a loss scale", "loss multiplied by 2^15")
    for axes, values, title in zip(figure.subplots(2, 1, sharex=True, sharey=True), gradients(), titles, strict=True):
        exponents = np.log2(np.abs(values))
        axes.hist(
            exponents, bins=np.arange(-50, 20), weights=np.full(len(values), 100 / len(values)), color=BLUE, zorder=3
        )
        lost, coarse = shares(values)
        smallest, normal, largest = -25.0, float(np.log2(info.tiny)), float(np.log2(float(info.max)))
        axes.axvspan(-50, smallest, color=RED, alpha=0.14, linewidth=0)
        axes.axvspan(smallest, normal, color=ORANGE, alpha=0.16, linewidth=0)
        axes.axvspan(largest, 20, color=RED, alpha=0.14, linewidth=0)
        axes.set_title(title, loc="left", fontsize=10)
        label(axes, -49.5, f"becomes 0: {lost:.0f} %", RED)
        label(axes, smallest + 0.4, f"fewer digits: {coarse:.0f} %", ORANGE)
        label(axes, normal + 0.4, "all digits of float16", GREY)
        label(axes, largest + 0.2, "inf", RED)
        axes.set(xlim=(-50, 20))
        axes.set_ylabel("% of the gradients")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.25)
    axes.set_xlabel("magnitude, as a power of two")
    figure.savefig(HERE / "underflow.png", dpi=110)


def label(axes: Axes, x: float, text: str, colour: str) -> None:
    """Write a text near the upper edge of a chart."""
    axes.text(x, 0.97, text, transform=axes.get_xaxis_transform(), va="top", fontsize=9, color=colour)


class Run(NamedTuple):
    """A run in float16: for each step the scale as a power of two and the loss, and the numbers of skipped steps."""

    scales: list[float]
    losses: list[float]
    skips: list[int]


def train_from_a_high_scale() -> Run:
    """Train on digits for 300 steps, with a loss scale that starts too high."""
    images, labels = load_digits(return_X_y=True)
    x, y = (images / 16.0).astype(np.float32), labels.astype(np.int32)
    recipe = polyamp.Recipe(
        policy="mixed_float16",
        optimizer=polyamp.adamw(2e-3),
        scaler=polyamp.LossScaler(init_scale=2.0**24, growth_interval=40),
    )
    state = polyamp.init(MLP.random([64, 128, 10], seed=0), recipe)
    step = polyamp.train_step(
        lambda model, batch: polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"]), recipe
    )
    rows = np.random.default_rng(0).integers(0, len(x), (300, 64))
    run = Run([], [], [])
    for number, chosen in enumerate(rows):
        run.scales.append(float(np.log2(float(state.scale_state.scale))))
        state, result = step(state, {"x": x[chosen], "y": y[chosen]})
        run.losses.append(float(result.loss))
        if bool(result.skipped):
            run.skips.append(number)
    return run


def draw_loss_scale() -> None:
    """The loss scale and the losses of a run in float16 whose scale starts too high."""
    scales, losses, skips = train_from_a_high_scale()
    figure = Figure(figsize=(9.0, 4.6), layout="constrained", facecolor="white")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(scales, color=BLUE, linewidth=1.8, drawstyle="steps-post", label="loss scale")
    upper.plot(skips, [scales[at] for at in skips], "x", color=RED, markersize=7, label="overflow: step skipped")
    upper.set_ylabel("loss scale,\npower of two")
    upper.legend(frameon=True, edgecolor="none", fontsize=9)
    lower.plot(losses, color=GREEN, linewidth=1.2)
    lower.plot(skips, [losses[at] for at in skips], "x", color=RED, markersize=7)
    lower.set(ylabel="loss", xlabel="step", xlim=(0, len(losses)), ylim=(0, None))
    for axes in (upper, lower):
        axes.grid(color="#e3e6ea", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "loss_scale.png", dpi=110)


if __name__ == "__main__":
    draw_formats()
    draw_underflow()
    draw_loss_scale()
