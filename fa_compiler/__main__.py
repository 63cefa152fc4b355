"""`python -m fa_compiler` is the command `fa-compiler`."""

import sys

from fa_compiler import _end_command

try:
    from fa_compiler.command_line.main import main
except KeyboardInterrupt:
    _end_command()
    raise

if __name__ == "__main__":
    sys.exit(main())
