"""torch: its own test of autocast on the CPU, from the test helpers that its wheel ships."""

from tests.downstream.package import Package

PACKAGE = Package(
    "torch",
    "2.13.0",
    "torch",
    "`TestAutocast` of `torch.testing` over torch's own lists of operations, in bfloat16 and float16",
    ("torch.autocast",),
    program="torch_autocast_lists.py",
    installed=False,  # the environment has it already
    requires=("expecttest==0.3.0",),
    differences={
        f"test_autocast[torch_16-_native_multi_head_attention-{dtype}]": "torch's fused attention computes the "
        "softmax in 16 bits. polyamp computes it in float32 (S4), and the test compares bits."
        for dtype in ("bfloat16", "float16")
    },
)
