"""The admin API on its own listener: keys, teams, usage, audit."""
