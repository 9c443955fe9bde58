"""Metrics, traces and the access log."""
