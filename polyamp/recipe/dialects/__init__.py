"""Recipes in the words of other libraries: transformers, timm, DeepSpeed and torchtitan, one file a dialect."""
