"""Routes learned from examples: features, predictor, fitting, evaluation, the artifact on disk."""
