"""The machine's measured limits (bandwidth, FLOP/s) and the step sizes that follow from them."""
