"""Modules of torch porting that have no counterpart in the other backends."""
