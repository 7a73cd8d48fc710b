"""``python -m scalewise`` is ``scalewise``."""

from scalewise.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()
