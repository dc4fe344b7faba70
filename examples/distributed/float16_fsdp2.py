"""Fine-tunes a GPT in float16 with FSDP2: float32 shards, float16 products, one loss scale, and no step half-taken.

torchrun --nproc-per-node 2 examples/distributed/float16_fsdp2.py
python examples/distributed/float16_fsdp2.py

The model counts upwards by one and learns to count by three. Everything that is true of one process stays true of
several: the loss is the mean over all rows, the schedule and the moving average move with applied steps, and a step
that overflows on one rank is skipped on all.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import polyamp
import polyamp_torch

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS = 16, 8, 32, 2, 2
ROWS = 32
"""Of a step's batch, those of all ranks together."""
STEPS = 60
RECIPE = polyamp.Recipe(
    policy="mixed_float16",
    optimizer=polyamp.adamw(
        polyamp.schedules.warmup_cosine(3e-3, warmup_steps=5, total_steps=STEPS),
        weight_decay=0.1,
        groups=polyamp.no_decay("bias", "norm", "embedding"),
    ),
    clip_norm=1.0,
    scaler=polyamp.LossScaler(init_scale=2.0**22, growth_interval=20),  # too high at first: it shows skips
)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm; (rows, tokens, width) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.joint(self.norm_1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Tokens (rows, tokens) to logits (rows, tokens, vocabulary); the head is the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def batch(number: int, stride: int, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Rows that count by `stride` from a drawn start; of several ranks, this one's part of them."""
    starts = torch.randint(VOCABULARY, (ROWS, 1), generator=torch.Generator().manual_seed(number))
    rows = (starts + stride * torch.arange(CONTEXT + 1)) % VOCABULARY
    mine = rows[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
    return {"x": mine[:, :-1], "y": mine[:, 1:]}


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next token, the mean over the rows that it is given."""
    loss: torch.Tensor = polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])
    return loss


def pretrained() -> nn.Module:
    """What one would load: a model that counts by one, the same on every rank."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for number in range(20):
        optimizer.zero_grad()
        loss_fn(model, batch(number, 1)).backward()
        optimizer.step()
    return model


def finetune(steps: int = STEPS) -> tuple[nn.Module, list[Any], list[torch.Tensor]]:
    """The training itself, in a process group that is there.

    Returns:
        The sharded model, the result of each step, and the moving average of each parameter, sharded as it is.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (ranks,))
    model = polyamp_torch.fully_shard(pretrained().to(device), RECIPE.policy, mesh=mesh, modules="blocks/*")
    state = polyamp.init(model, RECIPE)
    step = polyamp.train_step(loss_fn, RECIPE)
    average = [p.detach().clone() for p in model.parameters()]
    results = []
    for number in range(steps):
        mine = {name: part.to(device) for name, part in batch(number, 3, rank, ranks).items()}
        state, result = step(state, mine)
        results.append(result)
        if not result.skipped:
            with torch.no_grad():
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
        if rank == 0 and (number % 10 == 0 or number == steps - 1 or result.skipped):
            said = "skipped" if result.skipped else f"gradient norm {float(result.grad_norm):.3f}"
            print(f"step {number:2}  loss {float(result.loss):.4f}  scale {float(result.scale):g}  {said}")
    return model, results, average


def main() -> None:
    """Under torchrun one of its ranks, else the only one."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=STEPS)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    _, results, _ = finetune(options.parse_args().steps)
    if dist.get_rank() == 0:
        skipped = sum(bool(result.skipped) for result in results)
        print(f"{dist.get_world_size()} ranks: loss {float(results[-1].loss):.3f}, skipped {skipped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
