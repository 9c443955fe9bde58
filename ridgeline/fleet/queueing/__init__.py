"""Requests that wait for a replica: their order, their budgets, their estimates. Pure logic."""
