"""Sort slots by expert, gather their rows, and sum each token's rows again."""
