"""The native CPU library for Python: `library` binds its C interface."""
