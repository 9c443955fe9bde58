"""Where replicas run: one small interface, and local processes, Ray and Kubernetes behind it."""
