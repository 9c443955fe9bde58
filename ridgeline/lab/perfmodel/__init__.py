"""How long a step takes: from first principles, or fitted on measured steps. Used by plan and simulate."""
