"""Settings: what is wrong is said in one line that names the place and the way out."""

import pytest

from pdserve.config import Config, load_config
from pdserve.errors import ConfigError


def load(tmp_path, text):
    path = tmp_path / "pdserve.toml"
    path.write_text(text)
    return load_config(path)


def test_a_file_overrides_the_defaults_and_keeps_the_rest(tmp_path):
    config = load(tmp_path, "[cluster]\nprefill = 2\n[engine]\nkv_cache_mb = 64\n")
    assert config.cluster.prefill == 2
    assert config.engine.kv_cache_mb == 64
    assert config.cluster.decode == Config().cluster.decode


def test_flags_override_the_file(tmp_path):
    config = load(tmp_path, "[cluster]\nprefill = 2\n").override({"cluster": {"prefill": 3}}, "command line")
    assert config.cluster.prefill == 3


def test_an_integer_will_do_for_a_float(tmp_path):
    assert load(tmp_path, "[cluster]\nstart_timeout_s = 30\n").cluster.start_timeout_s == 30.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\nprefil = 2\n", r"pdserve.toml: unknown key cluster.prefil; did you mean 'prefill'\?"),
        ("[clutser]\n", r"pdserve.toml: unknown section \[clutser\]; did you mean 'cluster'\?"),
        ("[cluster]\nzzz = 2\n", "unknown key cluster.zzz; known: decode, prefill"),
        ("[cluster]\nprefill = 'two'\n", "cluster.prefill = 'two': must be of type int"),
        ("[cluster]\nprefill = true\n", "cluster.prefill = True: must be of type int"),
        ("[cluster]\ndecode = 0\n", "cluster.decode = 0: must be at least 1"),
        ("[model]\ndtype = 'int8'\n", "model.dtype = 'int8': must be one of auto, float32, bfloat16"),
        ("[engine]\nmax_step_tokens = 0\n", "engine.max_step_tokens = 0: must be at least 1"),
        ("[transfer]\nwindow_bytes = 100\n", "transfer.window_bytes = 100: must be at least"),
        (
            "[transfer]\nmax_frame_bytes = 67108865\nwindow_bytes = 134217728\n",
            "transfer.max_frame_bytes = 67108865: must be at most 67108864, .*; lower it",
        ),
        (
            "[transfer]\ndeadline_ms = 4999\n",
            r"transfer.deadline_ms = 4999: must be at least transfer.ticket_ttl_ms \(5000\), .*; raise it, or lower",
        ),
        ("cluster = 3\n", r"cluster must be a section: write \[cluster\]"),
        ("[cluster\n", "not valid TOML"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)
