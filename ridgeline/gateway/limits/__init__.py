"""Limits of keys, teams and models: requests, tokens, concurrency, money."""
