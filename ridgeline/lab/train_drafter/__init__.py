"""`ridgeline train-drafter`: trains an EAGLE-3 head for a model, on answers of the model itself."""
