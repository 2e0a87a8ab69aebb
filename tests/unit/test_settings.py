"""Settings: where values come from, what is refused, and that passwords stay hidden."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.config import Loaded, describe, load, local_database
from orchestrator.errors import ConfigError
from orchestrator.setting_values import RetryRule
from orchestrator.settings import FIELDS, RELATIONS, Settings, safe_url

MARIADB = "mysql+pymysql://orch:s3cr3t@db:3306/orchestrator"
REDIS = "rediss://:s3cr3t@redis:6379/1"


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "orchestrator.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(cli=None, config_file=None, environ=None):
    """The problems, one per line of the error."""
    with pytest.raises(ConfigError) as caught:
        load(cli or {}, config_file, environ or {})
    assert caught.value.code == "config_invalid"
    head, *problems = str(caught.value).split("\n- ")
    assert head == f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration:"
    return problems


def the_refusal(**given):
    (problem,) = refusal(**given)
    return problem


# Layers.


def test_defaults_are_valid_and_say_so():
    loaded = load(environ={})
    assert loaded.settings == Settings() == Settings(**Settings().model_dump())
    assert set(loaded.sources) == set(FIELDS)
    assert set(loaded.sources.values()) == {"default"}


def test_flag_beats_file_beats_environment_beats_default(config):
    environ = {"ORCH_PORT": "1", "ORCH_WORKER_SLOTS": "11", "ORCH_MAX_CRASHES": "12"}
    path = config("port = 2\nworker_slots = 22\n")
    loaded = load({"port": 3}, path, environ)
    s = loaded.settings
    assert (s.port, s.worker_slots, s.max_crashes, s.job_retry_max) == (3, 22, 12, 5)
    keys = ("port", "worker_slots", "max_crashes", "job_retry_max")
    expected = ["flag", f"file {path}", "environment ORCH_MAX_CRASHES", "default"]
    assert [loaded.sources[key] for key in keys] == expected


def test_a_flag_of_none_is_not_given():
    loaded = load({"port": None, "worker_pool": None}, environ={"ORCH_PORT": "9"})
    assert loaded.settings.port == 9
    assert loaded.sources["port"] == "environment ORCH_PORT"


def test_the_config_file_is_named_by_argument_or_environment(config, tmp_path):
    path, other = config("port = 2"), tmp_path / "other.toml"
    other.write_text("port = 3")
    assert load(environ={"ORCH_CONFIG": str(path)}).settings.port == 2
    assert load(config_file=other, environ={"ORCH_CONFIG": str(path)}).settings.port == 3


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("ORCH_PORT", "4242")
    assert load().settings.port == 4242


def test_a_later_change_of_the_environment_has_no_effect():
    environ = {"ORCH_PORT": "1"}
    settings = load(environ=environ).settings
    environ["ORCH_PORT"] = "2"
    assert settings.port == 1


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        Settings().port = 1
    with pytest.raises(AttributeError):
        load(environ={}).settings = Settings()  # type: ignore[misc]


def test_each_layer_speaks_its_own_types(config):
    text = {"ORCH_WORKER_HANDLERS": "a.b, c", "ORCH_LEASE_TTL_S": "1e2", "ORCH_DATA_DIR": "d"}
    table = config('worker_handlers = ["a.b", "c"]\nlease_ttl_s = 100\ndata_dir = "d"\n')
    flags = {"worker_handlers": ("a.b", "c"), "lease_ttl_s": "100", "data_dir": Path("d")}
    loads = [load(environ=text), load({}, table, {}), load(flags, environ={})]
    expected = Settings(
        worker_handlers=("a.b", "c"), lease_ttl_s=100.0, data_dir=Path("d"), database_url="sqlite:///d/orchestrator.db"
    )
    assert [loaded.settings for loaded in loads] == [expected] * 3


def test_a_database_that_nobody_named_lies_in_the_data_directory(tmp_path, monkeypatch):
    (tmp_path / "my work").mkdir()
    monkeypatch.chdir(tmp_path / "my work")
    assert load(environ={}).settings.database_url == local_database(Path(".data"))
    for where, url in {
        "there": "sqlite:///there/orchestrator.db",
        f"{tmp_path}/my work/there": "sqlite:///there/orchestrator.db",
        f"{tmp_path}/elsewhere": f"sqlite:///{tmp_path}/elsewhere/orchestrator.db",
    }.items():
        loaded = load(environ={"ORCH_DATA_DIR": where})
        assert (loaded.settings.database_url, loaded.nobody_gave("database_url")) == (url, True)
        assert loaded.sources["database_url"] == "default, in data_dir"
    named = load(environ={"ORCH_DATA_DIR": "there", "ORCH_DATABASE_URL": "sqlite:///a.db"})
    assert (named.settings.database_url, named.nobody_gave("database_url")) == ("sqlite:///a.db", False)


def test_a_data_directory_that_can_hold_no_database_is_what_is_refused():
    """Nobody gave a database_url to mend."""
    assert the_refusal(environ={"ORCH_DATA_DIR": "/a b"}) == (
        "data_dir = '/a b' (environment ORCH_DATA_DIR): the database there, 'sqlite:////a b/orchestrator.db', "
        "must hold no whitespace and no control characters; choose another directory, or give database_url"
    )
    assert load(environ={"ORCH_DATA_DIR": "/a b", "ORCH_DATABASE_URL": MARIADB}).settings.data_dir == Path("/a b")


@pytest.mark.parametrize("environ", [{}, {"ORCH_DATABASE_URL": MARIADB}], ids=["local", "named"])
def test_a_data_directory_that_leads_to_itself_is_refused(tmp_path, environ):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert the_refusal(environ={"ORCH_DATA_DIR": str(loop)} | environ).startswith(f"data_dir = '{loop}' (environment")


@pytest.mark.parametrize("environ", [{}, {"ORCH_DATA_DIR": "here"}, {"ORCH_DATA_DIR": "/there"}], ids=str)
def test_nothing_is_found_from_a_working_directory_that_is_gone(tmp_path, monkeypatch, environ):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert the_refusal(environ=environ) == "the working directory does not exist any more; change into one that does"


# Unknown names.


def test_unknown_keys_are_refused_with_what_was_meant(config):
    path = config("worker_slotz = 3\n")
    assert the_refusal(config_file=path) == (f"unknown setting worker_slotz (file {path}); did you mean worker_slots?")
    assert the_refusal(environ={"ORCH_PROT": "1"}) == (
        "unknown setting ORCH_PROT (environment); did you mean ORCH_PORT?"
    )
    assert the_refusal(cli={"hots": "x"}) == "unknown setting hots (flag); did you mean host?"
    assert the_refusal(cli={"qqqqqqqq": 1}) == "unknown setting qqqqqqqq (flag)"


@pytest.mark.parametrize("name", ["ORCH_", "ORCH_port", "ORCH_CONFIG_FILE"])
def test_other_spellings_of_variables_are_unknown(name):
    assert f"unknown setting {name} " in the_refusal(environ={name: "1"})


def test_other_programs_variables_are_not_ours():
    assert load(environ={"PORT": "1", "ORCHESTRA": "x", "orch_port": "2"}).settings == Settings()


def test_a_nested_table_is_not_a_setting(config):
    assert "unknown setting worker " in the_refusal(config_file=config("[worker]\nslots = 3\n"))


# Rules by job type: a table in the file, JSON elsewhere.

RULES = {"embed": RetryRule(max_attempts=3, base_s=0.5), "a.b:c-d": RetryRule(cap_s=9.0)}
RULES_TEXT = '{"embed": {"max_attempts": 3, "base_s": 0.5}, "a.b:c-d": {"cap_s": 9.0}}'


def test_rules_by_type_are_a_table_in_the_file_and_json_elsewhere(config):
    path = config('[retry_by_type.embed]\nmax_attempts = 3\nbase_s = 0.5\n[retry_by_type."a.b:c-d"]\ncap_s = 9.0\n')
    assert load(config_file=path, environ={}).settings.retry_by_type == RULES
    assert load(environ={"ORCH_RETRY_BY_TYPE": RULES_TEXT}).settings.retry_by_type == RULES
    assert load({"retry_by_type": RULES_TEXT}, environ={}).settings.retry_by_type == RULES
    assert load(environ={"ORCH_RETRY_BY_TYPE": ""}).settings.retry_by_type == {}


def test_rules_by_type_survive_the_way_to_a_child():
    settings = Settings(retry_by_type=RULES)
    assert settings.environment().keys() == {"ORCH_DATABASE_URL", "ORCH_RETRY_BY_TYPE"}
    assert load(environ=settings.environment()).settings == settings
    shown = {row.field: row.value for row in describe(Loaded(settings, dict.fromkeys(FIELDS, "default")))}
    assert shown["retry_by_type"] == RULES_TEXT


@pytest.mark.parametrize(
    "text",
    [
        '{"embed": {"max_attempt": 3}}',
        '{"embed": {"max_attempts": 0}}',
        '{"embed": {"max_attempts": 101}}',
        '{"embed": {"max_attempts": 1.5}}',
        '{"embed": {"base_s": 0}}',
        '{"embed": {"base_s": 1e400}}',
        '{"embed": {"base_s": NaN}}',
        '{"embed": {"cap_s": -1}}',
        '{"embed": {"cap_s": "1"}}',
        '{"embed": 3}',
        '{"em bed": {}}',
        '{"": {}}',
        '["embed"]',
        "null",
        "3",
        "embed",
        "{",
        "[" * 100_000,
    ],
)
def test_rules_by_type_that_make_no_sense_are_refused(text):
    """BI-7, BI-22."""
    assert the_refusal(environ={"ORCH_RETRY_BY_TYPE": text}).startswith("retry_by_type = ")


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ('{"base_s": 100, "cap_s": 1}', "base_s = 100.0, cap_s = 1.0"),
        ('{"cap_s": 0.5}', "retry_base_s = 1.0, cap_s = 0.5"),
    ],
)
def test_the_longest_wait_of_a_rule_is_not_below_its_first(rule, values):
    assert the_refusal(environ={"ORCH_RETRY_BY_TYPE": f'{{"good": {{"cap_s": 1}}, "bad": {rule}}}'}) == (
        f"retry_by_type.bad: {values}: the first wait is not above the longest; raise cap_s or lower base_s there"
    )
    with pytest.raises(ValidationError):
        Settings(retry_by_type={"bad": RetryRule.model_validate_json(rule)})


def test_a_rule_that_only_says_a_longer_first_wait_means_it():
    assert load(environ={"ORCH_RETRY_BY_TYPE": '{"slow": {"base_s": 600}}'}).settings.retry_by_type


def test_a_rule_is_not_measured_by_a_refused_value():
    environ = {"ORCH_RETRY_BY_TYPE": '{"a": {"cap_s": 0.5}}', "ORCH_RETRY_BASE_S": "soon"}
    assert the_refusal(environ=environ).startswith("retry_base_s = 'soon'")


def test_a_wrong_rule_is_named():
    message = the_refusal(environ={"ORCH_RETRY_BY_TYPE": '{"embed": {"max_attempt": 3}}'})
    assert message.endswith("(environment ORCH_RETRY_BY_TYPE): embed.max_attempt: is unknown")


# Wrong values.


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("database_url", ""),
        ("database_url", "sqlite"),
        ("database_url", "sqlite://host/file.db"),
        ("database_url", "postgresql://u@h/db"),
        ("database_url", "mysql://u@h"),
        ("database_url", "mysql://u@h:port/db"),
        ("database_url", "mysql://u@h/d b"),
        ("database_url", "mysql://u@h/db\n"),
        ("database_url", "mysql://u@h/db?foo=bar"),
        ("database_url", "mysql://u@h/db?charset=klingon"),
        ("database_url", "mysql://u@h/db?read_timeout=0"),
        ("database_url", "mysql://u@h/db?ssl_ca="),
        ("database_url", "mysql://u@%ff/db"),
        ("database_url", "mysql://u@h,i/db"),
        ("database_url", "sqlite:///x.db?mode=ro"),
        ("database_url", "sqlite://"),
        ("database_url", "sqlite:///"),
        ("database_url", "sqlite:///:memory:"),
        ("database_url", "mysql://u@a..b/db"),
        ("database_url", f"mysql://u@{'a' * 64}.b/db"),
        ("database_url", "mysql://u@h:0/db"),
        ("database_url", "mysql://u:pass@word@h/db"),
        ("database_url", "mysql://u:pass@wo/rd@h/db"),
        ("redis_url", "redis://:pass@word@h/0"),
        ("redis_url", "redis://a..b:1"),
        ("redis_url", "redis://.a"),
        ("redis_url", f"redis://{'a' * 64}"),
        ("redis_url", "redis://127.0.0.1:0"),
        ("redis_url", "http://h"),
        ("redis_url", "redis"),
        ("redis_url", "redis://h:6379/zero"),
        ("redis_url", "redis://h:99999"),
        ("redis_url", "unix://"),
        ("redis_url", "redis://h/123456"),
        ("redis_url", "redis://%ff"),
        ("redis_url", "redis://h?foo=bar"),
        ("redis_url", "redis://h?db=1"),
        ("redis_url", "redis://h?socket_timeout=9999"),
        ("redis_url", "redis://h?decode_responses=true"),
        ("redis_url", "redis://h?retry=5"),
        ("redis_url", "redis://h?client_name="),
        ("redis_url", "redis://h?ssl_ca_certs=/ca.pem"),
        ("redis_url", "unix:///r.sock?db=x"),
        ("redis_url", "unix:///r.sock?db="),
        ("host", "example.org"),
        ("host", ""),
        ("host", "::1%a..b"),
        ("port", "-1"),
        ("port", "65536"),
        ("port", "80.0"),
        ("port", "8_008"),
        ("port", "９"),
        ("port", "9" * 5000),
        ("port", "true"),
        ("data_dir", ""),
        ("data_dir", "a\0b"),
        ("stream_prefix", ""),
        ("stream_prefix", "{tag}:"),
        ("stream_prefix", "a b"),
        ("stream_prefix", "a\u00a0b"),
        ("stream_prefix", "a\x1bb"),
        ("stream_prefix", "a\x9bb"),
        ("job_retry_max", "0"),
        ("job_retry_max", "101"),
        ("leader_lock", ""),
        ("leader_lock", "x" * 65),
        ("leader_lock", "../x"),
        ("leader_trust_margin_s", "0"),
        ("db_timeout_s", "0"),
        ("wait_max_s", "1e400"),
        ("wait_max_s", "nan"),
        ("wait_max_s", "inf"),
        ("wait_max_s", "-1"),
        ("wait_max_s", "1s"),
        ("wait_max_s", "1.2.3"),
        ("wait_max_s", "."),
        ("wait_max_s", ""),
        ("worker_slots", "0"),
        ("worker_slots", "513"),
        ("worker_grace_s", "-0.1"),
        ("worker_pool", ""),
        ("worker_pool", "a/b"),
        ("worker_pool", "x\n"),
        ("worker_pool", "x" * 129),
        ("worker_handlers", "a,,b"),
        ("worker_handlers", "os; rm"),
        ("worker_handlers", ".a"),
        ("gpu_backend", "cuda"),
        ("gpu_backend", "sim:"),
        ("gpu_backend", "sim:0x1"),
        ("gpu_backend", "sim:2x24576,"),
        ("gpu_backend", "sim:99999x1"),
        ("gpu_backend", "sim:" + ",".join(["1x1000000"] * 7)),
        ("gpu_mem_gate_pct", "0"),
        ("gpu_mem_gate_pct", "101"),
        ("redis_block_ms", "0"),
        ("payload_max_depth", "100000"),
        ("kubernetes_url", "https://u@h"),
        ("kubernetes_url", "https://h?x"),
        ("kubernetes_url", "https://h#x"),
        ("otlp_endpoint", "https://h#x"),
        ("otlp_endpoint", "http://a..b:4318"),
        ("kubernetes_url", "https://a..b"),
        ("log_format", "xml"),
        ("log_level", "loud"),
    ],
)
def test_wrong_text_names_key_source_value_and_expectation(key, text):
    name = f"ORCH_{key.upper()}"
    problems = refusal(environ={name: text})
    for problem in problems:
        assert problem.startswith(f"{key} = ")
        assert problem.partition(f" (environment {name}): ")[2]
        assert len(problem) < 400
        assert len(text) > 100 or repr(safe_url(text)) in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", "true"),
        ("port", "80.0"),
        ("port", '"80"'),
        ("wait_max_s", "true"),
        ("wait_max_s", '"1"'),
        ("wait_max_s", "1e400"),
        ("wait_max_s", "nan"),
        ("wait_max_s", "1" + "0" * 400),
        ("host", "127"),
        ("data_dir", "7"),
        ("worker_pool", "[]"),
        ("worker_handlers", '"a"'),
        ("worker_handlers", "[1]"),
        ("log_level", "1979-05-27"),
        ("stream_prefix", "{a = 1}"),
    ],
)
def test_wrong_types_in_the_file_are_refused(config, key, value):
    path = config(f"{key} = {value}\n")
    assert the_refusal(config_file=path).startswith(f"{key} = ")
    assert f"(file {path}): " in the_refusal(config_file=path)


@pytest.mark.parametrize(
    "cli", [{"port": True}, {"port": 8.0}, {"wait_max_s": True}, {"wait_max_s": math.nan}, {"host": b"::1"}]
)
def test_wrong_types_of_flags_are_refused(cli):
    assert the_refusal(cli=cli).startswith(f"{next(iter(cli))} = ")
    assert "(flag): " in the_refusal(cli=cli)


def test_messages_read_like_sentences():
    assert the_refusal(environ={"ORCH_PORT": "eighty"}) == (
        "port = 'eighty' (environment ORCH_PORT): must be a whole number"
    )
    assert the_refusal(cli={"port": 70000}) == "port = 70000 (flag): must be at most 65535"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("host", "0.0.0.0", "no authentication yet"),  # noqa: S104 - that it is refused is the point
        ("host", "10.1.2.3", "loopback"),
        ("redis_url", "redis+sentinel://a,b/x", "does not support redis+sentinel:// yet"),
        ("redis_url", "redis+cluster://a", "does not support redis+cluster:// yet"),
    ],
)
def test_what_comes_later_says_so(key, text, message):
    assert message in the_refusal(cli={key: text})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("database_url", "mysql://u@h/db?charset=utf8mb4", "mysql+pymysql://u@h/db?charset=utf8mb4"),
        ("database_url", "mariadb://u:p%40@h:3307/db", "mysql+pymysql://u:p%40@h:3307/db"),
        ("database_url", MARIADB, MARIADB),
        ("database_url", "sqlite:////abs/x.db", "sqlite:////abs/x.db"),
        ("redis_url", "redis://h", "redis://h"),
        ("redis_url", REDIS, REDIS),
        ("redis_url", "unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        (
            "database_url",
            "mysql+pymysql://u@h/db?ssl_ca=/ca.pem&ssl_verify_cert=true",
            "mysql+pymysql://u@h/db?ssl_ca=/ca.pem&ssl_verify_cert=true",
        ),
        ("database_url", "mysql+pymysql://u@[::1]:1/db", "mysql+pymysql://u@[::1]:1/db"),
        ("redis_url", "rediss://h?ssl_ca_certs=/ca.pem", "rediss://h?ssl_ca_certs=/ca.pem"),
        ("redis_url", "redis://h?client_name=me&password=p", "redis://h?client_name=me&password=p"),
        ("redis_url", "redis://h.example.:1", "redis://h.example.:1"),
        ("host", "::1", "::1"),
        ("host", "127.8.8.8", "127.8.8.8"),
        ("host", "localhost", "localhost"),
        ("port", "0", 0),
        ("port", "65535", 65535),
        ("leader_lock", "Prod.LEADER", "prod.leader"),
        ("worker_grace_s", "0", 0.0),
        ("worker_pool", "gpu:a-1._", "gpu:a-1._"),
        ("worker_handlers", "", ()),
        ("gpu_backend", "sim:2x24576,1x81920", "sim:2x24576,1x81920"),
        ("gpu_backend", "none", "none"),
        ("gpu_backend", "nvml", "nvml"),
    ],
)
def test_accepted_and_normalised(key, text, value):
    assert getattr(load(environ={f"ORCH_{key.upper()}": text}).settings, key) == value


# Files that cannot be read.


@pytest.mark.parametrize(
    "text", ["port 8008", b"\xff\xfe", "port = " + "9" * 5000, "x = " + "[" * 100_000, "port=1\nport=2"]
)
def test_a_file_that_is_not_toml(config, text):
    path = config(text)
    assert the_refusal(config_file=path).startswith(f"the configuration file {path} is not valid TOML: ")


def test_a_missing_file(tmp_path):
    missing = tmp_path / "absent.toml"
    expected = f"cannot read the configuration file {missing}: No such file or directory"
    assert the_refusal(config_file=missing) == expected
    assert the_refusal(environ={"ORCH_CONFIG": str(missing)}) == expected
    assert "Is a directory" in the_refusal(environ={"ORCH_CONFIG": str(tmp_path)})
    assert "Is a directory" in the_refusal(environ={"ORCH_CONFIG": ""})


def test_without_its_file_nothing_is_said_about_relations(config):
    # The file may well hold the worker_timeout_s that makes this heartbeat right.
    environ = {"ORCH_WORKER_HEARTBEAT_S": "20", "ORCH_PORT": "x"}
    problems = refusal(config_file=config("oops"), environ=environ)
    assert [problem.split()[0] for problem in problems] == ["the", "port"]


# Relations. Each case breaks its own relation and no other, so a relation that is gone fails its case.

BROKEN = [
    ({"worker_heartbeat_s": 3.4}, "worker_heartbeat_s = 3.4, worker_timeout_s = 10.0: "),
    ({"lease_ttl_max_s": 59.0}, "lease_ttl_s = 60.0, lease_ttl_max_s = 59.0: "),
    ({"gpu_sample_s": 1.7}, "gpu_sample_s = 1.7, gpu_stale_s = 5.0: "),
    ({"gpu_mem_gate_pct": 14}, "gpu_gate_hysteresis_pct = 5, gpu_mem_gate_pct = 14: "),
    (
        {"leader_trust_margin_s": 8.6},
        "leader_interval_s = 0.5, leader_ttl_s = 10.0, leader_trust_margin_s = 8.6: ",
    ),
    ({"redis_block_ms": 4501}, "redis_block_ms = 4501, redis_timeout_s = 5.0: "),
    ({"claim_idle_ms": 3999}, "worker_heartbeat_s = 2.0, claim_idle_ms = 3999: "),
    ({"lane_window_min": 4097}, "lane_window_min = 4097, lane_window_max = 4096: "),
    ({"retry_cap_s": 0.9}, "retry_base_s = 1.0, retry_cap_s = 0.9: "),
    ({"republish_after_s": 0.9}, "publish_interval_s = 0.5, republish_after_s = 0.9: "),
    ({"retention_results_s": 2_592_001.0}, "retention_results_s = 2592001.0, retention_jobs_s = 2592000.0: "),
    ({"retention_results_s": 0.0}, "retention_results_s = 0.0, retention_jobs_s = 2592000.0: "),
    (
        {"retention_jobs_s": 14.9, "retention_results_s": 14.9},
        "worker_timeout_s = 10.0, retention_jobs_s = 14.9: ",
    ),
]


@pytest.mark.parametrize(("cli", "start"), BROKEN)
def test_a_broken_relation_names_both_values_and_the_way_out(cli, start):
    problem = the_refusal(cli=cli)
    assert problem.startswith(start)
    assert "; raise " in problem and " or lower " in problem
    with pytest.raises(ValidationError):
        Settings(**cli)


def test_every_relation_has_a_case():
    assert len(BROKEN) == len(RELATIONS) + 1  # for ever is longer than anything
    assert {start.split()[0] for _, start in BROKEN} == {relation.short for relation in RELATIONS}


@pytest.mark.parametrize(
    "cli",
    [
        {"worker_heartbeat_s": 0.1, "worker_timeout_s": 0.3},  # 3 * 0.1 is a bit more than 0.3 in binary
        {"lease_ttl_s": 0.1},  # clients' alone
        {"lease_ttl_max_s": 60.0},
        {"gpu_sample_s": 0.1, "gpu_stale_s": 0.3},
        {"gpu_mem_gate_pct": 60, "gpu_gate_hysteresis_pct": 50},
        {"leader_trust_margin_s": 8.5},
        {"redis_block_ms": 4500},
        {"claim_idle_ms": 4000},
        {"lane_window_min": 4096},
        {"retry_cap_s": 1.0},
        {"republish_after_s": 1.0},
        {"retention_results_s": 1.0},
        {"retention_jobs_s": 15.0, "retention_results_s": 15.0},
        {"retention_jobs_s": 0.0},
        {"retention_jobs_s": 0.0, "retention_results_s": 0.0},
    ],
)
def test_the_edge_of_a_relation_is_allowed(cli):
    assert load(cli, environ={}).settings == Settings(**cli)


def test_the_message_of_a_relation():
    assert the_refusal(cli={"worker_heartbeat_s": 5.0, "claim_idle_ms": 60_000}) == (
        "worker_heartbeat_s = 5.0, worker_timeout_s = 10.0: worker_heartbeat_s times 3 must not exceed "
        "worker_timeout_s (two lost heartbeats are no death); "
        "raise worker_timeout_s or lower worker_heartbeat_s"
    )
    assert the_refusal(cli={"redis_block_ms": 4999}) == (
        "redis_block_ms = 4999, redis_timeout_s = 5.0: redis_block_ms plus 0.5 s must not exceed redis_timeout_s "
        "(an idle read is no dead server); raise redis_timeout_s or lower redis_block_ms"
    )
    assert the_refusal(cli={"gpu_mem_gate_pct": 60, "gpu_gate_hysteresis_pct": 65}) == (
        "gpu_gate_hysteresis_pct = 65, gpu_mem_gate_pct = 60: gpu_gate_hysteresis_pct plus 10 % must not exceed "
        "gpu_mem_gate_pct (a closed gate must open when its GPU is idle, which is never quite empty); "
        "raise gpu_mem_gate_pct or lower gpu_gate_hysteresis_pct"
    )


def test_a_worker_that_counts_as_alive_keeps_the_leases_of_its_jobs():
    """Whatever clients get by default. Slots are told a beat less than it (worker/keepalive.py)."""
    assert [Settings(lease_ttl_s=ttl_s).job_lease_ttl_s for ttl_s in (6.0, 60.0)] == [12.5, 12.5]
    slow = Settings(worker_timeout_s=30.0, worker_heartbeat_s=10.0, claim_idle_ms=60_000)
    assert slow.job_lease_ttl_s - slow.worker_heartbeat_s == slow.worker_timeout_s


def test_a_heartbeat_whose_connection_died_has_time_to_be_given_again():
    for timeout_s in (4.0, 10.0, 600.0):
        beat_s = timeout_s / 3
        rare = Settings(
            worker_timeout_s=timeout_s, worker_heartbeat_s=beat_s, claim_idle_ms=600_000, db_timeout_s=600.0
        )
        assert beat_s + rare.heartbeat_limit_s < timeout_s
    assert Settings(db_timeout_s=1.0).heartbeat_limit_s == 1.0
    short = Settings(worker_timeout_s=1.0, worker_heartbeat_s=0.2)
    assert short.heartbeat_limit_s == 2.0, "longer than a session waits for a row"


def test_all_problems_are_reported_together(config):
    path = config('hots = "x"\nworker_slots = 0\nlane_window_min = 5000\n')
    problems = refusal({"prot": 1, "retry_cap_s": 0.5}, path, {"ORCH_NOPE": "1", "ORCH_REDIS_URL": "x"})
    expected = ["ORCH_NOPE", "hots", "prot", "redis_url", "worker_slots", "lane_window_min", "retry_base_s"]
    assert [problem.removeprefix("unknown setting ").split()[0] for problem in problems] == expected


def test_a_refused_value_takes_no_part_in_relations():
    # As a number, the default of 10 s would be too short for this heartbeat; the text says nothing.
    problem = the_refusal(cli={"worker_heartbeat_s": 4.0, "worker_timeout_s": "long"})
    assert problem.startswith("worker_timeout_s = 'long'")


# Passwords.


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://u:s3cr3t@h:1/db?a=b", "mysql://u:***@h:1/db?a=b"),
        ("mysql://u:s3/c@r3:t@h/db", "mysql://u:***@h/db"),
        ("mysql://u:s3\ncr3t@h/db", "mysql://u:***@h/db"),
        ("redis://:s3cr3t@h", "redis://:***@h"),
        ("u:s3cr3t@h/db", "u:***@h/db"),
        ("mysql:/u:s3cr3t@h/db", "mysql:***@h/db"),
        ("unix:///r.sock?db=1&password=s3cr3t&x=y", "unix:///r.sock?db=1&password=***&x=y"),
        ("mysql://u@h/db?PASSWD=s3cr3t@", "mysql://u@h/db?PASSWD=***"),
        ("redis://h?p%61ssword=s3cr3t&client_name=me", "redis://h?p%61ssword=***&client_name=me"),
        ("mysql://u@h/db", "mysql://u@h/db"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("", ""),
    ],
)
def test_safe_url(url, shown):
    assert safe_url(url) == shown


def secretive() -> Loaded:
    return load({"database_url": MARIADB}, environ={"ORCH_REDIS_URL": REDIS})


def test_describe_shows_every_setting_and_no_password():
    rows = {row.field: row for row in describe(secretive())}
    assert list(rows) == list(FIELDS)
    assert all(row.description for row in rows.values())
    assert rows["database_url"].value == "mysql+pymysql://orch:***@db:3306/orchestrator"
    assert rows["database_url"].source == "flag"
    assert (rows["redis_url"].value, rows["redis_url"].source) == (
        "rediss://:***@redis:6379/1",
        "environment ORCH_REDIS_URL",
    )
    assert (rows["port"].value, rows["worker_pool"].value) == ("8008", "")


def test_nothing_printed_holds_a_password():
    loaded = secretive()
    texts = [repr(loaded), str(loaded), repr(loaded.settings), str(loaded.settings), f"{loaded.settings}"]
    assert not [text for text in [*texts, str(describe(loaded))] if "s3cr3t" in text]
    assert "orch:***@db" in repr(loaded.settings)


@pytest.mark.parametrize(
    "cli",
    [
        {"database_url": "postgres://u:s3cr3t@h/db"},
        {"database_url": "mysql://u:s3cr3t@h:x/db"},
        {"database_url": "mysql://u:s3cr3t#x@h/db"},
        {"database_url": "mysql://u:[s3cr3t@h/db"},
        {"database_url": ["mysql://u:s3cr3t@h/db"]},
        {"redis_url": {"password": "s3cr3t"}},
        {"redis_url": "redis+sentinel://:s3cr3t@h"},
        {"redis_url": "redis://h?password=s3cr3t&foo=bar"},
        {"host": "redis://:s3cr3t@h"},
        {"kubernetes_url": "https://:s3cr3t@h"},
        {"kubernetes_url": "https://u:s3cr3t@h"},
        {"kubernetes_url": "https://h?token=s3cr3t"},
        {"otlp_endpoint": "https://:s3cr3t@h"},
        {"otlp_endpoint": "https://h?token=s3cr3t"},
        {"s3cr3t_key": "s3cr3t"},
    ],
)
def test_no_error_holds_a_password(cli):
    with pytest.raises(ConfigError) as caught:
        load(cli, environ={})
    assert "s3cr3t" not in str(caught.value).replace("setting s3cr3t_key", "")
    with pytest.raises(ValidationError) as direct:
        Settings(**cli)
    assert "s3cr3t" not in str(direct.value).replace("s3cr3t_key", "")


# To a child process.

CHANGED: dict[str, Any] = {
    "database_url": MARIADB,
    "redis_url": REDIS,
    "host": "::1",
    "port": 0,
    "data_dir": Path("/var/lib/a dir"),
    "stream_prefix": "é:",
    "leader_lock": "Other",
    "worker_pool": "p:1",
    "worker_handlers": ("a.b", "c"),
    "gpu_backend": "sim:2x24576,1x1",
    "worker_grace_s": 0.0,
    "retry_base_s": 1 / 3,
    "publish_interval_s": 1e-7,
    "log_format": "json",
    "log_level": "debug",
}


def test_of_the_defaults_only_the_database_is_told():
    assert Settings().environment() == {"ORCH_DATABASE_URL": "sqlite:///.data/orchestrator.db"}


def test_a_child_with_another_data_directory_gets_the_database_that_was_chosen():
    settings = load({"data_dir": "x", "database_url": Settings().database_url}, environ={}).settings
    assert load(environ=settings.environment()).settings == settings


def test_environment_gives_the_same_settings():
    settings = Settings(**CHANGED)
    environment = settings.environment()
    assert set(environment) == {f"ORCH_{key.upper()}" for key in CHANGED}
    assert load(environ=environment).settings == settings


def test_every_number_survives_the_round_trip():
    changes: dict[Any, Any] = {int: lambda number: number - 1, float: lambda number: number * 0.9}
    fields = {key: field for key, field in FIELDS.items() if field.annotation in changes}
    settings = Settings(**{key: changes[field.annotation](field.default) for key, field in fields.items()})
    assert settings.environment().keys() - {"ORCH_DATABASE_URL"} == {f"ORCH_{key.upper()}" for key in fields}
    assert len(fields) > 25
    assert load(environ=settings.environment()).settings == settings


def test_a_real_child_process_gets_the_same_settings():
    program = "from orchestrator.config import load; print(load().settings.environment())"
    environment = Settings(**CHANGED).environment()
    environ = {**environment, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUTF8": "1"}
    child = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(environment)
