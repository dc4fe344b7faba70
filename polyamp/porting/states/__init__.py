"""Training states on their way to another framework: what holds one, what its arrays mean, the canonical layout in
between, the recipes compared. Called by `port`; backends give the layouts of their optimizers in the words of `layout`,
and put what `described` writes into checkpoints."""
