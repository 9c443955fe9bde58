"""Tenants: virtual keys, teams, scopes and owned objects, and their store."""
