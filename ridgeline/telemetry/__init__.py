"""Timing records, step records, metrics and logs. Imported by all, imports none of the others."""
