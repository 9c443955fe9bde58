"""Speculation: guesses of the next tokens, verified several at a time. Pure logic, on the host."""
