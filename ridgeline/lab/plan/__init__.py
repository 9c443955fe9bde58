"""plan: from a model, hardware, traffic and an SLO to a configuration with a prediction."""
