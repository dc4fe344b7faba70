"""The recipe on torch's own engines: DistributedDataParallel, or with `--fsdp` `fully_shard`.

torchrun --nproc-per-node 2 examples/distributed/with_torch.py
torchrun --nproc-per-node 2 examples/distributed/with_torch.py --fsdp
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from problem import CLASSES, HIDDEN, PIXELS, arguments, batches, held_out, loss_fn, recipe, report, weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polyamp


def network() -> nn.Module:
    """The two layers."""
    layers = [nn.Linear(PIXELS, HIDDEN), nn.Linear(HIDDEN, CLASSES)]
    with torch.no_grad():
        for layer, (kernel, bias) in zip(layers, weights(), strict=True):
            layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def main() -> None:
    """Each rank trains on its own part of every batch."""
    options = arguments(__doc__, fsdp=False)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = fully_shard(network()) if options.fsdp else DistributedDataParallel(network())
    chosen = recipe(options)
    state = polyamp.init(model, chosen)
    step = polyamp.train_step(loss_fn, chosen)
    results = []
    for batch in batches(options.steps, rank, ranks):
        state, result = step(state, batch)
        results.append(result)
    with torch.no_grad():
        logits = chosen.policy.autocast(model)(torch.from_numpy(held_out()[0]))
    if rank == 0:
        report(results, logits, f"torch, {'fully_shard' if options.fsdp else 'DistributedDataParallel'}, {ranks} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
