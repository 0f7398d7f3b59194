"""Command line: one module a subcommand, each with `add_parser(subparsers)` and `run(args) -> exit code`."""
