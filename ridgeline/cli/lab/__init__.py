"""The verbs of the lab: bench, plan, tune, profile, explain."""
