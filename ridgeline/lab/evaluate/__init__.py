"""Quality of models: tasks, statistics of paired answers, the gate, and the comparison of several models."""
