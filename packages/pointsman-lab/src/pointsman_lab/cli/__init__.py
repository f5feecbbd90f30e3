"""The command line: one file a command, no logic that the library lacks."""
