"""Streamed answers: sources read the steps of an answer, writers write them in another dialect."""
