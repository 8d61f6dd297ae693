"""The command line: a file a command, and the config files that it reads."""
