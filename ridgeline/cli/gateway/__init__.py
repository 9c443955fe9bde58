"""The verbs of the gateway: gateway, keys, teams, usage, router, lint-prompts."""
