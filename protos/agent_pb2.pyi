from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Beat(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    def __init__(self, session_id: _Optional[bytes] = ...) -> None: ...

class ExecStart(_message.Message):
    __slots__ = ("version", "time", "session_id", "command", "env", "host_timeout_s")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    HOST_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    time: float
    session_id: bytes
    command: str
    env: _containers.ScalarMap[str, str]
    host_timeout_s: float
    def __init__(self, version: _Optional[str] = ..., time: _Optional[float] = ..., session_id: _Optional[bytes] = ..., command: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., host_timeout_s: _Optional[float] = ...) -> None: ...

class ExecInput(_message.Message):
    __slots__ = ("start", "stdin", "end_of_stdin")
    START_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    END_OF_STDIN_FIELD_NUMBER: _ClassVar[int]
    start: ExecStart
    stdin: bytes
    end_of_stdin: bool
    def __init__(self, start: _Optional[_Union[ExecStart, _Mapping]] = ..., stdin: _Optional[bytes] = ..., end_of_stdin: bool = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("version", "time", "host")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    version: str
    time: float
    host: str
    def __init__(self, version: _Optional[str] = ..., time: _Optional[float] = ..., host: _Optional[str] = ...) -> None: ...

class Exit(_message.Message):
    __slots__ = ("code", "signal")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    code: int
    signal: int
    def __init__(self, code: _Optional[int] = ..., signal: _Optional[int] = ...) -> None: ...

class ExecOutput(_message.Message):
    __slots__ = ("started", "stdout", "stderr", "exit")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    started: Started
    stdout: bytes
    stderr: bytes
    exit: Exit
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., exit: _Optional[_Union[Exit, _Mapping]] = ...) -> None: ...
