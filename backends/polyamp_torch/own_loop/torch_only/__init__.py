"""What only `GradScaler` needs: its record of the loop, its state in torch's form, and sharded gradients."""
