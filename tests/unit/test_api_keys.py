"""API keys: their file, the commands that change it, and whom a router lets in."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.options import key_hashes
from cluster.router.process import tell_who_may_call
from kvpool.core.layout.hashes import tenant_label, tenant_name
from kvrelay.errors import ConfigError, NotAuthenticated
from router.access import door as door_module
from router.access.caller import ANYBODY, NO_KEYS, KeySources, cache_space
from router.access.door import Door
from router.access.key_file import KeyFile, changing
from router.access.keys import ApiKey, dump_keys, key_digest, key_text, parse_keys, presented_key
from router.access.limits import Limits


def key(name: str, tenant: str = "acme", **more: Any) -> ApiKey:
    return ApiKey(id=name, digest=key_digest(f"text of {name}"), tenant=tenant, **more)


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def write(path: Path, *keys: ApiKey) -> None:
    with changing(path) as listed:
        listed[:] = keys


def door(path: Path, **more: Any) -> Door:
    return Door(KeySources(file=str(path)), cluster_key=b"cluster", **more)


# --- the commands ---------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["keys", *arguments])


def added(path: Path, *more: str) -> dict[str, Any]:
    said = run("add", "--file", str(path), "--tenant", "acme", "--format", "json", *more)
    assert said.exit_code == 0, said.output
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keys.json"
    said = run("add", "--file", str(path), "--tenant", "acme")
    assert said.exit_code == 0
    text = said.stdout.strip()
    assert text.startswith("kvr-") and len(text) == 47, "on stdout it is alone"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_text()
    assert text not in content and text[4:] not in content
    assert door(path).caller(bearer(text)).tenant == "acme"


def test_add_list_and_revoke(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "1000")
    first = added(path, "--tier", "gold", "--tier", "free", *limits)
    second = added(path, "--concurrent-requests", "3")
    listed = json.loads(run("list", "--file", str(path), "--format", "json").stdout)
    assert [one["id"] for one in listed] == [first["id"], second["id"]]
    assert listed[0]["tiers"] == ["gold", "free"] and listed[1]["tiers"] == []
    assert (listed[0]["requests_per_minute"], listed[0]["tokens_per_minute"]) == (60, 1000)
    assert listed[1]["concurrent_requests"] == 3
    table = run("list", "--file", str(path)).stdout
    assert "gold, free" in table and "all" in table and first["key"] not in table
    assert run("revoke", "--file", str(path), first["id"]).exit_code == 0
    left = door(path)
    assert left.caller(bearer(second["key"])).key_id == second["id"]
    with pytest.raises(NotAuthenticated):
        left.caller(bearer(first["key"]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("revoke", "no-such"), "has no key no-such: nothing was changed"),
        (("add", "--tenant", "a b"), "--tenant a b: letters, digits"),
        (("add", "--tenant", "a#b"), "--tenant a#b: letters, digits"),
    ],
)
def test_what_can_not_be_done_changes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "keys.json"
    write(path, key("one"))
    before = path.read_bytes()
    said = run(arguments[0], "--file", str(path), *arguments[1:])
    assert isinstance(said.exception, ConfigError) and words in str(said.exception)
    assert path.read_bytes() == before


def test_two_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add_some(first: int) -> None:
        for number in range(first, first + 20):
            with changing(path) as keys:
                keys.append(key(f"k{number}"))

    threads = [threading.Thread(target=add_some, args=(20 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(KeyFile(path).read()) == 60
    assert [one.name for one in tmp_path.iterdir()] == ["keys.json"], "no other file is left"


# --- the file -------------------------------------------------------------------------------


def test_a_file_reads_back_as_it_was_written() -> None:
    limits = Limits(requests_per_minute=1, tokens_per_minute=2, concurrent_requests=3)
    keys = (key("a", tiers=("gold",), limits=limits, created="2026-01-01"), key("b", "other"))
    assert parse_keys(dump_keys(keys), "f") == keys
    assert parse_keys(b"", "f") == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tenant": "a/b"}, "0.tenant: String should match"),
        ({"sha256": "12"}, "0.sha256: String should match"),
        ({"requests_per_minute": 0}, "0.requests_per_minute: Input should be greater"),
        ({"secret": 1}, "0.secret: Extra inputs"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, object], words: str) -> None:
    (entry,) = json.loads(dump_keys([key("a")]))
    with pytest.raises(ConfigError, match="my-file: ") as wrong:
        parse_keys(json.dumps([entry | change]).encode(), "my-file")
    assert words in str(wrong.value)


def test_a_file_is_refused_that_is_not_json_or_names_a_key_twice() -> None:
    with pytest.raises(ConfigError, match="my-file: Invalid JSON"):
        parse_keys(b"{", "my-file")
    with pytest.raises(ConfigError, match="my-file: id: each key once"):
        parse_keys(dump_keys([key("a"), key("a", "other")]), "my-file")


def test_a_file_that_others_may_write_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a"))
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="others may write it: chmod 600"):
        door(path)
    with pytest.raises(ConfigError, match=r"No such file.*kvrelay keys add"):
        door(tmp_path / "absent.json")


# --- the door -------------------------------------------------------------------------------


def test_a_key_comes_as_a_bearer_token_or_as_x_api_key() -> None:
    assert presented_key({"authorization": "Bearer  k "}) == "k"
    assert presented_key({"authorization": "bearer k", "x-api-key": "other"}) == "k"
    assert presented_key({"x-api-key": "k"}) == "k"
    assert presented_key({"authorization": "Basic k"}) == presented_key({}) == ""


def test_without_keys_everybody_is_let_in() -> None:
    assert Door().caller({}) is ANYBODY and Door().caller(bearer("x")) is ANYBODY


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path)
    with pytest.raises(NotAuthenticated, match="no API key: send one"):
        door(path).caller({})
    for text in ("", " ", "x", "text of a"):
        with pytest.raises(NotAuthenticated):
            door(path).caller(bearer(text))
    with pytest.raises(NotAuthenticated):
        door(path).caller(bearer("\udce9"))


def test_keys_without_a_file_are_of_the_default_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a"))
    both = Door(KeySources(file=str(path), digests=(key_digest("mine"),)))
    assert both.caller(bearer("mine")).tenant == "default"
    assert both.caller(bearer("text of a")).tenant == "acme"


def test_a_tier_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a", tiers=("gold",)))
    with pytest.raises(ConfigError, match="API key a: tier gold is none of default"):
        door(path)


def watched(opened: Door, monkeypatch: pytest.MonkeyPatch, *changes: Any) -> None:
    """Each change, once the door has looked at the file after the one before."""

    async def main() -> None:
        monkeypatch.setattr(door_module, "PERIOD_S", 0.001)
        watching = asyncio.create_task(opened.watch())
        for change, seen in changes:
            change()
            async with asyncio.timeout(10):
                while not seen():
                    await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(main())


def lets_in(opened: Door, text: str) -> bool:
    try:
        opened.caller(bearer(text))
    except NotAuthenticated:
        return False
    return True


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a"))
    opened = door(path)
    caplog.set_level("INFO")
    watched(
        opened,
        monkeypatch,
        (lambda: write(path, key("b")), lambda: lets_in(opened, "text of b")),
        (lambda: path.write_text("nonsense"), lambda: "API keys stay as they were" in caplog.text),
        (path.unlink, lambda: "No such file" in caplog.text),
        (lambda: write(path, key("c")), lambda: lets_in(opened, "text of c")),
    )
    assert not lets_in(opened, "text of a") and not lets_in(opened, "text of b")
    assert caplog.text.count("stay as they were") == 2, "each change is told once"


def test_what_a_key_has_used_outlasts_a_change_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a", limits=Limits(requests_per_minute=2)))
    opened = door(path)
    meter = opened.caller(bearer("text of a")).meter
    opened._use([key("a", limits=Limits(requests_per_minute=5)), key("b")])
    assert opened.caller(bearer("text of a")).meter is meter
    assert meter.limits.requests_per_minute == 5


# --- what is a caller's own -------------------------------------------------------------------


def test_no_division_leads_into_another_tenants_cache(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a", "acme"), key("a2", "acme"), key("b", "other"))
    opened = door(path)
    a, a2, b = (opened.caller(bearer(f"text of {name}")) for name in ("a", "a2", "b"))
    assert a.space("") == a2.space("") and a.space("x") == a2.space("x")
    assert len({a.space(""), a.space("x"), b.space(""), b.space("x"), b.space(a.space(""))}) == 5
    assert Door(KeySources(file=str(path)), cluster_key=b"another").caller(
        bearer("text of a")
    ).space("") != a.space("")
    assert cache_space(b"k", "a", "b") != cache_space(b"k", "ab", "")
    assert tenant_name(a.space("x")) == "acme", "by which its share of the time is counted"
    assert tenant_label(a.space("x")) == tenant_label(a.space("")) == tenant_label("acme")


def test_preloads_are_found_where_their_tenants_requests_look(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a", "acme"))
    sources = KeySources(file=str(path), digests=(key_digest("mine"),))
    opened = Door(sources, cluster_key=b"k")
    assert sources.space_of(b"k", "acme") == opened.caller(bearer("text of a")).space("")
    assert sources.space_of(b"k", "") == opened.caller(bearer("mine")).space("")
    assert NO_KEYS.space_of(b"k", "acme") == "acme" == ANYBODY.space("acme")
    assert NO_KEYS.space_of(b"k", "") == "" == ANYBODY.space("")


def test_ids_of_two_tenants_differ(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write(path, key("a", "acme"), key("a2", "acme"), key("b", "other"))
    opened = door(path)
    a, a2, b = (opened.caller(bearer(f"text of {name}")) for name in ("a", "a2", "b"))
    assert a.own_id("r") == a2.own_id("r") != b.own_id("r")
    assert b.own_id(a.own_id("r")) != a.own_id("r")
    assert ANYBODY.own_id("r") == "r"


def test_a_key_has_256_random_bits() -> None:
    assert key_text(bytes(range(32))) == "kvr-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"


# --- at the start -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "guarded", "level", "words"),
    [
        ("127.0.0.1", False, "INFO", "no API keys, so only this machine is served"),
        ("::1", False, "INFO", "no API keys, so only this machine is served"),
        ("localhost", False, "INFO", "no API keys, so only this machine is served"),
        ("0.0.0.0", False, "WARNING", "no API keys, and router.host is 0.0.0.0: whoever"),
        ("10.0.0.7", False, "WARNING", "no API keys, and router.host is 10.0.0.7: whoever"),
        ("0.0.0.0", True, "INFO", "only calls with an API key are served"),
    ],
)
def test_the_start_says_who_may_call(
    caplog: pytest.LogCaptureFixture, host: str, guarded: bool, level: str, words: str
) -> None:
    caplog.set_level("INFO")
    tell_who_may_call(host, guarded=guarded)
    (record,) = caplog.records
    assert record.levelname == level and words in record.getMessage()


def test_keys_of_the_command_line_become_hashes() -> None:
    assert key_hashes(["mine", "other"]) == (key_digest("mine"), key_digest("other"))
    assert key_hashes(None) is key_hashes([]) is None
    for wrong in ("", "two words", "kéy"):
        with pytest.raises(ConfigError, match="--api-key: expected printable ASCII"):
            key_hashes(["mine", wrong])


def test_the_environment_is_read_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrelay.client.routers import api_key_of

    monkeypatch.setenv("KVRELAY_API_KEY", "from there")
    assert api_key_of(None) == "from there" and api_key_of("mine") == "mine"
    assert api_key_of("") == ""
    monkeypatch.delitem(os.environ, "KVRELAY_API_KEY")
    assert api_key_of(None) == ""
