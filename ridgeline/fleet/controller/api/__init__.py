"""The control API of the controller, for `ridgeline fleet` and for routers."""
