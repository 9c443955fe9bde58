"""The load: HTTP client, answers, conversations, timers, the target server."""
