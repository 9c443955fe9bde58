"""From a subject's answers to outcomes, and from outcomes to metrics. Pure."""
