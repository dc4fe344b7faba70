"""polyamp's torch step against the same step written by hand with `torch.autocast`, `GradScaler` and clipping.

The rows, each against what a careful user writes:

    tensors        200 weights of 32x32, float16, clip 1.0, SGD: what follows the backward pass, and the whole step;
                   the handwritten loop uses the fused SGD too
    block          a transformer block of width 512, bfloat16 autocast, AdamW: torch's op list, and polyamp's
    growth         what follows the backward pass, from 200 to 10,000 weights of 8x8: microseconds a tensor
    bfloat16       polyamp's block in bfloat16 over the same in float32
    GradScaler     polyamp_torch.GradScaler in the place of torch's, in the handwritten loop
    compiled       the block with compile=True over the eager step (with --compile: it takes a minute to compile)

Run by hand and by `make bench`; it judges nothing and always exits with 0. About five minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import paired
import torch
import torch_measure
from paired import Found, Row, Settings, Step
from torch import nn

import polyamp

SCALE = 2.0**10
WIDTH, HEADS, TOKENS, BATCH = 512, 8, 128, 8


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Chain(nn.Module):
    """`count` square weights in a row, each a rotation, so that 200 of them neither blow up nor vanish."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.init.orthogonal_(torch.empty(size, size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


class Side(nn.Module):
    """`count` weights side by side under one operation, whose cost is not the question."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size, size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.view(-1) for weight in self.weights]) * x


class Block(nn.Module):
    """A pre-norm transformer encoder layer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def loss_fn(model: Any, batch: Any) -> Any:
    """The mean square of the model's output."""
    return model(batch[0]).float().square().mean()


def by_hand_with_scaler(model: nn.Module, x: torch.Tensor, scaler: Any) -> Step:
    """The handwritten float16 loop with clipping."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = loss_fn(model, (x,))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def by_hand(model: nn.Module, x: torch.Tensor) -> Step:
    """The handwritten bfloat16 loop."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = loss_fn(model, (x,))
        loss.backward()
        optimizer.step()

    return step


def library(model: nn.Module, x: torch.Tensor, *, how: Any = False, **recipe: Any) -> Step:
    """The same with polyamp."""
    made = polyamp.Recipe(**recipe)
    state = polyamp.init(model, made)
    step = polyamp.train_step(loss_fn, made, compile=how)
    return lambda: step(state, (x,))


def scaled(model: nn.Module, x: torch.Tensor) -> Step:
    """polyamp's float16 step with clipping."""
    return library(
        model,
        x,
        policy="mixed_float16",
        optimizer=polyamp.sgd(1e-6),
        clip_norm=1.0,
        scaler=polyamp.LossScaler(init_scale=SCALE),
    )


def native_scaler() -> torch.amp.GradScaler:
    """torch's own."""
    return torch.amp.GradScaler(device().type, init_scale=SCALE)


def tensor_rows() -> Iterator[Row]:
    """200 weights of 32x32."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device())
    for name, target, after in (("tensors: after backward", 0.80, True), ("tensors: whole step", 1.0, False)):
        hand = by_hand_with_scaler(Chain(200, 32).to(device()), x, native_scaler())
        own = scaled(Chain(200, 32).to(device()), x)
        yield Row(name, target, ("by hand", hand), ("polyamp", own), after)


def block_rows(*, compiled: bool) -> Iterator[Row]:
    """The transformer block."""
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device())

    def own(policy: Any, how: Any = False) -> Step:
        return library(Block().to(device()), x, how=how, policy=policy, optimizer=polyamp.adamw(1e-6))

    whole = "mixed_bfloat16"
    native = polyamp.Policy(whole, op_list="native")
    limit = 1.05 if device().type == "cpu" else 1.02
    for name, policy, target in (("block, native list", native, 1.02), ("block, polyamp's list", whole, limit)):
        yield Row(name, target, ("by hand", by_hand(Block().to(device()), x)), ("polyamp", own(policy)))
    yield Row("bfloat16", None, ("float32", own("float32")), ("bfloat16", own(whole)), share=0.5)
    if compiled:
        yield Row("compiled", None, ("eager", own(whole)), ("compiled", own(whole, True)), share=0.5)


def growth_rows() -> Iterator[tuple[int, Row]]:
    """More and more tensors."""
    for count, share in ((200, 1.0), (1000, 0.5), (10_000, 0.2)):
        x = torch.ones((), device=device())
        hand = by_hand_with_scaler(Side(count, 8).to(device()), x, native_scaler())
        own = scaled(Side(count, 8).to(device()), x)
        yield count, Row(f"growth: {count} tensors", None, ("by hand", hand), ("polyamp", own), True, share)


def scaler_rows() -> Iterator[Row]:
    """The drop-in scaler, if this polyamp has it."""
    try:
        from polyamp_torch import GradScaler
    except ImportError as error:
        print(f"GradScaler is left out: {error}", flush=True)
        return
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device())
    for name, after in (("GradScaler: after backward", True), ("GradScaler: whole step", False)):
        scaler = GradScaler(polyamp.LossScaler(init_scale=SCALE), device=device().type)
        sides = [by_hand_with_scaler(Chain(200, 32).to(device()), x, used) for used in (native_scaler(), scaler)]
        yield Row(name, 1.0, ("torch's", sides[0]), ("polyamp's", sides[1]), after)


def growth(found: list[tuple[int, Found]]) -> str:
    """Microseconds a tensor, and how they grow."""
    lines = []
    for side in ("base", "own"):
        each = {count: statistics.median(getattr(times, side)) / count * 1e6 for count, times in found}
        numbers = ", ".join(f"{count}: {value:.2f}" for count, value in each.items())
        first, last = next(iter(each.values())), list(each.values())[-1]
        name = "by hand" if side == "base" else "polyamp"
        lines.append(f"microseconds a tensor, {name}: {numbers}; last / first {last / first:.2f}")
    return "\n".join(lines) + " (target: at most 1)"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also the compiled step")
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    arguments, settings = paired.parse(parser)
    torch.set_num_threads(settings.threads)
    paired.keep_freed_memory()
    print(paired.heading(torch_measure.environment(), settings) + "\n", flush=True)
    rows: list[tuple[Row, Found]] = []
    growing: list[tuple[int, Found]] = []

    def measured(row: Row, settings: Settings) -> Found | None:
        if arguments.only and not row.name.startswith(tuple(arguments.only)):
            return None
        found = paired.measure(row, settings, torch_measure.backward_clock)
        rows.append((row, found))
        return found

    for row in (*tensor_rows(), *block_rows(compiled=arguments.compile), *scaler_rows()):
        measured(row, settings)
    for count, row in growth_rows():
        found = measured(row, settings)
        if found is not None:
            growing.append((count, found))
    print(paired.report(rows))
    if growing:
        print("\n" + growth(growing))
    if arguments.json:
        paired.write_json(arguments.json, rows, torch_measure.environment(), settings)


if __name__ == "__main__":
    main()
