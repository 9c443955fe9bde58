"""make_substrate(): the substrate that fleet.toml names. Imports only that one."""

from __future__ import annotations

from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.substrates.substrate import Substrate
from ridgeline.options import OptionError


def make_substrate(settings: FleetSettings) -> Substrate:
    kind = settings.substrate.kind
    if kind == "local":
        from ridgeline.fleet.substrates.local import LocalSubstrate

        return LocalSubstrate(settings.state_dir, settings.substrate_options)
    raise OptionError(f"[substrate] kind = {kind!r} is not available in this version; use local")
