"""A training loop in torch with parameter groups, schedules, a gradient scaler and updates written out; `loss_fn` and
the constants are set by `harness`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import polyamp

RATE = 1e-2
BETAS = (0.9, 0.999)
EPSILON = 1e-8
DECAY = 0.1
MOMENTUM = 0.9
KIND = "adamw"
GROUPS = ""
CLIP = 0.0
PARTS = 1
SCHEDULE = ""
TOTAL = 4
WARMUP = 0
END = 0.0
DTYPE = ""
MODE = "autocast"
SCALE = 2.0**10
GROWTH = 2000
loss_fn: Any = None


def rate_at(step: int) -> float:
    if step < WARMUP:
        return RATE * step / WARMUP
    if SCHEDULE == "linear":
        return END + (RATE - END) * max(0.0, (TOTAL - step) / (TOTAL - WARMUP))
    if SCHEDULE == "cosine":
        return END + (RATE - END) * 0.5 * (1.0 + float(np.cos(np.pi * min(step / TOTAL, 1.0))))
    if SCHEDULE == "exponential":
        return RATE * 0.5**step
    return RATE


def make_optimizer(model: Any) -> Any:
    plain = [p for p in model.parameters() if p.ndim < 2 and GROUPS == "vectors"]
    head = [p for name, p in model.named_parameters() if name.startswith(GROUPS) and GROUPS not in ("", "vectors")]
    known = {id(p) for p in (*plain, *head)}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in known], "share": 1.0}]
    if plain:
        groups.append({"params": plain, "weight_decay": 0.0, "share": 1.0})
    if head:
        groups.append({"params": head, "share": 0.1})
    if KIND == "sgd":
        return torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    if KIND == "rmsprop":
        return torch.optim.RMSprop(groups, lr=RATE, alpha=0.99, eps=EPSILON, weight_decay=DECAY)
    made = torch.optim.Adam if KIND == "adam" else torch.optim.AdamW
    return made(groups, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def begin(model: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH) if DTYPE == "float16" else None
    return polyamp.porting.training(model, make_optimizer(model), scaler, step=0)


class CastModel:
    """A model whose parameters and inputs are cast for each pass; its outputs are float32."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, batch: Any) -> Any:
        parameters = {name: p.to(getattr(torch, DTYPE)) for name, p in self.model.named_parameters()}
        inputs = {name: a.to(getattr(torch, DTYPE)) if a.is_floating_point() else a for name, a in batch.items()}
        out = torch.func.functional_call(self.model, parameters, (inputs,))
        return tuple(each.float() for each in out) if isinstance(out, tuple) else out.float()


def loss_of(model: Any, rows: Any) -> Any:
    if DTYPE and MODE == "cast":
        return loss_fn(CastModel(model), rows)
    with torch.autocast("cpu", getattr(torch, DTYPE or "bfloat16"), enabled=bool(DTYPE)):
        return loss_fn(model, rows)


def clip(parameters: list[Any]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, CLIP)


@torch.no_grad()
def adamw_update(optimizer: Any) -> None:
    """AdamW, written out over the state of torch's own."""
    for group in optimizer.param_groups:
        one, two = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = optimizer.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            step, mean, square = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
            mean.mul_(one).add_(p.grad, alpha=1 - one)
            square.mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
            p.mul_(1 - group["lr"] * group["weight_decay"])
            root = (square / (1 - two**step)).sqrt() + group["eps"]
            p.sub_(group["lr"] * (mean / (1 - one**step)) / root)


@torch.no_grad()
def sgd_update(optimizer: Any) -> None:
    """SGD with momentum, written out."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            gradient = p.grad + group["weight_decay"] * p
            state = optimizer.state[p]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            p.sub_(group["lr"] * state["momentum_buffer"])


BY_HAND = False


def step(training: Any, batch: Any) -> Any:
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    for group in optimizer.param_groups:
        group["lr"] = group["share"] * rate_at(training.step)
    optimizer.zero_grad()
    total = 0.0
    for part in range(PARTS):
        rows = {name: torch.from_numpy(np.ascontiguousarray(a[part::PARTS])) for name, a in batch.items()}
        loss = loss_of(model, rows) / PARTS
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = total + loss.detach()
    if scaler is not None:
        scaler.unscale_(optimizer)
    if CLIP:
        clip(list(model.parameters()))
    applied = 1
    if scaler is not None:
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        applied = int(scaler.get_scale() >= before)
    elif BY_HAND:
        (sgd_update if KIND == "sgd" else adamw_update)(optimizer)
    else:
        optimizer.step()
    return polyamp.porting.training(model, optimizer, scaler, step=training.step + applied), total
