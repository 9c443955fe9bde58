"""From an EngineConfig to a warm engine: backend, memory plan, loading, calibration, compile-ahead."""
