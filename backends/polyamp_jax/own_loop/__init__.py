"""Loss scaling for custom training loops: `scaled_value_and_grad` and `select`."""
