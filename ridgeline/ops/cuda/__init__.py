"""The ops of the GPU engine: functions over torch tensors, each one launch (or a few) of a Triton kernel.

Imported only when the CUDA backend was chosen: every module here imports torch and triton. All launches can
be captured in a CUDA graph: outputs and scratch are the caller's, nothing is allocated, nothing is read back.
"""
