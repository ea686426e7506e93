"""What the tokenizers library raises, as errors that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from allspan.protos.api.errors import AllspanError, CheckpointError


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turns what the library raises into a CheckpointError that begins with `what`: plain Exceptions, and the panics of
    its compiled part, which are no Exceptions."""
    try:
        yield
    except (AllspanError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{what}: {lines[0]}") from error


def is_panic(error: BaseException) -> bool:
    """Whether the compiled part of the library has raised it."""
    return type(error).__name__ == "PanicException"
