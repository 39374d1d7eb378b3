"""Settings from the environment, and the starts they stop."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.errors import SettingsError
from pipeline.settings import Settings, load_settings, variable


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(name)


def test_everything_has_a_default() -> None:
    settings = load_settings()
    assert settings.home == Path.home() / ".sluice"
    assert settings.redis_url is None
    assert settings.chunk_tokens == 256


def test_every_field_is_described_in_one_sentence() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CHUNK_TOKENS", "128")
    monkeypatch.setenv("SLUICE_ZSTD_KV", "true")
    monkeypatch.setenv("SLUICE_REDIS_URL", "")
    settings = load_settings()
    assert (settings.chunk_tokens, settings.zstd_kv, settings.redis_url) == (128, True, None)


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MODEL", "other")
    assert load_settings().model == "other"
    assert load_settings(model="mine").model == "mine"


def test_an_unknown_variable_stops_the_start_and_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CHUNK_TOKEN", "128")
    with pytest.raises(SettingsError, match=r"SLUICE_CHUNK_TOKEN is not.*SLUICE_CHUNK_TOKENS"):
        load_settings()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_tokens", "0"),
        ("chunk_tokens", "100"),
        ("chunk_tokens", "1024"),
        ("kv_codec", "fp4"),
        ("max_num_seqs", "many"),
        ("namespace", "a:b"),
        ("lease_s", "0"),
        ("lease_s", "nan"),
        ("log_level", "loud"),
        ("durability", "always"),
    ],
)
def test_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    monkeypatch.setenv(variable(field), value)
    with pytest.raises(SettingsError, match=f"{variable(field)}='{value}'"):
        load_settings()


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(SettingsError, match="SLUICE_MODLE"):
        load_settings(modle="x")


def test_a_child_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path, zstd_kv=True, max_model_len=512, lease_s=0.25, redis_url="unix:///x")
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(home="here", kv_pool_dir="there")
    assert (settings.home, settings.pool_dir) == (tmp_path / "here", tmp_path / "there")


def test_each_home_has_its_own_pool(tmp_path: Path) -> None:
    one, other = (load_settings(home=tmp_path / name).pool_dir for name in "ab")
    assert one != other
    assert one.parent == other.parent == Path("/dev/shm")
    assert one == load_settings(home=tmp_path / "a").pool_dir


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().model = "other"  # pyright: ignore[reportAttributeAccessIssue]
