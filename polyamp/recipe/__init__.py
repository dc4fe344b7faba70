"""What a user writes: the policy and its dialects, the loss scaler, optimizer specs, and the recipe that holds them."""
