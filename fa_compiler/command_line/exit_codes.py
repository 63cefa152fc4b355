"""The exit codes of the command; `fa-compiler --help` says what they mean."""

OK, DIFFERENT, BAD_INPUT, INTERNAL, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
