"""In which dtype each operation and each module computes: S1 to S5."""
