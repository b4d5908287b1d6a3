"""`python -m kvarts`."""

from kvarts.cli.main import main

main()
