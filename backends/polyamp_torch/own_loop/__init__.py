"""Loss scaling for loops that people keep in their own hands: `GradScaler` and what it knows of the loop."""
