"""One method of quantization in each file; `scalings` has what AWQ and SmoothQuant share."""
