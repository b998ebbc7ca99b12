"""What each command does with its composed configuration: one module a command, one function `run`."""
