"""polyamp for Apple's MLX, on its CPU build: a whole backend, written from the contract alone, to be read and copied.

`docs/guides/a_backend_of_your_own.md` walks through it. The order to read: `arrays`, `losses`; `precision/op_list`,
`autocast`, `bound`; `step/state`, `differentiate`, `update`, `step`; `backend`, `harness`.
"""

from __future__ import annotations

from typing import Final

from polyamp.contract.backend import Backend
from polyamp_mlx.backend import MLXBackend

BACKEND: Final[Backend] = MLXBackend()
