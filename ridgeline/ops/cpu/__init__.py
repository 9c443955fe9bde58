"""The native CPU library as Python sees it: `library` binds its C interface."""
