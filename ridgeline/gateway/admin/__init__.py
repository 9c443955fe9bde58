"""The administrators' own listener: keys, teams, usage, audit."""
