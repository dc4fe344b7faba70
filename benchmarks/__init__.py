"""What is measured, not tested: `common` is shared, and `torch`, `jax`, `tensorflow` and `gpu` hold the scripts.

A package, so that scripts say `from benchmarks.common import ...`. The folders in it are none: a script that is started
by its path has its own folder first on `sys.path`, and `benchmarks/torch` there must not be taken for torch.
"""
