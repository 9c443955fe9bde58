"""Requests that wait for a replica: order, budgets of time, estimates. Pure logic."""
