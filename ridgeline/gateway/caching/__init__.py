"""Caches of answers, exact and semantic; and a linter that measures how much prompts share."""
