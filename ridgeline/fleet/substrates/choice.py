"""make_substrate(): the substrate that fleet.toml names. Imports only that one."""

from __future__ import annotations

from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.substrates.substrate import Substrate, SubstrateError
from ridgeline.options import OptionError


def make_substrate(settings: FleetSettings) -> Substrate:
    """OptionError if its settings cannot be used here. Does not call Ray or the Kubernetes API."""
    kind, options = settings.substrate.kind, settings.substrate_options
    if kind == "local":
        from ridgeline.fleet.substrates.local import LocalSubstrate

        return LocalSubstrate(settings.state_dir, options)
    if kind == "ray":
        from ridgeline.fleet.substrates.ray import RaySubstrate

        return RaySubstrate(options)
    from ridgeline.fleet.substrates.kubernetes import KubernetesSubstrate

    try:
        return KubernetesSubstrate(options)
    except SubstrateError as error:
        raise OptionError(f"[substrate.kubernetes] {error}") from error
