"""One module a command of `allspan`, each with `run(argv) -> exit code`; imported only when it is asked for."""
