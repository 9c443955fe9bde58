"""profile: a bounded number of engine steps, by operator, beside the machine's limits."""
