"""The command line, one file per command, and its config files."""
