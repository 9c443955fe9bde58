"""The verbs of the fleet: up, check, status, scale, roll, drain, down, logs, events."""
