"""The table between exceptions and the wire."""

from __future__ import annotations

import grpc
import pytest

from allspan.protos.api import errors
from allspan.protos.api.errors import (
    ERRORS,
    AllspanError,
    InternalError,
    InvalidRequest,
    StatusCode,
    from_code,
    from_grpc,
)


def classes() -> list[type[AllspanError]]:
    """The tree's own; the gateway has one more, for HTTP alone."""
    found: list[type[AllspanError]] = []
    level = AllspanError.__subclasses__()
    while level:
        found += level
        level = [cls for above in level for cls in above.__subclasses__()]
    return [cls for cls in found if cls.__module__ == errors.__name__]


def test_every_class_has_exactly_one_row() -> None:
    assert sorted(row.cls.__name__ for row in ERRORS.values()) == sorted(cls.__name__ for cls in classes())


def test_codes_are_unique_and_are_the_keys() -> None:
    codes = [cls.code for cls in classes()]
    assert len(set(codes)) == len(codes)
    assert all(row.cls.code == code for code, row in ERRORS.items())


def test_statuses_exist() -> None:
    for row in ERRORS.values():
        assert hasattr(grpc.StatusCode, row.grpc)
        assert 400 <= row.http < 600


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_a_code_survives_the_wire(code: str) -> None:
    error = from_code(code, "why")
    assert type(error) is ERRORS[code].cls
    assert error.message == str(error) == "why"


@pytest.mark.parametrize("row", ERRORS.values(), ids=lambda row: str(row.cls.code))
def test_a_grpc_status_comes_back_as_an_error_of_the_same_status(row: errors.ErrorRow) -> None:
    error = from_grpc(row.grpc, "why")
    assert ERRORS[error.code].grpc == row.grpc


def test_unknown_codes_and_statuses_are_named() -> None:
    assert isinstance(from_code("martian", "why"), InternalError)
    assert "martian" in from_code("martian", "why").message
    assert "DATA_LOSS" in from_grpc("DATA_LOSS", "why").message


def test_a_refusal_knows_its_field() -> None:
    assert InvalidRequest("top_p is 2", "top_p").field == "top_p"
    assert InvalidRequest("bad").field is None


def test_every_error_has_the_number_that_dashinfers_users_know() -> None:
    assert {row.cls.__name__: int(row.cls("why").status) for row in ERRORS.values()} == {
        "InvalidRequest": 2,
        "ModelNotFound": 2,
        "AdapterNotFound": 23,
        "AdapterRank": 22,
        "AdapterLoaded": 24,
        "TooManyAdapters": 21,
        "AdapterInUse": 25,
        "CheckpointError": 3,
        "ConfigError": 2,
        "QueueFull": 7,
        "StreamNotRead": 7,
        "RequestCancelled": 5,
        "DeadlineExceeded": 5,
        "Unavailable": 12,
        "AlreadyExists": 10,
        "Unauthenticated": 12,
        "PermissionDenied": 12,
        "InternalError": 1,
    }
    assert [StatusCode.SUCCESS, StatusCode.STREAMING] == [0, 200]
