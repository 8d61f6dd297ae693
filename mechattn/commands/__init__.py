"""The command line and its config files: a module for each command, except those for stored
results, which share one."""
