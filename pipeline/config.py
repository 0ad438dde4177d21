"""Every setting, from `DUETASKS_*` variables and one TOML file, validated once at the start.

Order: explicit arguments, then variables, then the file named by `DUETASKS_CONFIG_FILE` (or `duetasks.toml` in the
working directory), then the defaults below. Nothing else in the package reads the environment.
"""

import os
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from pipeline.core.events import DAY_MS, OWN_TOPICS, Limits
from pipeline.core.tasks import DurationMs
from pipeline.errors import ConfigurationError

__all__ = [
    "TASK_VARIABLE_PREFIX",
    "Fence",
    "Settings",
    "TopicNames",
    "load_settings",
    "process_environment",
    "setting_origins",
    "user_cache_dir",
]

TASK_VARIABLE_PREFIX: Final = "DUETASKS_TASK_"
"""Of the variables that tell a command of `duetasks consume --exec` about its task; they are no settings."""

_WORDING: Final = re.compile("^(Input|String|List|Value) should")  # pydantic's words for what the user set


class Fence(StrEnum):
    """How the owner learns what was acknowledged before now: ask for the end offset, or write and read back."""

    OFFSET = "offset"
    WRITE = "write"


def _default_data_dir() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "duetasks"


class Settings(BaseSettings):
    """The settings of every command, agent and client. Unknown variables and keys are refused: most likely typos."""

    model_config = SettingsConfigDict(env_prefix="DUETASKS_", frozen=True, extra="forbid", env_ignore_empty=True)

    bootstrap_servers: str | None = Field(
        None, description="Kafka brokers; unset: the embedded broker of the data folder"
    )
    data_dir: Path = Field(default_factory=_default_data_dir, description="Timer tables, embedded broker, run files")
    cache_dir: Path | None = Field(
        None, description="Kafka's jars for the embedded broker; unset: the user's cache folder"
    )
    topic_prefix: str = Field(
        "", pattern=r"^[a-zA-Z0-9._-]{0,100}$", description="Before each topic name, for several deployments"
    )
    partitions: int = Field(4, ge=1, le=10_000, description="Partitions of every topic when they are created")
    replication_factor: int | None = Field(None, ge=1, le=32_767, description="Unset: the cluster's default, at most 3")
    security_protocol: str = Field(
        "PLAINTEXT",
        pattern="^(PLAINTEXT|SSL|SASL_PLAINTEXT|SASL_SSL)$",
        description="PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL",
    )
    sasl_mechanism: str | None = Field(
        None, pattern="^(PLAIN|SCRAM-SHA-256|SCRAM-SHA-512)$", description="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"
    )
    sasl_username: str | None = Field(None, description="With SASL")
    sasl_password: SecretStr | None = Field(None, description="With SASL; never printed")
    ssl_ca_file: Path | None = Field(None, description="Certificate authority, PEM; unset: the system's")
    ssl_certificate_file: Path | None = Field(None, description="Our certificate, PEM")
    ssl_key_file: Path | None = Field(None, description="Our certificate's key, PEM")

    http_host: str = Field(
        "127.0.0.1", description="Where the agent answers; loopback by default: there is no authentication"
    )
    http_port: int = Field(6066, ge=0, le=65_535, description="0 takes a free one")
    advertised_url: str | None = Field(None, description="How other agents and the CLI reach this one")
    agent_url: str | None = Field(None, description="Which agent the CLI asks; unset: one that runs on the data folder")
    group_id: str = Field("duetasks", min_length=1, description="Consumer group of the agents")
    group_instance_id: str | None = Field(
        None, description="Static membership, for planned restarts without a rebalance"
    )
    session_timeout_ms: int = Field(
        10_000,
        ge=1_000,
        le=300_000,
        description="After so long without a sign of life an agent's partitions go to others",
    )
    transaction_timeout_ms: int = Field(
        10_000, ge=1_000, le=900_000, description="How long a frozen owner's open transaction can hold readers back"
    )
    heartbeat_interval_ms: int = Field(
        60_000, ge=1_000, le=DAY_MS, description="Idle owners renew their claim this often"
    )

    fence: Fence = Field(
        Fence.OFFSET, description="offset or write: how the owner learns what was acknowledged before now"
    )
    batch_records_max: int = Field(2_000, ge=1, le=100_000, description="Input records of one transaction")
    batch_bytes_max: int = Field(4_194_304, ge=1_024, description="Bytes of input records of one transaction")
    fire_max: int = Field(2_000, ge=1, le=100_000, description="Timers that one transaction fires")
    table_memory_bytes: int = Field(
        268_435_456, ge=8_388_608, description="RocksDB cache and write buffers, all partitions"
    )

    horizon_ms: int = Field(3_653 * DAY_MS, ge=1_000, le=2**53, description="How far ahead a task may be due")
    past_max_ms: int = Field(
        366 * DAY_MS,
        ge=0,
        le=2**53,
        description="How long before its own append time a task may be due; older is refused as implausible",
    )
    task_id_bytes_max: int = Field(1_024, ge=1, le=8_192, description="Longest task id, in UTF-8")
    event_bytes_max: int = Field(1_000_000, ge=1_024, le=64 * 1_048_576, description="Key and value of one event")
    retention_ms: int = Field(7 * DAY_MS, ge=0, le=2**53, description="How long finished tasks are remembered")
    clock_jump_max_ms: int = Field(0, ge=0, description="A forward step above this pauses firing; 0: never")
    target_topics: frozenset[str] = Field(
        frozenset(), description="Topics besides due-tasks that tasks may be emitted to"
    )
    log_format: str = Field("console", pattern="^(console|json)$", description="console or json; logs go to stderr")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")

    @field_validator("target_topics")
    @classmethod
    def _no_own_targets(cls, value: frozenset[str]) -> frozenset[str]:
        own = sorted(name for name in value if name in OWN_TOPICS or name.startswith("__"))
        if own:
            raise ValueError(f"{', '.join(own)}: tasks can't be emitted to duetasks' own or internal topics")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # the signature is pydantic's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003  # the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments over variables over the TOML file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_file())

    @property
    def topics(self) -> "TopicNames":
        """The names of the six topics, prefix included."""
        return TopicNames(self.topic_prefix)

    @property
    def limits(self) -> Limits:
        """The bounds of admission, for the SDK and for the agent."""
        return Limits(
            horizon_ms=DurationMs(self.horizon_ms),
            past_max_ms=DurationMs(self.past_max_ms),
            task_id_bytes_max=self.task_id_bytes_max,
            event_bytes_max=self.event_bytes_max,
            target_topics=self.target_topics,
        )

    def client_config(self) -> dict[str, str]:
        """What every librdkafka client needs to reach the cluster; raises `ConfigurationError` without brokers."""
        if self.bootstrap_servers is None:
            raise ConfigurationError(
                "No Kafka brokers are known: set DUETASKS_BOOTSTRAP_SERVERS, or start the embedded one with "
                "`duetasks broker start`."
            )
        found: dict[str, str | Path | None] = {
            "bootstrap.servers": self.bootstrap_servers,
            "security.protocol": self.security_protocol,
            "sasl.mechanism": self.sasl_mechanism,
            "sasl.username": self.sasl_username,
            "sasl.password": self.sasl_password.get_secret_value() if self.sasl_password else None,
            "ssl.ca.location": self.ssl_ca_file,
            "ssl.certificate.location": self.ssl_certificate_file,
            "ssl.key.location": self.ssl_key_file,
        }
        return {name: str(value) for name, value in found.items() if value is not None}

    def with_bootstrap(self, bootstrap_servers: str) -> Self:
        """The same settings with the brokers that were found or started."""
        return self.model_copy(update={"bootstrap_servers": bootstrap_servers})

    def redacted(self) -> dict[str, Any]:
        """All settings as plain values, secrets hidden; for `duetasks config` and the start-up log."""
        return self.model_dump(mode="json")


class TopicNames:
    """The names of duetasks' topics under one prefix."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.events = f"{prefix}task-events"
        self.progress = f"{prefix}task-progress"
        self.state = f"{prefix}task-state"
        self.due = f"{prefix}due-tasks"
        self.dead = f"{prefix}dead-tasks"
        self.applied = f"{prefix}applied-tasks"

    def target(self, target_topic: str) -> str:
        """The topic that a task is emitted to: `due-tasks` unless it names another."""
        return self.due if target_topic in {"", "due-tasks"} else target_topic


def config_file() -> Path:
    """The TOML file that settings are read from, whether it exists or not."""
    return Path(os.environ.get("DUETASKS_CONFIG_FILE", "duetasks.toml"))


def load_settings(**overrides: object) -> Settings:
    """The validated settings; raises `ConfigurationError` that names each wrong one and what it must be.

    `overrides` win over variables and file; those that are None are left out.
    """
    known = {f"DUETASKS_{name.upper()}" for name in Settings.model_fields} | {"DUETASKS_CONFIG_FILE"}
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith("DUETASKS_")
        and name not in known
        and "TEST_" not in name
        # A command that `duetasks consume --exec` runs may call duetasks itself.
        and not name.startswith(TASK_VARIABLE_PREFIX)
    )
    if unknown:
        raise ConfigurationError(
            f"There is no setting {', '.join(unknown)}: see `duetasks config` for those there are."
        )
    if "DUETASKS_CONFIG_FILE" in os.environ and not config_file().is_file():
        raise ConfigurationError(f"DUETASKS_CONFIG_FILE names {config_file()}, which is no file: correct the path.")
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]  # pydantic validates
    except ValidationError as error:
        raise ConfigurationError("; ".join(_faults(error)) + ".") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{config_file()} is no TOML file: {error}.") from error


def _faults(error: ValidationError) -> list[str]:
    """A clause for each wrong setting; never its value, which may be a secret in the wrong place."""
    return [
        f"Setting {'.'.join(str(part) for part in fault['loc'])} "
        + (
            "does not exist: see `duetasks config` for those there are"
            if fault["type"] == "extra_forbidden"
            else "is wrong: " + _WORDING.sub("it should", fault["msg"].removeprefix("Value error, "))
        )
        for fault in error.errors()
    ]


def setting_origins() -> dict[str, str]:
    """Where each setting's value comes from: its variable, the TOML file, or the default."""
    variables = {name.upper() for name, value in os.environ.items() if value}
    in_file = tomllib.loads(config_file().read_text("utf-8")) if config_file().is_file() else {}
    found = dict.fromkeys(Settings.model_fields, "default")
    found |= {name: str(config_file()) for name in in_file}
    return found | {name: variable for name in found if (variable := f"DUETASKS_{name.upper()}") in variables}


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for commands that it starts."""
    return dict(os.environ)


def child_environment(**settings: object) -> dict[str, str]:
    """The environment of a child process: this one's, with these settings in place of what it has; None unsets one."""
    wanted = {f"DUETASKS_{name.upper()}": value for name, value in settings.items()}
    kept = {name: value for name, value in os.environ.items() if name not in wanted}
    return kept | {name: str(value) for name, value in wanted.items() if value is not None}


def user_cache_dir() -> Path:
    """The folder for what can be fetched again, shared by all deployments of this user."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "duetasks"
