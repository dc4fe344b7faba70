"""What a training's numbers do under a policy: figures of the steps, per module, read every n steps (S35)."""
