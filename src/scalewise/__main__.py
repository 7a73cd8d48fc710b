"""Entry point of ``python -m scalewise``."""

from scalewise.cli import command

if __name__ == "__main__":
    command()
