"""Settings: where they come from, and that a wrong one stops the start with its name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pipeline.config import Settings, load_settings, setting_origins
from pipeline.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without a settings file, and an environment without settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DUETASKS_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_arguments_win_over_variables_over_the_file_over_defaults(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that everybody expects: the nearer, the stronger."""
    (folder / "duetasks.toml").write_text('partitions = 5\nhttp_port = 5005\ngroup_id = "file"\n')
    monkeypatch.setenv("DUETASKS_HTTP_PORT", "6006")
    monkeypatch.setenv("DUETASKS_GROUP_ID", "variable")

    settings = load_settings(group_id="argument", topic_prefix=None)

    assert (settings.group_id, settings.http_port, settings.partitions) == ("argument", 6006, 5)
    assert settings.batch_records_max == Settings.model_fields["batch_records_max"].default


def test_each_setting_says_where_it_came_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question when a setting seems to have no effect."""
    (folder / "duetasks.toml").write_text("partitions = 5\nhttp_port = 5005\n")
    monkeypatch.setenv("DUETASKS_HTTP_PORT", "6006")
    monkeypatch.setenv("DUETASKS_GROUP_ID", "")

    origins = setting_origins()

    assert origins["http_port"] == "DUETASKS_HTTP_PORT"
    assert origins["partitions"] == "duetasks.toml"
    assert origins["group_id"] == origins["fence"] == "default"
    assert set(origins) == set(Settings.model_fields)


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DUETASKS_PARTITION=8` silently ignored makes topics that can't be changed any more."""
    monkeypatch.setenv("DUETASKS_PARTITION", "8")

    with pytest.raises(ConfigurationError, match=r"no setting DUETASKS_PARTITION: see `duetasks config`"):
        load_settings()


def test_variables_of_the_test_suite_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in the same environment."""
    monkeypatch.setenv("DUETASKS_TEST_BOOTSTRAP_SERVERS", "127.0.0.1:1")

    assert load_settings().bootstrap_servers is None


def test_an_unknown_key_in_the_file_is_refused_without_its_value(folder: Path) -> None:
    """The value of a misspelt key may be a password."""
    (folder / "duetasks.toml").write_text('sasl_passwrod = "hunter2"\n')

    with pytest.raises(ConfigurationError, match="sasl_passwrod does not exist") as raised:
        load_settings()

    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "clause"),
    [
        ("partitions", "zero", "Setting partitions is wrong: it should be a valid integer"),
        ("partitions", "0", "Setting partitions is wrong: it should be greater than or equal to 1"),
        ("http_port", "70000", "Setting http_port is wrong: it should be less than or equal to 65535"),
        ("log_format", "xml", "Setting log_format is wrong: it should match pattern"),
        ("fence", "maybe", "Setting fence is wrong: it should be 'offset' or 'write'"),
        ("target_topics", '["task-state"]', "Setting target_topics is wrong: task-state: tasks can't be emitted to"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_should_be(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, clause: str
) -> None:
    """One sentence at the start instead of a traceback in the night."""
    monkeypatch.setenv(f"DUETASKS_{name.upper()}", value)

    with pytest.raises(ConfigurationError) as raised:
        load_settings()

    assert str(raised.value).startswith(clause)


def test_all_wrong_values_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one at each attempt."""
    monkeypatch.setenv("DUETASKS_PARTITIONS", "zero")
    monkeypatch.setenv("DUETASKS_HTTP_PORT", "-1")

    with pytest.raises(ConfigurationError, match=r"Setting partitions .*; Setting http_port .*\.$"):
        load_settings()


def test_a_broken_or_absent_settings_file_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was asked for and is not read is a set of defaults that nobody chose."""
    monkeypatch.setenv("DUETASKS_CONFIG_FILE", str(folder / "other.toml"))
    with pytest.raises(ConfigurationError, match=r"DUETASKS_CONFIG_FILE names .*other\.toml, which is no file"):
        load_settings()
    (folder / "other.toml").write_text("partitions = \n")
    with pytest.raises(ConfigurationError, match=r"other\.toml is no TOML file: .*line 1"):
        load_settings()


def test_secrets_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mapping goes to `duetasks config` and to the start-up log."""
    monkeypatch.setenv("DUETASKS_SASL_PASSWORD", "hunter2")

    settings = load_settings()

    assert "hunter2" not in str(settings.redacted()) + repr(settings)
    assert settings.redacted()["sasl_password"] == "**********"  # noqa: S105  # what is shown instead
    settings = settings.with_bootstrap("127.0.0.1:9092")
    assert settings.client_config()["sasl.password"] == "hunter2"  # where it is needed


def test_without_brokers_a_client_is_told_what_to_type() -> None:
    """The commonest first mistake."""
    with pytest.raises(ConfigurationError, match="duetasks broker start"):
        load_settings().client_config()
