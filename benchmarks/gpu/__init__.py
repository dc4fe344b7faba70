"""polyamp beside handwritten steps on one NVIDIA GPU; `python benchmarks/gpu.py` is the command."""
