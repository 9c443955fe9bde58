"""Who may ask: virtual keys, teams, scopes, what they own; the store they are kept in."""
