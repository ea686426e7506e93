"""Requests that break RFC 9112, by what they break, and unusual ones that keep it. Made by code, each with a name."""

from __future__ import annotations

from collections.abc import Iterator

BODY = b'{"prompt": "x", "max_tokens": 1}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
SIZE = b"%x" % len(BODY)
END = b"\r\n0\r\n\r\n"

Case = tuple[str, bytes]


def request(
    *lines: bytes, start: bytes = b"POST /v1/completions HTTP/1.1", host: bytes | None = b"Host: x", body: bytes = BODY
) -> bytes:
    """A request for a completion, with `lines` after its first headers."""
    head = [start, *([] if host is None else [host]), b"Content-Type: application/json", *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def sized(*lines: bytes, **parts: bytes | None) -> bytes:
    return request(*lines, LENGTH, **parts)  # type: ignore[arg-type]


def chunked(body: bytes) -> bytes:
    return request(CHUNKED, body=body)


def hosts() -> Iterator[Case]:
    """Host headers that are missing, several or none."""
    yield "no host", sized(host=None)
    yield "two hosts", sized(b"Host: y")
    yield "the same host twice", sized(b"Host: x")
    yield "three hosts", sized(b"Host: y", b"hOsT: z")
    wrong = (
        b"[::1].evil.com|[::1]evil|[::1]x:80|[::1|::1|::1]|[zz]|[1:2]|[]|a b|a\tb|a/b|a\\b|a?b|a#b|a,b|a;b|u@b|u:p@b"
    )
    wrong += b"|x:y|x:-1|x:99999|x:80:80|x:8 0|http://a|a%zz|a%2|<a>|\"a\"|a^b|a|{a}|\xc3\xa9|a\xff|'a'|$(a)|*"
    for host in wrong.split(b"|"):
        if host != b"a":
            yield f"host {host!r}", sized(host=b"Host: " + host)


def chunks() -> Iterator[Case]:
    """Chunked bodies whose sizes or ends are broken."""
    sizes = [b"0x" + SIZE, SIZE + b";", b"-1", b"+" + SIZE, SIZE + b" ", b" " + SIZE, SIZE + b"\t", SIZE + b" x", b""]
    sizes += [b"1g", b"\xb2", b"f" * 16 + b"1", b"f" * 40, b"1" * 65, SIZE + b";a b", SIZE + b';a="', SIZE + b";a\x00b"]
    sizes += [SIZE + b";\x80", SIZE + b"\x00", SIZE + b",", b"1x1", b"2_0", b"#1", SIZE + b"\x0b", b"\x1f", b"zz"]
    for size in sizes:
        yield f"size {size!r}", chunked(size + b"\r\n" + BODY + END)
    yield "bare LF after the size", chunked(SIZE + b"\n" + BODY + END)
    yield "bare LF after an extension", chunked(SIZE + b";a=b\n" + BODY + END)
    yield "bare LF after the data", chunked(SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n")
    yield "bare LF at the end", chunked(SIZE + b"\r\n" + BODY + b"\r\n0\n\n")
    yield "bare CR after the size", chunked(SIZE + b"\r" + BODY + END)
    yield "more data than its size", chunked(SIZE + b"\r\n" + BODY + b"xx" + END)
    yield "less data than its size", chunked(b"%x\r\n" % (len(BODY) + 2) + BODY + END)
    yield "no size after data", chunked(SIZE + b"\r\n" + BODY + b"\r\n\r\n\r\n")
    yield "a trailer without a colon", chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX y\r\n\r\n")
    yield "a trailer with a space before its colon", chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX : y\r\n\r\n")
    yield "a length in the trailer", chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nContent-Length: 5\r\n\r\n")


def lengths() -> Iterator[Case]:
    """Lengths and codings that contradict one another, or are none."""
    for value in (b"+32", b"32,32", b"0x20", b"-1", b"3 2", b"", b"9" * 23, b"32a", b"32.0", b"3e1", b"\xb2", b"32;"):
        yield f"length {value!r}", request(b"Content-Length: " + value)
    yield "two lengths", request(LENGTH, b"Content-Length: 3")
    yield "the same length twice", request(LENGTH, LENGTH)
    whole = SIZE + b"\r\n" + BODY + END
    yield "length before coding", request(LENGTH, CHUNKED, body=whole)
    yield "coding before length", request(CHUNKED, LENGTH, body=whole)
    yield "coding twice", request(CHUNKED, CHUNKED, body=whole)
    yield "coding in HTTP/1.0", request(CHUNKED, start=b"POST /v1/completions HTTP/1.0", body=whole)
    codings = b"gzip|identity|xchunked|chunkedx|chunked;q=1|\x0bchunked|chunked,|,chunked|chunked, gzip|gzip, chunked"
    for value in (codings + b'|chunked, chunked|chunked, identity|"chunked"|chunked\x00|chun ked|').split(b"|"):
        yield f"coding {value!r}", request(b"Transfer-Encoding: " + value, body=whole)


def headers() -> Iterator[Case]:
    """Header lines that no parser may take."""
    lines = [
        b"X-A: b\r\n c",
        b"X-A: b\r\n\tc",
        b"X-A:\r\n c",
        b"X-A: b\x00c",
        b"X\x00A: b",
        b"X-A: b\rc",
        b"X-A: b\x01c",
    ]
    lines += [b"X-A: b\x7fc", b"X-A : b", b"X-A\t: b", b"X-A", b": b", b"X(A: b", b"X\xc3\xa9: b", b"X-A: b\nX-B: c"]
    lines += [b" X-A: b", b"\tX-A: b", b"X A: b", b"X@A: b", b"X/A: b", b"X[A]: b", b"X=A: b", b'X"A: b', b"Host : y"]
    lines += [b"Content-Length : 32", b"Transfer-Encoding\x00: chunked", b"X-A: b\x1b[2J", b"X-A: \x08"]
    for line in lines:
        yield f"line {line!r}", sized(line)
    yield "a space before the first header", sized(host=b" X-A: b\r\nHost: x")
    yield "bare LF everywhere", sized().replace(b"\r\n", b"\n")
    yield "bare CR everywhere", sized().replace(b"\r\n", b"\r")


def starts() -> Iterator[Case]:
    """First lines that are none."""
    target = b"/v1/completions"
    versions = (
        b"HTTP/1.2|HTTP/2.0|HTTP/0.9|HTTP/3.0|HTTP/9.9|HTTP/1.1x|HTTP/01.1|HTTP/1|HTTP/1.|http/1.1|HTTP/ 1.1|HTTP 1.1"
    )
    for version in versions.split(b"|"):
        yield f"version {version!r}", sized(start=b"POST %s %s" % (target, version))
    yield "no version", sized(start=b"POST " + target)
    targets = [target + b"#a", b"#", b"v1/completions", b"/v1/\x00", b"/v1/\xe9", b"/v1/comp letions", b"/v1?a b", b"*"]
    targets += [
        b"http:///v1",
        b"http://[::1].evil/v1",
        b"http://u@x/v1",
        b"ftp://x/v1",
        b"file:///v1",
        b"//",
        b"\\v1",
        b"x:80",
    ]
    targets += [b"http://x:99999/v1", b"http://", b"http:/v1", b"http://a b/", target + b"\x7f", b""]
    for value in targets:
        if value != b"//":
            yield f"target {value!r}", sized(start=b"POST %s HTTP/1.1" % value)
    for method in (
        b"post",
        b"P OST",
        b"\x00POST",
        b"POST\x00",
        b"(POST)",
        b"CONNECT",
        b"\xffPOST",
        b"PO\tST",
        b"FOO",
        b"P",
    ):
        yield f"method {method!r}", sized(start=b"%s %s HTTP/1.1" % (method, target))
    yield "a space before the method", sized(start=b" POST %s HTTP/1.1" % target)
    yield "a tab for a space", sized(start=b"POST\t%s HTTP/1.1" % target)
    yield "a space at the end", sized(start=b"POST %s HTTP/1.1 " % target)


BROKEN = {
    "hosts": hosts,
    "chunks": chunks,
    "lengths": lengths,
    "headers": headers,
    "starts": starts,
}


def sound() -> Iterator[Case]:
    """Unusual requests that must be answered."""
    whole = SIZE + b"\r\n" + BODY + END
    for host in (
        b"x",
        b"x:80",
        b"x:",
        b"[::1]",
        b"[::1]:8000",
        b"127.0.0.1:1",
        b"a_b",
        b"a.b.",
        b"a%41",
        b"",
        b"LOCALHOST",
    ):
        if b"." not in host or host[:1].isdigit():  # others are refused for another reason on loopback without keys
            yield f"host {host!r}", sized(host=b"Host: " + host)
    yield "HTTP/1.0 without a host", sized(start=b"POST /v1/completions HTTP/1.0", host=None)
    yield "HTTP/1.0 with a host", sized(start=b"POST /v1/completions HTTP/1.0")
    yield "the whole URL", sized(start=b"POST http://localhost/v1/completions HTTP/1.1", host=b"Host: other")
    yield "a query", sized(start=b"POST /v1/completions?a=%20b HTTP/1.1")
    yield "a blank line first", b"\r\n" + sized()
    yield "a chunk", chunked(whole)
    yield "an upper-case size", chunked(SIZE.upper() + b"\r\n" + BODY + END)
    yield "leading zeros of a size", chunked(b"0" * 30 + whole)
    yield "an extension", chunked(SIZE + b';a=b;c="d e"\r\n' + BODY + END)
    yield "a trailer", chunked(SIZE + b"\r\n" + BODY + b"\r\n0\r\nX: y\r\n\r\n")
    yield "a byte a chunk", chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n")
    yield "Chunked", request(b"Transfer-Encoding: Chunked", body=whole)
    yield "blanks around a value", sized(b"X-A: \t b \t ")
    yield "bytes beyond ASCII in a value", sized(b"X-A: \xe4\xff")
    yield "an empty value", sized(b"X-A:")
    old = b"POST /v1/completions HTTP/1.0"
    yield "an upgrade in HTTP/1.0", sized(b"Connection: Upgrade", b"Upgrade: h2c", start=old, host=None)
    for kind in (b"h2c", b"websocket"):
        yield (
            f"an upgrade to {kind!r}",
            sized(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + kind, b"HTTP2-Settings: AA"),
        )
