"""The control API: what people and routers ask of the controller."""
