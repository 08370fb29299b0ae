"""What a URL may say, and what is never shown of it."""

from __future__ import annotations

import builtins
import logging
import sys
from pathlib import Path

import pytest
from redis_server import PASSWORD, QUOTED, RedisServer

from quire.errors import ConfigError
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.open import open_remote

pytest.importorskip("redis")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "cannot begin with"),
        ("http://localhost", "cannot begin with 'http'; use one of redis://"),
        ("redis://localhost:port", "cannot be read"),
        ("redis://localhost/cache", "'cache' is no number"),
        ("redis://localhost?tll=3", "unknown option 'tll'; did you mean ttl?"),
        ("redis://localhost?ttl=soon", "ttl=soon is no time"),
        ("redis://localhost?timeout=0", "timeout=0 is no time"),
        ("redis://localhost?ssl_ca_certs=/tmp", "begin the URL with rediss://"),
        ("rediss://localhost?ssl_ca_certs=/no/such/file", "/no/such/file does not exist"),
        ("rediss://localhost?ssl_cert_reqs=maybe", "required, optional or none"),
        ("unix://", "unix:///path"),
        ("unix:///tmp/redis.sock?cluster=1", "names one socket"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=None) as refused:
        open_remote(url, 4096, 16)
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["redis", "mooncake"])
def test_a_missing_package_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(module: str, *args: object, **kwargs: object) -> object:
        if module.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *args, **kwargs)  # type: ignore[arg-type]

    for module in [m for m in sys.modules if m.startswith(("quire.kv.tiers.remote.redis", name))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "quire.kv.tiers.remote.mooncake.url", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'quire\[{name}\]'"):
        open_remote(f"{name}://localhost", 4096, 16)


@pytest.mark.parametrize("text", [PASSWORD, QUOTED])
def test_a_password_is_hidden(text: str) -> None:
    address = Address.parse(f"redis://user:{QUOTED}@cache.example:7000/3?ttl=5")
    assert address.shown == "redis://cache.example:7000/3"
    assert PASSWORD not in repr(address) and QUOTED not in repr(address)
    assert address.hide(f"with {text} it failed") == "with *** it failed"


def test_a_wrong_password_is_told_and_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path, password="another")
    tier = open_remote(f"redis://:{QUOTED}@127.0.0.1:{server.port}/0", 4096, 16)
    with caplog.at_level(logging.DEBUG):
        assert tier.contains([bytes(32)]) == [False]
    told = tier.stats()
    tier.close()
    server.kill()
    assert told["breaker"] == "open" and "invalid username-password" in told["last_error"]
    for text in (str(told), caplog.text, repr(vars(tier)), str(tier)):
        assert PASSWORD not in text and QUOTED not in text
