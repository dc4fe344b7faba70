"""polyamp's PyTorch backend: recipes for `nn.Module`s, based on `torch.autocast` and `torch.optim`.

`polyamp.init` and `polyamp.train_step` select it for a torch module. User-written loops use `autocast` and
`GradScaler`; FSDP2 uses `fully_shard`. Import `polyamp_torch.lightning` and `polyamp_torch.accelerate` explicitly.
"""

from polyamp.backend_lookup import check_framework

check_framework(__name__, "torch", "torch")

from polyamp_torch.backend import BACKEND, TorchBackend
from polyamp_torch.distributed.torch_only.fsdp_mixed_precision import fully_shard, mixed_precision_policy
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.precision.autocast import autocast, carried
from polyamp_torch.precision.torch_only.custom_autograd_function import custom_bwd, custom_fwd
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


def __dir__() -> list[str]:
    return __all__
