"""Keras's half of `polyamp.porting`: its layers in the canonical layout, its models filled and evaluated, its files."""
