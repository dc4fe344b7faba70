"""polyamp's PyTorch backend: recipes on `nn.Module`s, over `torch.autocast` and `torch.optim`.

`polyamp.init` and `polyamp.train_step` find it by themselves when they are given a torch module. For a loop of your
own: `autocast` and `GradScaler`; for FSDP2 `fully_shard`. `polyamp_torch.lightning` and `polyamp_torch.accelerate` are
imported by name.
"""

from polyamp_torch.backend import BACKEND, TorchBackend
from polyamp_torch.distributed.mixed_precision import fully_shard, mixed_precision_policy
from polyamp_torch.own_loop.grad_scaler import GradScaler
from polyamp_torch.precision.autocast import autocast, carried
from polyamp_torch.precision.custom_function import custom_bwd, custom_fwd
from polyamp_torch.step.state import TorchState

__all__ = [
    "BACKEND",
    "GradScaler",
    "TorchBackend",
    "TorchState",
    "autocast",
    "carried",
    "custom_bwd",
    "custom_fwd",
    "fully_shard",
    "mixed_precision_policy",
]
