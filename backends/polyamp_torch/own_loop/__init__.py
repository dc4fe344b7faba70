"""Loss scaling for user-written training loops: `GradScaler` and its record of the loop."""
