"""The commands of `allspan`, one module each with `run(argv) -> exit code`, imported only when the command is
called."""
