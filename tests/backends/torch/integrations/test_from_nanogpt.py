"""docs/guides/from_nanogpt.md: both sides of its diff train alike, on a small GPT and with the names of train.py."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.page_diffs import run_side

PAGE = "from_nanogpt"
SETTINGS: dict[str, Any] = {
    "device_type": "cpu",
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_iters": 3,
    "lr_decay_iters": 8,
    "decay_lr": True,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "grad_clip": 0.5,
    "gradient_accumulation_steps": 2,
    "iter_num": 0,
    "max_iters": 11,
    "log_interval": 1,
    "math": math,
    "torch": torch,
}


class TinyGPT(nn.Module):
    """What train.py asks of nanoGPT's model: tied embeddings, norms, biases, `(logits, loss)`, two decay groups."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.ln, self.fc, self.proj = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.wte.weight
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.2)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        x = x + functional.scaled_dot_product_attention(self.ln(x), x, x, is_causal=True)
        logits = self.lm_head(x + self.proj(functional.gelu(self.fc(x))))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.Optimizer:
        groups = [[p for p in self.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False)]
        options = [{"params": p, "weight_decay": d} for p, d in zip(groups, (weight_decay, 0.0), strict=True)]
        return torch.optim.AdamW(options, lr=learning_rate, betas=betas)


def names(dtype: str) -> dict[str, Any]:
    """The names that the rest of train.py defines. Its context is the same autocast on the CPU as on a GPU."""
    torch.manual_seed(0)
    model = TinyGPT()
    generator = torch.Generator().manual_seed(1)
    ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    region = nullcontext() if dtype == "float32" else torch.amp.autocast("cpu", ptdtype)

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(11, (4, 6), generator=generator)
        return x, (x * 3 + 1) % 11

    return {**SETTINGS, "dtype": dtype, "model": model, "get_batch": get_batch, "nullcontext": lambda: region}


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' weights."""
    others = other.state_dict()
    return max(float((array - others[name]).abs().max()) for name, array in one.state_dict().items())


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda.amp, "GradScaler", lambda enabled: torch.amp.GradScaler("cpu", enabled=enabled))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-5), ("float16", 1e-5)])
def test_both_sides_of_the_diff_train_alike(dtype: str, tolerance: float) -> None:
    """Twelve updates, warmup and decay included; the restored state is the trained one."""
    before, after = (run_side(PAGE, sign, names(dtype)) for sign in "-+")
    assert int(after["state"].step) == after["iter_num"] == before["iter_num"] == 12
    assert distance(before["model"], after["state"].model) < tolerance
    assert after["state"].model is after["model"]
    logits, loss = after["evaluate"](after["X"], after["Y"])
    assert (logits.dtype, loss.dtype) == (torch.float32, torch.float32)


def test_the_learning_rate_of_every_step_is_nanogpts() -> None:
    before, after = (run_side(PAGE, sign, names("float32")) for sign in "-+")
    for count in range(20):
        assert after["schedule"](count) == pytest.approx(before["get_lr"](count), rel=1e-12, abs=0)
    assert after["schedule"](0) == 1e-2 / 4


def test_without_the_page_s_origin_the_weights_are_far_away() -> None:
    """A warmup that begins at a rate of 0 is another training."""
    before = run_side(PAGE, "-", names("float32"))
    after = run_side(PAGE, "+", names("float32"), replace={", origin=-1": ""})
    assert distance(before["model"], after["state"].model) > 1e-3
