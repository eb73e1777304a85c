"""The subcommands of `jaxcross`, one a file: `add_parser(subparsers)` and `run(args)`."""
