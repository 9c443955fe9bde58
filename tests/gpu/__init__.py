"""Checks of the GPU engine that need a CUDA device: plain functions with asserts, in `checks_*`.

`python -m tests.gpu` runs them where only torch, triton, transformers and numpy are installed; `pytest -m
gpu` runs the same.
"""
