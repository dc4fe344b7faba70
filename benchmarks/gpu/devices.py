"""What a GPU can do at most, and how much of it a training step uses: peak FLOP/s by device name, and MFU.

Called by `rows`. No framework is imported here.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from benchmarks.common.workloads import Workload


class Peak(NamedTuple):
    """Dense peaks of a device in TFLOP/s, without structured sparsity; None where it has no such units.

    Attributes:
        float32: of the ordinary cores, TF32 off.
        tf32: of the tensor cores on float32 operands.
        bfloat16: of the tensor cores, summing in float32.
        float16: likewise.
        source: the vendor's document.
    """

    float32: float
    tf32: float | None
    bfloat16: float | None
    float16: float
    source: str


_HOPPER: Final = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, table 2"
_AMPERE: Final = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2, appendix A"
_ADA: Final = "NVIDIA Ada GPU Architecture whitepaper v2.1, appendix A"

PEAKS: Final[tuple[tuple[str, Peak], ...]] = (
    (r"B200", Peak(75.0, 1100.0, 2250.0, 2250.0, "NVIDIA HGX B200 data sheet")),
    (r"GH200", Peak(67.0, 494.5, 989.5, 989.5, "NVIDIA GH200 Grace Hopper Superchip data sheet")),
    (r"H200 NVL", Peak(60.0, 417.5, 835.5, 835.5, "NVIDIA H200 Tensor Core GPU data sheet")),
    (r"H200", Peak(67.0, 494.5, 989.5, 989.5, "NVIDIA H200 Tensor Core GPU data sheet")),
    (r"H100 NVL", Peak(60.0, 417.5, 835.5, 835.5, "NVIDIA H100 Tensor Core GPU data sheet")),
    (r"H100 PCIe", Peak(51.2, 378.0, 756.0, 756.0, _HOPPER)),
    (r"H100( 80GB HBM3| SXM)", Peak(66.9, 494.7, 989.4, 989.4, _HOPPER)),
    (r"A100", Peak(19.5, 156.0, 312.0, 312.0, "NVIDIA A100 Tensor Core GPU data sheet")),
    (r"A40", Peak(37.4, 74.8, 149.7, 149.7, "NVIDIA A40 data sheet")),
    (r"A30", Peak(10.3, 82.0, 165.0, 165.0, "NVIDIA A30 data sheet")),
    (r"A10", Peak(31.2, 62.5, 125.0, 125.0, "NVIDIA A10 data sheet")),
    (r"RTX A6000", Peak(38.7, 77.4, 154.8, 154.8, _AMPERE)),
    (r"L40S", Peak(91.6, 183.0, 362.0, 362.0, "NVIDIA L40S data sheet")),
    (r"L40", Peak(90.5, 90.5, 181.0, 181.0, "NVIDIA L40 data sheet")),
    (r"L4", Peak(30.3, 60.0, 121.0, 121.0, "NVIDIA L4 data sheet")),
    (r"RTX 4090(?! D| Laptop)", Peak(82.6, 82.6, 165.2, 165.2, _ADA)),
    (r"RTX 3090(?! Ti)", Peak(35.6, 35.6, 71.0, 71.0, _AMPERE)),
    (r"V100-SXM2", Peak(15.7, None, None, 125.0, "NVIDIA Tesla V100 data sheet")),
    (r"V100-PCIE", Peak(14.0, None, None, 112.0, "NVIDIA Tesla V100 data sheet")),
    (r"T4", Peak(8.1, None, None, 65.0, "NVIDIA T4 data sheet")),
)
"""Pattern of whole words in the driver's name of the device -> its peaks; the first that fits counts.

The data sheets give most tensor-core figures with sparsity: these are half of them. GeForce's are those that sum in
float32, which are half of those that sum in float16. Of boards with several forms the name must tell which.
"""


def peak(device: str) -> Peak | None:
    """The peaks of a device by the name that the driver gives it; None for one that is not in the table."""
    if re.search(r"\bMIG\b", device):
        return None  # a part of a device
    for pattern, found in PEAKS:
        if re.search(rf"(?<!\w){pattern}(?!\w)", device, re.IGNORECASE):
            return found
    return None


def peak_flops(device: str, precision: str) -> float | None:
    """Dense peak in FLOP/s.

    Args:
        device: the driver's name, such as "NVIDIA H100 80GB HBM3".
        precision: "float32", "TF32", "bfloat16" or "float16".
    """
    found = peak(device)
    tera = None if found is None else getattr(found, precision.lower())
    return None if tera is None else float(tera) * 1e12


def parameters(workload: Workload) -> int:
    """Parameters of a "block" or "gpt" workload at GPU size without the two tables of embeddings, which multiply
    nothing: weights, biases and norms of the blocks, and a GPT's last norm and head (without a bias)."""
    width = workload.width
    blocks = workload.layers * (12 * width**2 + 13 * width)
    return blocks + (2 * width + width * workload.vocabulary if workload.vocabulary else 0)


def flop_per_token(workload: Workload) -> float:
    """FLOP that one token of a training step takes in the model: 6N + 12 L H Q T.

    N parameters, L layers, H heads of Q features, T tokens in a sequence. The masked half of causal attention counts
    as if it were computed, recomputed activations do not count: PaLM (arxiv.org/abs/2204.02311), appendix B. Tables of
    embeddings are not in N.
    """
    return float(6 * parameters(workload) + 12 * workload.layers * workload.width * workload.length)


def mfu(workload: Workload, seconds: float, peak_flops: float) -> float:
    """Model FLOP utilisation of a step: the FLOP of its batch's tokens over what the device could do meanwhile."""
    return workload.batch * workload.length * flop_per_token(workload) / (seconds * peak_flops)
