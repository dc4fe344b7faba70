"""User-facing configuration: policy and dialects, loss scaler, optimizer specs, and the recipe that combines them."""
