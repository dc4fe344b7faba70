"""A training of torch's watched module by module, for `polyamp.parity`: `observer` is the door."""
