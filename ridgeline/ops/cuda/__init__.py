"""The ops of the GPU engine: functions over torch tensors, each one launch (or a few) of a Triton kernel.

Imported only if the CUDA backend was chosen: every module here imports torch and triton. All launches can be
captured in a CUDA graph: the caller provides outputs and scratch, nothing is allocated or read back.
"""
