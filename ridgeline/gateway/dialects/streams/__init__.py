"""Streamed answers: sources read an answer into steps, writers write the steps in another dialect."""
