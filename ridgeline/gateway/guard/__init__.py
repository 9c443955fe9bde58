"""What must not leave or enter: personal data and secrets, found, redacted, restored."""
