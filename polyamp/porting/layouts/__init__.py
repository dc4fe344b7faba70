"""Layers as data, and the converter protocols of the backends.

The package defines layer kinds with canonical arrays, the forms that convert native arrays, and a model's inventory. It
depends on no other package of `polyamp.porting`.
"""
