"""`python -m fa_compiler` is the command `fa-compiler`."""

import sys

from fa_compiler.command_line.main import main

if __name__ == "__main__":
    sys.exit(main())
