"""The CUDA runner: inputs, permanent rows, graphs, sampling and masks on the device, warm-up."""
