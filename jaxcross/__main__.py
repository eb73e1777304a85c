"""`python -m jaxcross`: the command line."""

from jaxcross.cli import main

raise SystemExit(main())
