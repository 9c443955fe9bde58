"""docs/gateway-keys.md says what the code says."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.fields import KeyFields
from ridgeline.gateway.tenants.config import StoreConfig
from ridgeline.options import options_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gateway-keys.md").read_text(encoding="utf-8")


def test_every_setting_has_its_line_with_default_and_meaning() -> None:
    for section, config in (("store", StoreConfig), ("admin", AdminConfig)):
        for option in options_of(config):
            default = "" if option.default in (None, "") else f"`{json.dumps(option.default)}`"
            assert f"| `{section}.{option.name}` | {default} | {option.doc} |" in PAGE


def test_every_field_of_a_key_is_explained() -> None:
    for field in KeyFields.__struct_fields__:
        assert f"`{field}`" in PAGE
