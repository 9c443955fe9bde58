"""Results as text and as pages."""
