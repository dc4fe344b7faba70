"""A training loop written by hand in torch; `loss_fn` and the constants are set by `harness`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import polyamp

RATE, DECAY, CLIP, PARTS, STEPS, WARMUP, KIND, DTYPE = 1e-2, 0.1, 0.0, 1, 4, 0, "adamw", ""
loss_fn: Any = None


def make_optimizer(parameters: Any) -> Any:
    if KIND == "adamw":
        return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=DECAY)


def rate_at(step: int) -> float:
    if KIND == "cosine":
        return RATE * 0.5 * (1.0 + float(np.cos(np.pi * step / STEPS)))
    if WARMUP:
        return RATE * min(1.0, 0.1 + 0.9 * step / WARMUP)
    return RATE


def begin(model: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if DTYPE == "float16" else None
    return polyamp.porting.training(model, make_optimizer(model.parameters()), scaler, step=0)


def step(training: Any, batch: Any) -> Any:
    model, optimizer, scaler = training.model, training.optimizer, training.scaler
    for group in optimizer.param_groups:
        group["lr"] = rate_at(training.step)
    optimizer.zero_grad()
    total = 0.0
    for part in range(PARTS):
        rows = {name: torch.from_numpy(np.ascontiguousarray(a[part::PARTS])) for name, a in batch.items()}
        with torch.autocast("cpu", getattr(torch, DTYPE or "bfloat16"), enabled=bool(DTYPE)):
            loss = loss_fn(model, rows) / PARTS
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = total + loss.detach()
    if scaler is not None:
        scaler.unscale_(optimizer)
    if CLIP:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return polyamp.porting.training(model, optimizer, scaler, step=training.step + 1), total
