"""docs/commands.md says what the code says."""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.main import VERBS
from ridgeline.cli.reference import FLEET_TABLES, SUPPORT_TABLES, TABLES, with_tables

SUPPORTED = Path(__file__).resolve().parents[2] / "docs" / "supported-models.md"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
FLEET = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"


def test_the_option_tables_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run `python -m ridgeline.cli.reference` and commit docs/commands.md"
    for name, table in TABLES.items():
        assert f"<!-- options: {name} -->\n{table}\n<!-- end -->" in text


def test_the_supported_models_are_those_of_the_code() -> None:
    text = SUPPORTED.read_text(encoding="utf-8")
    stale = "run `python -m ridgeline.cli.reference` and commit docs/supported-models.md"
    for name, table in SUPPORT_TABLES.items():
        assert f"<!-- options: {name} -->\n{table}\n<!-- end -->" in text, stale


def test_the_tables_of_fleet_toml_are_those_of_the_code() -> None:
    text = FLEET.read_text(encoding="utf-8")
    for name, table in FLEET_TABLES.items():
        assert f"<!-- options: {name} -->\n{table}\n<!-- end -->" in text, (
            "run `python -m ridgeline.cli.reference` and commit docs/fleet.md"
        )


def test_every_verb_has_its_section() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for verb in VERBS:
        assert f"\n## ridgeline {verb}" in text


def test_an_outdated_table_is_rewritten_and_the_rest_left_alone() -> None:
    page = "before\n<!-- options: engine -->\n| old |\n<!-- end -->\nafter\n"
    assert with_tables(page) == f"before\n<!-- options: engine -->\n{TABLES['engine']}\n<!-- end -->\nafter\n"
