"""Anthropic's /v1/messages: its bodies become chat requests, and their answers its messages and events."""
