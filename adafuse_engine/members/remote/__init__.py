"""Members that a server holds: token ids go out, log-probabilities come back."""
