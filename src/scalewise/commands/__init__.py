"""Subcommands of ``scalewise``, one module each."""
