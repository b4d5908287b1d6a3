"""`python -m kvarts`."""

from kvarts.cli.main import run

run()
