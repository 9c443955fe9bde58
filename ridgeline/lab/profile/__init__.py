"""profile: a bounded number of engine steps, operator by operator, beside the ceilings."""
