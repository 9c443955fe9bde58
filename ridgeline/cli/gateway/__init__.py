"""The verbs of the gateway: gateway, its keys, teams, usage and routes; lint-prompts."""
