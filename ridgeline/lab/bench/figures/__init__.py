"""A run's records and the figures made from them: metrics, rates, intervals, validity, verdict."""
