"""The OpenAI endpoints of a server over HTTP, allspan's or another's: models, chat completions, completions."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from allspan.client.transport.public import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Access, Message, Piece, Pieces
from allspan.protos.api.errors import (
    ERRORS,
    AllspanError,
    ConfigError,
    InternalError,
    ModelNotFound,
    Unavailable,
    from_code,
)
from allspan.protos.cluster.tls import is_loopback

_UNSENT = ("logprobs", "prompt_logprobs")
"""Fields that mean something else in one of the endpoints; what they add is not shown here anyway."""
_MAX_ERROR_BYTES = 65536


class HttpServer:
    """A server at a URL, with or without `/v1` at its end."""

    def __init__(self, url: str, access: Access, model: str = "") -> None:
        """Asks for the model's name; requests go to `model` instead if it is given. ConfigError for what is no URL,
        Unavailable when nobody answers."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--attach is {url!r}, must be http://HOST:PORT or https://HOST:PORT")
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._key = access.key
        handlers: list[Any] = [urllib.request.HTTPSHandler(context=_context(access))] if parts.scheme == "https" else []
        if is_loopback(parts.hostname):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        with self._open("models", None, CONNECT_TIMEOUT_S) as response:
            listed = _json(response.read())
        try:
            self._model = model or str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ModelNotFound(f"{self._base}/models lists no model") from None

    @property
    def model(self) -> str:
        return self._model

    def chat(self, messages: Sequence[Message], fields: Mapping[str, Any]) -> Pieces:
        return self._stream("chat/completions", {"messages": list(messages)}, fields)

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Pieces:
        return self._stream("completions", {"prompt": prompt}, fields)

    def close(self) -> None:
        self._opener.close()

    def _stream(self, path: str, prompt: Mapping[str, Any], fields: Mapping[str, Any]) -> Pieces:
        options = {name: value for name, value in fields.items() if name not in _UNSENT}
        body = {"model": self._model, **prompt, **options, "stream": True, "stream_options": {"include_usage": True}}
        reason = ""
        usage: dict[str, Any] = {}
        with self._open(path, body, ANSWER_TIMEOUT_S) as response:
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or []:
                    reason = choice.get("finish_reason") or reason
                    if text := _text(choice):
                        yield Piece(text)
        if not reason:
            raise Unavailable(f"{self._base} ended the answer before it was complete")
        counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        yield Piece(finish_reason=reason, prompt_tokens=counts[0], output_tokens=counts[1])

    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(f"{self._base}/{path}", data, headers)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(_MAX_ERROR_BYTES), f"{self._base}/{path}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", None) or error
            raise Unavailable(f"no server answers at {self._base}: {cause}") from None
        return response


def _context(access: Access) -> ssl.SSLContext:
    """Raises ConfigError for files that cannot be read."""
    tls = access.tls
    try:
        context = ssl.create_default_context(cafile=tls.ca_certs or None)
        if tls.certfile:
            context.load_cert_chain(tls.certfile, tls.keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the files for TLS cannot be read: {error}") from None
    return context


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the objects of a stream of server-sent events. Raises the error that one of them reports."""
    try:
        for line in response:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            event = _json(data)
            if error := event.get("error"):
                raise _error_of(error, 500)
            yield event
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"the connection broke during the answer: {error or type(error).__name__}") from None


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InternalError(f"the server sent what is no JSON object: {data[:80]!r}")
    return value


def _refusal(status: int, body: bytes, url: str) -> AllspanError:
    with suppress(InternalError):
        if error := _json(body).get("error"):
            return _error_of(error, status)
    return _by_status(status, f"{url} answered with status {status}; is it the address of an OpenAI-compatible server?")


def _error_of(error: Any, status: int) -> AllspanError:
    if not isinstance(error, dict):
        return _by_status(status, str(error))
    message, code = str(error.get("message") or error), error.get("code")
    return from_code(code, message) if code in ERRORS else _by_status(status, message)


def _by_status(status: int, message: str) -> AllspanError:
    row = next((row for row in ERRORS.values() if row.http == status), None)
    return row.cls(message) if row is not None else InternalError(message)
