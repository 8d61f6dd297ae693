"""The command line and its config files; a file per command, and one of what is done with stored
results."""
