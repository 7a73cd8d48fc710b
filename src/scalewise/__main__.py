"""``python -m scalewise`` is ``scalewise``."""

from scalewise.cli import command

if __name__ == "__main__":
    command()
