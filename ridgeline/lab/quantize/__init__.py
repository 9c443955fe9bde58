"""Makes quantized checkpoints: layer by layer, with calibration, and with a report of the loss."""
