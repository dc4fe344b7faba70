"""polyamp backend for Apple's MLX, on its CPU build: a complete example, written from the contract alone.

`docs/guides/a_backend_of_your_own.md` walks through it. The order to read: `arrays`, `losses`; `precision/op_list`,
`autocast`, `policy_module`; `step/state`, `forward_backward`, `update`, `step`; `backend`, `harness`.
"""

from __future__ import annotations

from typing import Final

from polyamp.contract.backend import Backend
from polyamp_mlx.backend import MLXBackend

BACKEND: Final[Backend] = MLXBackend()
