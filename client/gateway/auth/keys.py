"""API keys: their sources, and the callers that they identify. Kept as digests; nothing here reveals a key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from allspan.client.gateway.auth.caller import ANYONE, Caller
from allspan.client.gateway.config import SecurityConfig
from allspan.protos.api.errors import ConfigError, Unauthenticated

logger = logging.getLogger("allspan.gateway")

MAX_KEY_CHARS = 4096
ADMIN = "admin"

HIDDEN = "***"
SHOWN_PREFIX = 16
"""Most characters of a key by which text is searched for it, since text may have only its beginning."""
MIN_HIDDEN = 4
"""Fewest characters of a key that is searched for in text, backslashes not counted."""

_KEY = re.compile(r"[!-+\--~]+")  # what stands in a header as it is, and no comma, which separates keys
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WORD = re.compile(r"[!-~]+")
_FOREIGN = re.compile(r"\b(?:sk|pk|rk|hf|gsk|xai|ghp|glpat|nvapi|r8)[-_][A-Za-z0-9_-]{16,}|(?i:\bbearer +)[!-~]+")
"""Matches keys of other services, which a client may send in the wrong place."""
_HOW = "send it as `Authorization: Bearer KEY`"


class Keys:
    """The API keys, each with its caller. None of users' keys: everybody may ask, with whatever key."""

    def __init__(self, users: Mapping[str, str], admin: str = "") -> None:
        """`users`: key → its name, "" for one that is made of the key's digest. `admin`: "" for none."""
        callers = {
            _digest(key): Caller(name or _short_name(key), cache_key=_cache_key(key)) for key, name in users.items()
        }
        if admin:
            if _digest(admin) in callers:
                raise ConfigError("the admin key is one of the API keys: whoever has that would be the admin")
            callers[_digest(admin)] = Caller(ADMIN, is_admin=True, cache_key=_cache_key(admin))
        self._callers = tuple(callers.items())
        prefixes = [prefix for key in (*users, admin) if len(prefix := _bare(key[:SHOWN_PREFIX])) >= MIN_HIDDEN]
        self._prefixes = frozenset((len(prefix), _digest(prefix)) for prefix in prefixes)
        self.has_users = bool(users)
        self.has_admin = bool(admin)

    def replace(self, other: Keys) -> None:
        """Takes over the keys of another; calls that have come in go on."""
        vars(self).update(vars(other))

    def hide(self, text: str) -> str:
        """Returns a text for the log without these keys, or what looks like another service's."""
        text = _FOREIGN.sub(HIDDEN, text)
        return _WORD.sub(self._hidden, text) if self._prefixes else text

    def _hidden(self, word: re.Match[str]) -> str:
        text, bare = word[0], _bare(word[0])
        lengths = {length for length, _ in self._prefixes}
        for start in range(len(bare)):
            if any((length, _digest(bare[start : start + length])) in self._prefixes for length in lengths):
                places = [place for place, sign in enumerate(text) if sign != "\\"]
                return text[: places[start]] + HIDDEN
        return text

    def find(self, key: str) -> Caller | None:
        """Returns the caller of a key. Takes as long for any key: it compares digests, and all of them."""
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def caller(self, presented: str, is_admin_call: bool = False) -> Caller:
        """Returns the caller of `presented`; Unauthenticated when a key is needed and it is none of them."""
        if (found := self.find(presented)) is not None:
            return found
        if not self.has_users and not (is_admin_call and self.has_admin):
            return ANYONE
        if presented:
            raise Unauthenticated(f"the API key that came with this call is not known here; {_HOW}")
        raise Unauthenticated(f"no API key came with this call; {_HOW}")


def presented_key(authorization: str, x_api_key: str) -> str:
    """The key of a request's headers (or metadata), "" when there is none. Bearer in any case, as RFC 9110 has it."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else x_api_key.strip()


def load_keys(config: SecurityConfig) -> Keys:
    """Reads the keys from flags and files. ConfigError names the flag, the file and the line of what is no key, and
    never the key."""
    users: dict[str, str] = {}
    if config.api_key is not None:
        users |= dict.fromkeys(_checked("--api-key", config.api_key), "")
    if config.api_key_file:
        users |= _read("--api-key-file", config.api_key_file)
    admins = [] if config.admin_api_key is None else _checked("--admin-api-key", (config.admin_api_key,))
    if config.admin_api_key_file:
        admins += _read("--admin-api-key-file", config.admin_api_key_file)
    if len(set(admins)) > 1:
        raise ConfigError("--admin-api-key, --admin-api-key-file: two different admin keys, must be one")
    if any(len(_bare(key[:SHOWN_PREFIX])) < MIN_HIDDEN for key in (*users, *admins)):
        logger.warning(
            "A key has fewer than %d characters: it is easy to guess, and log lines may show it. Use a longer one.",
            MIN_HIDDEN,
        )
    return Keys(users, admins[0] if admins else "")


def _checked(flag: str, keys: Sequence[str]) -> list[str]:
    if not keys:
        raise ConfigError(f"{flag} is given and empty, must hold a key: an unset variable?")
    for key in keys:
        if problem := _problem(key):
            raise ConfigError(f"{flag}: {problem}")
    return list(keys)


def _read(flag: str, path: str) -> dict[str, str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{flag} {path}: {reason}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        *names, key = words
        place = f"{flag} {path}, line {number}"
        if len(names) > 1 or not all(map(_NAME.fullmatch, names)):
            raise ConfigError(f"{place}: must be `KEY` or `NAME KEY`, a name of letters, digits, '.', '_', '-'")
        if problem := _problem(key):
            raise ConfigError(f"{place}: {problem}")
        if names and names[0] in (ADMIN, *found.values()):
            raise ConfigError(f"{place}: the name {names[0]!r} is taken, must be another")
        found[key] = names[0] if names else ""
    if not found:
        raise ConfigError(f"{flag} {path}: holds no key")
    return found


def _problem(key: str) -> str:
    if not key:
        return "a key is empty: an unset variable?"
    if len(key) > MAX_KEY_CHARS:
        return f"a key has {len(key)} characters, at most {MAX_KEY_CHARS}"
    return "" if _KEY.fullmatch(key) else "a key has a blank, a comma or a sign beyond ASCII, which no header carries"


def _bare(text: str) -> str:
    """The text without backslashes: the same for a key and for its escaped form, however often it was escaped."""
    return text.replace("\\", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _cache_key(key: str) -> bytes:
    return hmac.digest(key.encode("utf-8", "surrogateescape"), b"prefix cache", "sha256")


def _short_name(key: str) -> str:
    return f"key-{_digest(key).hex()[:8]}"
