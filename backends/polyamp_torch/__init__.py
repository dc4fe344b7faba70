"""polyamp's PyTorch backend: recipes on `nn.Module`s, over `torch.autocast` and `torch.optim`.

`polyamp.init` and `polyamp.train_step` find it by themselves when they are given a torch module.
"""

from polyamp_torch.autocast import autocast
from polyamp_torch.backend import BACKEND, TorchBackend
from polyamp_torch.state import TorchState

__all__ = ["BACKEND", "TorchBackend", "TorchState", "autocast"]
