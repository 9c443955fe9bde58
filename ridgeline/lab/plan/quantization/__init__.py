"""The quantization step of a plan: the formats that are served, their speed, and their quality gates."""
