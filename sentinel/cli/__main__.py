"""`python -m sentinel.cli`: the command `sentinel` for machines where scripts are not on the path."""

from sentinel.cli.main import main

main()
